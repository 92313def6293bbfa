"""Real shapes with random weights: what the hand-over costs between unequal and equal TP sizes, and what the link could give.

Engines of one shape, each a producer and a consumer. With four GPUs they lie so that no decode rank reads from its own GPU:
  A2 on GPUs 0,1   A4 on 0,1,3,2   B4 on 1,2,0,3   B2 on 2,3
so A2 -> B4 is the mixed pair, A4 -> B4 moves the same bytes into the same engine from equal TP, and A2 -> B2 is the other
homogeneous pair. With two GPUs the halved shapes stand in (per rank they are the published ones at TP 2 and 4):
  A1 on GPU 0   A2 on 0,1   B2 on 1,0   C2 on 0,1
where one rank of A1 -> B2 reads from the other GPU and one from its own, A2 -> B2 reads only from the other, A2 -> C2 only from its own.
Every engine sees all GPUs. Engines of the stock environment show what the patch changes, with fewer layers where memory is short.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from . import geometry
from .correctness import predicted
from .servers import Fleet, Running, Server
from .tables import aligned
from .two_step import ask, counters, settled

# Engine -> its TP size and the order of GPUs in which it sees the machine.
PLACES = {
    "A1": (1, (0, 1)),
    "A2": (2, (0, 1, 2, 3)),
    "A4": (4, (0, 1, 3, 2)),
    "B4": (4, (1, 2, 0, 3)),
    "B2": (2, (2, 3, 0, 1)),
    "C2": (2, (0, 1)),
}
B2_OF_TWO = (1, 0)
# Shape -> (setting, producer, consumer): mixed first, then equal TP sizes, then the other direction. A setting is an environment with,
# after it, what differs from block size 64 and the hybrid KV cache manager off: -b256, -hybrid.
PAIRS = {
    "gemma4-26b-a4b": [
        ("stock", "A2", "B4"),
        ("per-region", "A2", "B4"),
        ("per-region", "A4", "B4"),
        ("per-region", "A2", "B2"),
        ("per-region", "B4", "A2"),
        ("per-region-b256", "A2", "B4"),
        ("per-region-b256", "A4", "B4"),
        ("per-group-hybrid", "A2", "B4"),
    ],
    "gemma4-31b": [("stock", "A2", "B4"), ("stock", "A4", "B4")],
    "gemma4-26b-a4b-half": [
        ("stock", "A1", "B2"),
        ("per-region", "A1", "B2"),
        ("per-region", "A2", "B2"),
        ("per-region", "A2", "C2"),
        ("per-region", "B2", "A1"),
        ("per-region-b256", "A1", "B2"),
        ("per-region-b256", "A2", "B2"),
        ("per-region-b256", "A2", "C2"),
        ("per-group-hybrid", "A1", "B2"),
    ],
    "gemma4-31b-half": [("stock", "A1", "B2"), ("stock", "A2", "B2"), ("stock", "A2", "C2")],
    "small": [("per-region", "A2", "B4"), ("per-region", "B4", "A2")],
}
MIXED = {("A2", "B4"), ("A1", "B2")}
# Fewer layers than published where all engines must fit the memory of the GPUs at once: a handshake is refused, and a block has the same
# bytes, however many layers there are.
LAYERS = {
    ("gemma4-26b-a4b", "stock"): 12,
    ("gemma4-31b", "stock"): 18,
    ("gemma4-26b-a4b-half", "stock"): 6,
    ("gemma4-31b-half", "stock"): 6,
}
# A quarter of the published experts, so that the engines of every setting fit beside each other; the cache does not know of experts.
EXPERTS = {"gemma4-26b-a4b": 32, "gemma4-26b-a4b-half": 32}
OUT_TOKENS = 4


@dataclass(frozen=True)
class Pair:
    """One ordered pair of engines of one setting."""

    shape: str
    setting: str
    producer: str
    consumer: str

    @property
    def names(self) -> tuple[str, str]:
        return f"{self.shape}.{self.setting}.{self.producer}", f"{self.shape}.{self.setting}.{self.consumer}"

    @property
    def row(self) -> dict[str, Any]:
        return {"shape": self.shape, "env": self.setting, "pair": f"{self.producer}->{self.consumer}"}


def step(fleet: Fleet, args: argparse.Namespace, record: dict[str, Any]) -> None:
    """All engines of all shapes are started together and stay up; only one pair is asked at a time."""
    shapes = args.sizes or (["gemma4-26b-a4b", "gemma4-31b"] if args.gpus >= 4 else ["gemma4-26b-a4b-half", "gemma4-31b-half"])
    pairs = [Pair(shape, *pair) for shape in shapes for pair in PAIRS[shape] if not args.settings or pair[0] in args.settings]
    servers: dict[str, Server] = {}
    for pair in pairs:
        if all(PLACES[end][0] <= args.gpus for end in (pair.producer, pair.consumer)):
            for name, end in zip(pair.names, (pair.producer, pair.consumer), strict=True):
                servers.setdefault(name, _server(args, pair.shape, pair.setting, end, name))
    for server in servers.values():
        fleet.start(server)
    bad = fleet.wait(list(servers), args.start_s)
    record["servers"] = {
        name: {"ready_s": fleet.running[name].ready_s, "error": bad.get(name, ""), "layers": _layers(s), "gpus": s.gpus[: s.tp]}
        for name, s in servers.items()
    }
    usable = [pair for pair in pairs if all(name in servers and name not in bad for name in pair.names)]
    why = "a server did not start, or there are too few GPUs"
    record["pairs"] = [pair.row | {"state": "not run", "why": why} for pair in pairs if pair not in usable]
    record["copy_limit"] = []
    end = time.monotonic() + args.measure_s
    for length in args.lengths:
        usable = _rounds(fleet, args, record, usable, length, end)
    record["rates_against_equal_tp"] = against_equal_tp(record["pairs"])
    record["transports"] = sorted({t for name in servers if name not in bad for t in transports(fleet.running[name])})
    if args.device == "cuda" and not args.no_copy_limit and args.gpus > 1:
        record["copy_limit"] = copy_limit(args, record["pairs"])


def _server(args: argparse.Namespace, shape: str, setting: str, end: str, name: str) -> Server:
    tp, order = PLACES[end]
    if end == "B2" and args.gpus == 2:
        order = B2_OF_TWO
    env = setting.removesuffix("-hybrid").removesuffix("-b256")
    layers, experts = args.layers or LAYERS.get((shape, env), 0), EXPERTS.get(shape, 0)
    folder = args.out / "models" / f"{shape}-{layers or 'all'}"
    model = geometry.write(shape, folder, args.project / args.model, layers, experts)
    gpus = tuple(g for g in order if g < args.gpus) + tuple(range(len(order), args.gpus))
    longest = max(args.lengths) + 256
    return Server(
        name=name,
        env=f"{args.env_prefix}-{env}",
        model=model,
        tp=tp,
        gpus=gpus,
        kv_mib=_kv_mib(model, tp, longest),
        max_model_len=longest,
        max_batched_tokens=8192,
        max_seqs=8,
        dtype=args.dtype,
        block_size=256 if setting.endswith("-b256") else 64,
        hybrid_manager=setting.endswith("-hybrid"),
        dummy=True,
        # The protocol report names the transports that UCX chose; it goes to the engine's log.
        variables={"UCX_PROTO_INFO": "y"} if end in ("B4", "B2") else {},
    )


def _kv_mib(model: Path, tp: int, tokens: int) -> int:
    """Room for one prompt of the longest length and a quarter in one rank, with the hybrid manager off."""
    config = json.loads((model / "config.json").read_text(encoding="utf-8"))
    per_token = 0
    for i in range(config["num_hidden_layers"]):
        own = config["per_layer_config"].get(str(i), {})
        heads = own.get("num_key_value_heads", config["num_key_value_heads"])
        per_token += max(1, heads // tp) * own.get("head_dim", config["head_dim"]) * 2 * 2
    return 5 * per_token * (tokens + 128) // 4 // 2**20 + 64


def _layers(server: Server) -> int:
    return int(json.loads((server.model / "config.json").read_text(encoding="utf-8"))["num_hidden_layers"])


def _rounds(fleet: Fleet, args: argparse.Namespace, record: dict[str, Any], pairs: list[Pair], length: int, end: float) -> list[Pair]:
    """`repeats` rounds in which every pair is asked once, so that all see the same drift of the machine; the first of a pair, which pays
    for the handshake and for kernels not yet compiled, is no sample. Rows go to record; returned are the pairs that answered."""
    samples: dict[Pair, list[dict[str, float]]] = {pair: [] for pair in pairs}
    alive = []
    for pair in pairs:
        producer, consumer = (fleet.running[name] for name in pair.names)
        error, moved = _sample(producer, consumer, length)
        if error:
            record["pairs"].append(_failed(pair, consumer, length, args, error, moved))
        else:
            alive.append(pair)
    for number in range(args.repeats):
        shift = number % max(1, len(alive))
        for pair in alive[shift:] + alive[:shift]:
            if time.monotonic() < end:
                producer, consumer = (fleet.running[name] for name in pair.names)
                error, sample = _sample(producer, consumer, length)
                if error:
                    record.setdefault("failed_samples", []).append(pair.row | {"prompt_tokens": length, "error": error})
                else:
                    samples[pair].append(sample | {"round": number})
    record["pairs"] += [_row(pair, fleet.running[pair.names[1]], length, args, samples[pair]) for pair in alive]
    return alive


def _sample(producer: Running, consumer: Running, length: int) -> tuple[str, dict[str, float]]:
    """One prompt through the pair: (error, what the decode engine's counters moved by, with the client's times)."""
    prompt = [2, *(random.randrange(16, 600) for _ in range(length - 1))]
    before = counters(consumer.url)
    answer = ask(consumer.url, prompt, OUT_TOKENS, producer=producer.url, exact_length=True)
    moved = settled(consumer.url, before, consumer.server.tp if answer.ok else 0)
    times = {
        "prefill_ms": answer.prefill_s * 1e3,
        "decode_first_token_ms": answer.first_token_s * 1e3,
        "itl_ms": (answer.total_s - answer.first_token_s) * 1e3 / (OUT_TOKENS - 1),
    }
    return ("" if answer.ok else answer.error[:300]), {**times, **moved}


def _failed(pair: Pair, consumer: Running, length: int, args: argparse.Namespace, error: str, moved: dict[str, float]) -> dict[str, Any]:
    text = consumer.child.log.read_text(encoding="utf-8", errors="replace")
    lines = {line.partition("AssertionError: ")[2].strip()[:300] for line in text.splitlines() if "AssertionError: " in line}
    row = {"layers": _layers(consumer.server), "state": "ran", "prompt_tokens": length, "answered": 0, "asked": args.repeats}
    return pair.row | row | {"errors": [error], "log_errors": sorted(lines)[:2], "failed_transfers": int(moved["failed"])}


def _row(pair: Pair, consumer: Running, length: int, args: argparse.Namespace, samples: list[dict[str, float]]) -> dict[str, Any]:
    row = pair.row | {
        "layers": _layers(consumer.server),
        "state": "ran",
        "prompt_tokens": length,
        "answered": len(samples),
        "asked": args.repeats,
        "errors": [],
    }
    if not samples:
        return row | {"errors": ["time was up before the first sample"]}
    ranks = consumer.server.tp
    # A rank that reads from several ranks has a transfer with each, and they run at the same time.
    xfer_ms = [s["xfer_s"] * 1e3 / s["transfers"] for s in samples]
    rates = [s["bytes"] / ranks / ms / 1e6 for s, ms in zip(samples, xfer_ms, strict=True)]
    backend = consumer.server.backend if args.device == "cuda" else "CPU_ATTN"
    return row | {
        "ranks": ranks,
        "rounds": [int(s["round"]) for s in samples],
        "bytes": int(samples[0]["bytes"]),
        "every_sample_moved_these_bytes": all(s["bytes"] == samples[0]["bytes"] for s in samples),
        "predicted_bytes": predicted(consumer.server.model, consumer.server, [length], backend),
        "descriptors_per_transfer": [round(s["descriptors"] / s["transfers"]) for s in samples],
        "transfers": int(samples[0]["transfers"]),
        "xfer_ms": [round(x, 3) for x in xfer_ms],
        "post_ms": [round(s["post_s"] * 1e3 / s["transfers"], 3) for s in samples],
        "gb_s_per_rank": [round(r, 2) for r in rates],
        "prefill_ms": [round(s["prefill_ms"], 1) for s in samples],
        "decode_first_token_ms": [round(s["decode_first_token_ms"], 1) for s in samples],
        "itl_ms": [round(s["itl_ms"], 2) for s in samples],
        "failed_transfers": int(sum(s["failed"] for s in samples)),
    }


def against_equal_tp(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The mixed pair's rate per rank over that of equal TP in the same round, per setting and length.

    equal TP is the mean transfer time of the setting's equal pairs in that round: with two GPUs one reads from the other GPU and one from
    its own, as the two ranks of the mixed pair do. low, high: 95 % interval of the median by bootstrap over rounds (10,000 draws, seed 1).
    """
    found = []
    ran = [r for r in rows if r.get("xfer_ms")]
    for mixed in (r for r in ran if tuple(r["pair"].split("->")) in MIXED):
        same = [r for r in ran if all(r[k] == mixed[k] for k in ("shape", "env", "prompt_tokens", "bytes")) and _equal_tp(r["pair"])]
        by_round = [dict(zip(r["rounds"], r["xfer_ms"], strict=True)) for r in same]
        ratios = []
        for number, ms in zip(mixed["rounds"], mixed["xfer_ms"], strict=True):
            others = [times[number] for times in by_round if number in times]
            if others and len(others) == len(by_round):
                ratios.append(sum(others) / len(others) / ms)
        if ratios:
            rng = random.Random(1)
            draws = sorted(median(rng.choices(ratios, k=len(ratios))) for _ in range(10_000))
            found.append(
                {key: mixed[key] for key in ("shape", "env", "prompt_tokens")}
                | {"equal_pairs": [r["pair"] for r in same], "rounds": len(ratios), "ratios": [round(r, 3) for r in ratios]}
                | {"median": round(median(ratios), 3), "low": round(draws[250], 3), "high": round(draws[9749], 3)}
            )
    return found


