"""Recall, token agreement and bytes for every pair of tensor-parallel sizes, stock and patched."""

from __future__ import annotations

import argparse
import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch.node.prompts import RecallPrompt, foreign_codes, judge, recall_prompts
from pdlaunch.planner.capacity import plan_layout
from pdlaunch.planner.config import load_config
from pdlaunch.planner.families import read_model
from pdlaunch.planner.shape import RoleShape
from pdlaunch.planner.transfer import transfer

from .servers import Fleet, Running, Server
from .tables import aligned
from .two_step import Answer, ask, chat_tokens, counters, settled

MAX_TOKENS = 24
IN_FLIGHT = 8


@dataclass(frozen=True)
class Variant:
    """env: what is installed. backend and kv_dtype: vLLM's --attention-backend and --kv-cache-dtype. hybrid: the hybrid manager is on."""

    env: str
    backend: str
    kv_dtype: str
    hybrid: bool

    @classmethod
    def parse(cls, text: str) -> Variant:
        env, backend, kv_dtype, *rest = text.split("/")
        return cls(env, backend, kv_dtype, rest == ["hybrid"])

    @property
    def name(self) -> str:
        return f"{self.env}.{self.backend.removesuffix('_ATTN').lower()}.{self.kv_dtype}{'.hybrid' if self.hybrid else ''}"


def server_of(variant: Variant, tp: int, args: argparse.Namespace) -> Server:
    gpus = tuple(range(args.gpus))
    # The smaller sizes start at the far end, so that not every engine has its rank 0 on GPU 0.
    order = gpus[-tp:] + gpus[:-tp] if tp < args.gpus else gpus
    return Server(
        name=f"{variant.name}.tp{tp}",
        env=f"{args.env_prefix}-{variant.env}",
        model=args.project / args.model,
        tp=tp,
        gpus=order,
        kv_mib=1024 if args.device == "cuda" else 128,
        dtype=args.dtype,
        backend=variant.backend,
        kv_dtype=variant.kv_dtype,
        hybrid_manager=variant.hybrid,
        variables={"NIXL_PTHR_DELAY_US": "1000"},
    )


def predicted(model_folder: Path, server: Server, tokens: list[int], backend: str) -> int:
    """Bytes that these prompts move into an engine like `server`, as the project's planner has it."""
    shape = RoleShape(
        tensor_parallel=server.tp,
        max_model_len=server.max_model_len,
        max_num_batched_tokens=server.max_batched_tokens,
        max_num_seqs=server.max_seqs,
        block_size=server.block_size,
        dtype=server.dtype,
        kv_cache_dtype=server.kv_dtype,
        prefix_caching=False,
        hybrid_manager=server.hybrid_manager,
        backend=backend,
    )
    layout = plan_layout(read_model(load_config(model_folder / "config.json")), shape)
    return sum(transfer(layout, count).total_bytes for count in tokens)


def step(fleet: Fleet, args: argparse.Namespace, record: dict[str, Any]) -> None:
    sizes = [tp for tp in (1, 2, 4, 8) if tp <= args.gpus]
    pairs = [(int(p), int(d)) for p, _, d in (pair.partition(":") for pair in args.pairs)] or list(itertools.permutations(sizes, 2))
    variants = [Variant.parse(text) for text in args.variants]
    servers = [server_of(v, tp, args) for v in variants for tp in sizes]
    for server in servers:
        fleet.start(server)
    bad = fleet.wait([s.name for s in servers], args.start_s)
    record["servers"] = {s.name: {"ready_s": fleet.running[s.name].ready_s, "error": bad.get(s.name, "")} for s in servers}
    record["pairs"] = []
    lengths = [args.prompt_tokens[i % len(args.prompt_tokens)] for i in range(args.prompts)]
    prompts = [recall_prompts(f"gpu/{time.time_ns()}/{i}", 1, n)[0] for i, n in enumerate(lengths)]
    # Variants have engines of their own and may be asked at the same time; within one, pairs follow each other so that counters are theirs.
    with ThreadPoolExecutor(len(variants)) as pool:
        for rows in pool.map(
            lambda v: _variant(v, {tp: fleet.running[n] for tp in sizes if (n := f"{v.name}.tp{tp}") not in bad}, pairs, prompts, args),
            variants,
        ):
            record["pairs"] += rows


def _variant(
    variant: Variant, live: dict[int, Running], pairs: list[tuple[int, int]], prompts: list[RecallPrompt], args: argparse.Namespace
) -> list[dict[str, Any]]:
    if 1 not in live:
        return [{"variant": variant.name, "state": "not run", "why": "its TP1 server did not start"}]
    ids = [chat_tokens(live[1].url, p.text) for p in prompts]
    # One aggregated answer per TP size: what a pair must repeat, and how far TP alone changes a token in this dtype.
    alone = {tp: _all(live[tp], ids, None) for tp in live}
    rows = [_aggregated(variant, tp, prompts, answers, alone[1]) for tp, answers in alone.items()]
    for p, d in pairs:
        row = {"variant": variant.name, "pair": f"{p}->{d}"}
        if p in live and d in live:
            rows.append({**row, **_pair(live[p], live[d], prompts, ids, alone, args)})
        else:
            rows.append({**row, "state": "not run", "why": "a server did not start"})
    return rows


