"""What the link between two GPUs of this machine gives: plain copies, and NIXL reads cut as a hand-over cuts them.

Run with the Python of an engine environment. For each size: one torch copy between two GPUs of one process (the driver's
peer-to-peer path), and reads by one NIXL agent from an agent of another process, in descriptors that are contiguous on both
sides (blocks of equal TP sizes), or strided on the far side (every other half page: a head slice of a bigger page).
One JSON object per line on stdout.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import multiprocessing.connection
import os
import time
from statistics import median

import torch

THREADS = 4
"""UCX worker threads of an agent; vLLM's connector asks for as many."""


def device(index: int) -> str:
    return f"cuda:{index}" if torch.cuda.is_available() else "cpu"


def synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def peer_copy(size: int, source: int, target: int, repeats: int) -> dict[str, object]:
    """One whole-buffer copy between two GPUs, timed around a synchronize."""
    a = torch.randint(0, 255, (size,), dtype=torch.uint8, device=device(source))
    b = torch.empty(size, dtype=torch.uint8, device=device(target))
    times = []
    for _ in range(repeats + 2):
        synchronize()
        began = time.perf_counter()
        b.copy_(a, non_blocking=True)
        for place in {source, target}:
            if torch.cuda.is_available():
                torch.cuda.synchronize(place)
        times.append(time.perf_counter() - began)
    correct = bool((b[:: max(1, size // 4096)].cpu() == a[:: max(1, size // 4096)].cpu()).all())
    seconds = median(times[2:])
    return {
        "kind": "peer copy",
        "bytes": size,
        "from": source,
        "to": target,
        "ms": round(seconds * 1e3, 3),
        "gb_s": round(size / seconds / 1e9, 1),
        "correct": correct,
    }


def serve(index: int, size: int, pipe: multiprocessing.connection.Connection, visible: str) -> None:
    """The far side: registers a buffer, says where it is, and stays until told to end."""
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    from nixl._api import nixl_agent, nixl_agent_config

    agent = nixl_agent(f"far-{os.getpid()}", nixl_agent_config(backends=["UCX"], num_threads=THREADS))
    buffer = (torch.arange(size // 8, dtype=torch.int64, device=device(index)) * 2654435761).view(torch.uint8)
    agent.register_memory(buffer)
    synchronize()
    pipe.send((agent.get_agent_metadata(), buffer.data_ptr(), index if torch.cuda.is_available() else 0))
    while pipe.poll(300):
        if pipe.recv() == "end":
            return
        pipe.send(agent.get_new_notifs() is not None)


def nixl_reads(args: argparse.Namespace) -> list[dict[str, object]]:
    from nixl._api import nixl_agent, nixl_agent_config

    context = multiprocessing.get_context("spawn")
    size = max(args.sizes)
    here, there = context.Pipe()
    far = context.Process(
        target=serve, args=(args.far_index if args.far_visible else args.source, 2 * size, there, args.far_visible), daemon=True
    )
    far.start()
    agent = nixl_agent(f"near-{os.getpid()}", nixl_agent_config(backends=["UCX"], num_threads=THREADS))
    buffer = torch.zeros(size, dtype=torch.uint8, device=device(args.target))
    agent.register_memory(buffer)
    if not here.poll(120):
        raise SystemExit("the far agent did not come up")
    metadata, far_base, far_index = here.recv()
    peer = agent.add_remote_agent(metadata)
    kind = "VRAM" if torch.cuda.is_available() else "DRAM"
    rows = []
    for total in args.sizes:
        for piece in args.pieces:
            for stride in (1, 2):
                if piece <= total:
                    rows.append(
                        one_read(
                            agent,
                            peer,
                            kind,
                            (buffer, far_base, far_index, args.target if torch.cuda.is_available() else 0),
                            total,
                            piece,
                            stride,
                            args.repeats,
                        )
                    )
    here.send("end")
    far.join(20)
    return rows


def one_read(agent, peer, kind, place, total, piece, stride, repeats):  # type: ignore[no-untyped-def]
    buffer, far_base, far_index, near_index = place
    count = total // piece
    near = agent.get_xfer_descs([(buffer.data_ptr() + i * piece, piece, near_index) for i in range(count)], kind)
    far = agent.get_xfer_descs([(far_base + i * piece * stride, piece, far_index) for i in range(count)], kind)
    local, remote = agent.prep_xfer_dlist("NIXL_INIT_AGENT", near), agent.prep_xfer_dlist(peer, far)
    ids = list(range(count))
    posts, times = [], []
    for _ in range(repeats + 1):
        handle = agent.make_prepped_xfer("READ", local, ids, remote, ids, b"")
        began = time.perf_counter()
        state = agent.transfer(handle)
        posted = time.perf_counter()
        while state == "PROC":
            state = agent.check_xfer_state(handle)
        times.append(time.perf_counter() - began)
        posts.append(posted - began)
        agent.release_xfer_handle(handle)
        if state != "DONE":
            return {"kind": "nixl read", "bytes": total, "piece": piece, "stride": stride, "error": state}
    agent.release_dlist_handle(local)
    agent.release_dlist_handle(remote)
    synchronize()
    words = buffer[:total].view(torch.int64).view(count, piece // 8)[:, 0].cpu()
    expected = torch.arange(count, dtype=torch.int64) * (piece * stride // 8) * 2654435761
    seconds = median(times[1:])
    return {
        "kind": "nixl read",
        "bytes": total,
        "piece": piece,
        "stride": stride,
        "descriptors": count,
        "ms": round(seconds * 1e3, 3),
        "post_ms": round(median(posts[1:]) * 1e3, 3),
        "gb_s": round(total / seconds / 1e9, 1),
        "correct": bool((words == expected).all()),
    }


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--sizes", type=int, nargs="+", required=True, help="bytes")
    parser.add_argument("--pieces", type=int, nargs="+", required=True, help="bytes of one descriptor")
    parser.add_argument("--source", type=int, default=0)
    parser.add_argument("--target", type=int, default=1)
    parser.add_argument(
        "--far-visible", default="", help="CUDA_VISIBLE_DEVICES of the far process, to see whether hiding GPUs costs the fast path"
    )
    parser.add_argument("--far-index", type=int, default=0, help="index of the far GPU within --far-visible")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    rows = [] if args.far_visible else [peer_copy(size, args.source, args.target, args.repeats) for size in args.sizes]
    for row in rows + nixl_reads(args):
        print(json.dumps({**row, **({"far_visible": args.far_visible} if args.far_visible else {})}), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