def _equal_tp(pair: str) -> bool:
    producer, consumer = pair.split("->")
    return PLACES[producer][0] == PLACES[consumer][0]


def transports(running: Running) -> list[str]:
    """What UCX says that it uses for GPU memory, from its protocol report in the log: the lines that name a path of CUDA memory."""
    text = running.child.log.read_text(encoding="utf-8", errors="replace")
    rows = [" ".join(line[line.index("|") :].split()) for line in text.splitlines() if "|" in line and "cuda" in line]
    return sorted({row for row in rows if "remote memory read" in row or "cuda_ipc" in row or "cuda_copy" in row})[:20]


def copy_limit(args: argparse.Namespace, pairs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """copy_limit.py with the sizes that one rank received, in the same run and with the same engines up and idle."""
    mixed = [(p["bytes"] // p["ranks"], p["env"]) for p in pairs if p.get("bytes") and tuple(p["pair"].split("->")) in MIXED]
    sizes = sorted({size // 2**23 * 2**23 for size, env in mixed if env == "per-region" and size >= 2**23})[-2:] or [2**28]
    python = (args.envs or args.project / ".envs") / f"{args.env_prefix}-stock" / "bin" / "python"
    script = str(Path(__file__).with_name("copy_limit.py"))
    rows: list[dict[str, Any]] = []
    for more in ([], ["--far-visible", "0", "--sizes", str(sizes[-1]), "--pieces", "131072"]):
        argv = [
            str(python),
            script,
            "--sizes",
            *map(str, sizes),
            "--pieces",
            "65536",
            "131072",
            "524288",
            "8388608",
            "--repeats",
            "3",
            *more,
        ]
        try:
            done = subprocess.run(argv, capture_output=True, text=True, timeout=120, check=False)
            output, error = done.stdout, done.stderr[-800:] if done.returncode else ""
        except subprocess.TimeoutExpired as e:
            output, error = (e.stdout or b"").decode(errors="replace"), f"not ended after {e.timeout:g} s"
        rows += [json.loads(line) for line in output.splitlines() if line.startswith("{")]
        if error:
            rows.append({"kind": "failed", "error": error})
    return rows


def tables(record: dict[str, Any]) -> list[str]:
    rows = []
    for r in record.get("pairs", []):
        head = [r["shape"].removeprefix("gemma4-"), r.get("layers", "-"), r["env"], r["pair"], r.get("prompt_tokens", "-")]
        if r["state"] != "ran" or not r.get("bytes"):
            rows.append([*head, *["-"] * 8, (r.get("log_errors") or r.get("errors") or [r.get("why", "failed")])[0][:140]])
            continue
        note = "" if r["bytes"] == r["predicted_bytes"] else f"predicted {r['predicted_bytes']:,}"
        rows.append(
            [
                *head,
                f"{r['bytes'] / 1e6:,.0f}",
                f"{median(r['descriptors_per_transfer']):.0f}",
                f"{median(r['xfer_ms']):.2f}",
                f"{median(r['post_ms']):.2f}",
                f"{median(r['gb_s_per_rank']):.1f}",
                f"{median(r['prefill_ms']):.0f}",
                f"{median(r['decode_first_token_ms']):.0f}",
                f"{median(r['itl_ms']):.1f}",
                note,
            ]
        )
    head = [
        "shape",
        "layers",
        "env",
        "pair",
        "tokens",
        "MB",
        "descr",
        "xfer ms",
        "post ms",
        "GB/s/rank",
        "prefill ms",
        "D first ms",
        "ITL ms",
        "",
    ]
    out = [aligned("real size", head, rows)]
    ratios = [
        [
            r["shape"].removeprefix("gemma4-"),
            r["env"],
            r["prompt_tokens"],
            r["rounds"],
            r["median"],
            r["low"],
            r["high"],
            " and ".join(r["equal_pairs"]),
        ]
        for r in record.get("rates_against_equal_tp", [])
    ]
    out.append(aligned("rate of mixed TP over equal TP", ["shape", "env", "tokens", "rounds", "median", "low", "high", "against"], ratios))
    limit = [
        [
            c["kind"],
            f"{c.get('bytes', 0) / 1e6:,.0f}",
            c.get("piece", "-"),
            c.get("stride", "-"),
            c.get("ms", "-"),
            c.get("post_ms", "-"),
            c.get("gb_s", "-"),
            c.get("correct", c.get("error", "")),
            c.get("far_visible", ""),
        ]
        for c in record.get("copy_limit", [])
    ]
    out.append(aligned("link", ["kind", "MB", "piece", "stride", "ms", "post ms", "GB/s", "correct", "far sees"], limit))
    out.append("\n".join(["transports", *record.get("transports", [])[:12]]))
    bad = [f"{name}: {s['error'][-700:]}" for name, s in record.get("servers", {}).items() if s["error"]]
    if bad or record.get("error"):
        out.append("\n".join([*bad, record.get("error", "")[-1500:]]))
    return out