def _all(consumer: Running, ids: list[list[int]], producer: Running | None) -> list[Answer]:
    with ThreadPoolExecutor(IN_FLIGHT) as pool:
        return list(pool.map(lambda prompt: ask(consumer.url, prompt, MAX_TOKENS, producer=producer.url if producer else ""), ids))


def _correct(prompts: list[RecallPrompt], answers: list[Answer]) -> int:
    return sum(
        a.ok and judge(p.code, a.text, foreign=foreign_codes(prompts, p), decoys=p.decoys) for p, a in zip(prompts, answers, strict=True)
    )


def _aggregated(variant: Variant, tp: int, prompts: list[RecallPrompt], answers: list[Answer], tp1: list[Answer]) -> dict[str, Any]:
    return {
        "variant": variant.name,
        "pair": f"aggregated {tp}",
        "state": "ran",
        "recall": _correct(prompts, answers),
        "prompts": len(prompts),
        "same_tokens_as_aggregated_tp1": _same(answers, tp1),
        "errors": sorted({a.error for a in answers if a.error}),
    }


def _same(answers: list[Answer], reference: list[Answer]) -> int:
    return sum(a.ok and bool(a.tokens) and a.tokens == b.tokens for a, b in zip(answers, reference, strict=True))


def _pair(
    producer: Running,
    consumer: Running,
    prompts: list[RecallPrompt],
    ids: list[list[int]],
    alone: dict[int, list[Answer]],
    args: argparse.Namespace,
) -> dict[str, Any]:
    before = counters(consumer.url)
    answers = _all(consumer, ids, producer)
    good = sum(a.ok for a in answers)
    moved = settled(consumer.url, before, good * consumer.server.tp)
    error = sorted({a.error[:300] for a in answers if a.error})
    return {
        "state": "ran",
        "prompts": len(prompts),
        "recall": _correct(prompts, answers),
        "answered": good,
        "prompt_tokens": sum(map(len, ids)),
        "same_tokens_as_aggregated_tp1": _same(answers, alone[1]),
        "same_tokens_as_aggregated_decode_tp": _same(answers, alone[consumer.server.tp]),
        "bytes": int(moved["bytes"]),
        "predicted_bytes": predicted(
            args.project / args.model,
            consumer.server,
            [len(i) for i in ids],
            consumer.server.backend if args.device == "cuda" else "CPU_ATTN",
        ),
        "transfers": int(moved["transfers"]),
        "descriptors": int(moved["descriptors"]),
        "failed_transfers": int(moved["failed"]),
        "external_tokens": int(moved["external_tokens"]),
        "errors": error,
        "log_errors": _assertions(consumer),
    }


def _assertions(consumer: Running) -> list[str]:
    """The handshake's own words, which the client's HTTP 500 does not carry."""
    text = consumer.child.log.read_text(encoding="utf-8", errors="replace")
    found = {line.partition("AssertionError: ")[2].strip() for line in text.splitlines() if "AssertionError: " in line}
    found |= {line.partition("NotImplementedError: ")[2].strip() for line in text.splitlines() if "NotImplementedError: " in line}
    return sorted(f for f in found if f)[:3]


def tables(record: dict[str, Any]) -> list[str]:
    rows = []
    for row in record.get("pairs", []):
        if row["state"] != "ran":
            rows.append([row["variant"], row.get("pair", "all"), "not run", row["why"], "", "", ""])
            continue
        moved = f"{row['bytes']:,}" if "bytes" in row else "-"
        match = "-" if "bytes" not in row else "equal" if row["bytes"] == row["predicted_bytes"] else f"{row['predicted_bytes']:,}"
        rows.append(
            [
                row["variant"],
                row["pair"],
                f"{row['recall']}/{row['prompts']}",
                row["same_tokens_as_aggregated_tp1"],
                moved,
                match,
                row.get("failed_transfers", "-"),
            ]
        )
    out = [aligned("correctness", ["variant", "pair", "recall", "= agg", "bytes", "predicted", "failed"], rows)]
    bad = [
        f"{name}: {s['error'].splitlines()[0]} ... {s['error'].splitlines()[-1][:300]}"
        for name, s in record.get("servers", {}).items()
        if s["error"]
    ]
    if bad or record.get("error"):
        out.append("\n".join([*bad, record.get("error", "")[-1500:]]))
    return out
