"""Print, as JSON, what one decode rank spends on a handshake and on the descriptors of one request: stock, per-region patch and both
patches, at the size of gemma-4-31B. Run by the environment with both patches, told where the packages of the other two are.

The three nixl packages live in this one process and take turns. Pools are equally large with the manager on and off.
"""

from __future__ import annotations

import gc
import json
import statistics
import sys
import time
from itertools import count
from pathlib import Path
from typing import Any

import conftest  # noqa: F401 - the environment of vLLM's import
from measure_patch import load_pair, shuffled, spread, uncheck
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend

ROUNDS, WARM_UP = 200, 3
LAYERS, GROUPS = 60, 6
TOKENS, WINDOW, BLOCK = 32768, 1024, 64
# Blocks of the pool with the manager off; a page of the manager on is a sixth of them.
POOL = 1024
# "again" is stock against itself: what the machine adds to a ratio.
ALL = ("stock", "again", "per-region", "both")
# What is compared: the first of each row is what the others are divided by.
ROWS = {
    "16/4 TP2 -> TP4, manager off": [(kind, 16, 4, 2, 4, False) for kind in ALL],
    "16/4 TP2 -> TP4, manager on": [(kind, 16, 4, 2, 4, True) for kind in ALL],
    "TP4 -> TP8": [("stock", 16, 16, 4, 8, False), ("per-region", 16, 4, 4, 8, False), ("both", 16, 4, 4, 8, True)],
}


def prepare(module: Any) -> Any:
    """The harness with the first rank of each engine only, and pages in the byte order of FLASH_ATTN."""

    class FirstRank(module.Engine):
        def _start_rank(self, rank: int) -> None:
            if rank == 0:
                super()._start_rank(rank)

    module.Engine = FirstRank
    module.CPUAttentionBackend = FlashAttentionBackend
    return module


class Subject:
    """One pair: handshakes with its first prefill rank, and requests of TOKENS tokens."""

    def __init__(self, module: Any, sliding: int, full: int, p: int, d: int, on: bool) -> None:
        geometry = module.Geometry(sliding, full, layers=LAYERS, head_dim=2, global_head_dim=4)
        settings = module.Settings(block_size=BLOCK, num_blocks=POOL * (GROUPS if on else 1), hybrid=on)
        self.made, self.module, self.p = module.Pair(geometry, p, d, settings, settings), module, p
        self.worker = self.made.decode.workers[0]
        self.made.prefill.listen()
        agent = self.worker.nixl_wrapper
        uncheck(agent)
        self.posted, handles = 0, count(1)

        def post(op: str, local: int, ours: Any, remote: int, theirs: Any, notif_msg: bytes = b"") -> int:
            assert len(ours) == len(theirs)
            self.posted = len(ours)
            return next(handles)

        agent.make_prepped_xfer, agent.transfer = post, lambda handle: "PROC"
        self.names = count()
        self.tables = [self._tables(engine, wanted) for engine, wanted in ((self.made.decode, False), (self.made.prefill, True))]

    def _tables(self, engine: Any, source: bool) -> list[list[int]]:
        """Block ids as vLLM's schedulers hand them over: of sliding layers decode wants the window, prefill offers a block more."""
        tables, first = [], 1
        for group in engine.kv_config.kv_cache_groups:
            size, window = group.kv_cache_spec.block_size, getattr(group.kv_cache_spec, "sliding_window", None)
            blocks = -(-TOKENS // size)
            if window is not None:
                blocks = WINDOW // size + 1 if source else blocks - (TOKENS - WINDOW + 1) // size
            tables.append(list(range(first, first + blocks)))
            first += blocks
        return tables

    def handshake(self) -> float:
        started = time.process_time()
        self.worker._nixl_handshake("127.0.0.1", self.made.prefill.port, self.p, "prefill")
        return time.process_time() - started

    def forget(self) -> None:
        self.worker._remote_agents["prefill"] = {}
        self.worker._cleanup_remote_engine("prefill", log_eviction=False)

    def request(self) -> float:
        name = f"r{next(self.names)}"
        params = {
            "remote_block_ids": self.tables[1],
            "remote_engine_id": "prefill",
            "remote_request_id": name,
            "remote_host": "127.0.0.1",
            "remote_port": self.made.prefill.port,
            "tp_size": self.p,
            "remote_num_tokens": TOKENS,
        }
        metadata = self.module.NixlConnectorMetadata()
        metadata.add_new_req_to_recv(name, self.tables[0], params, (0,) * len(self.tables[0]), awaiting_kvs=True)
        started = time.process_time()
        self.worker.start_load_kv(metadata)
        spent = time.process_time() - started
        assert self.worker._recving_transfers.pop(name)
        self.worker._recving_metadata.clear()
        return spent

    def once(self) -> tuple[float, float]:
        handshake = self.handshake()
        # As _nixl_handshake's caller does.
        self.worker._remote_agents["prefill"] = {(0, 0): "prefill/0"}
        request = self.request()
        self.forget()
        return handshake, request


def measure(modules: dict[str, Any]) -> list[dict[str, Any]]:
    found = []
    gc.collect()
    gc.disable()
    for row, kinds in ROWS.items():
        subjects = [Subject(modules[kind], *pair) for kind, *pair in kinds]
        times: list[list[tuple[float, float]]] = [[] for _ in subjects]
        for _ in range(WARM_UP + ROUNDS):
            for i in shuffled(range(len(subjects))):
                times[i].append(subjects[i].once())
        for i, (kind, *pair) in enumerate(kinds):
            entry: dict[str, Any] = {"row": row, "kind": kind, "pair": pair, "descriptors": subjects[i].posted}
            for at, what in enumerate(("handshake", "request")):
                ours, first = ([spent[at] for spent in times[j][WARM_UP:]] for j in (i, 0))
                entry[f"{what}_ms"] = 1000 * statistics.median(ours)
                entry[f"{what}_ratio"] = spread(ours, first)
            found.append(entry)
        for subject in subjects:
            subject.made.close()
    gc.enable()
    return found


if __name__ == "__main__":
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl as installed

    folders = {
        "stock": Path(sys.argv[1]),
        "again": Path(sys.argv[1]),
        "per-region": Path(sys.argv[2]),
        "both": Path(installed.__file__).parent,
    }
    json.dump(measure({name: prepare(load_pair(f"pair_{name}", folder)) for name, folder in folders.items()}), sys.stdout)
