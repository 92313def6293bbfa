"""Writes archived runs by the contracts of pdlaunch.node, for tests and benchmarks of everything that reads them."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pdlaunch.node.contracts import Check, Evidence, Verdict, write_json
from pdlaunch.node.spec import (
    Deadlines,
    EngineRank,
    EngineSpec,
    LoadPhase,
    LoadSpec,
    ModelSpec,
    NodeSlot,
    Proof,
    RunInfo,
    ServiceSpec,
    Spec,
    TransferGroup,
    TransferPrediction,
    to_json,
)

PATCH = "vllm-0.31.0-nixl-per-region-kv-heads"
T0 = 1_792_411_650


@dataclass(frozen=True)
class Shape:
    """What a test varies. gpu "": a CPU-only run. speed: 2.0 halves every latency. jitter: relative spread between requests."""

    recipe: str = "gemma4-p4d8"
    job: str = "20261019T120000Z-1001"
    prefill_tp: int = 4
    decode_tp: int = 8
    gpu: str = "NVIDIA B300 SXM6 AC"
    verdict: str = "VALID"
    model: str = "google/gemma-4-31B-it"
    vllm: str = "0.31.0"
    patches: tuple[str, ...] = (PATCH,)
    hybrid: bool = False
    speculative_tokens: int = 0
    recall: int = 9
    status: int = 200
    failed_transfers: int = 0
    speed: float = 1.0
    jitter: float = 0.05
    seed: int = 1
    loads: tuple[LoadPhase, ...] = field(
        default=(LoadPhase("c16", 8192, 1024, 40, concurrency=16), LoadPhase("c64", 8192, 1024, 80, concurrency=64))
    )
    kv_usage: float = 0.4


def _engine(role: Any, node: int, tp: int, shape: Shape, first_gpu: int = 0) -> EngineSpec:
    argv = ["%{python}", "-m", "dynamo.vllm", "--model", shape.model, "--tensor-parallel-size", str(tp), "--block-size", "64"]
    argv.append("--no-disable-hybrid-kv-cache-manager" if shape.hybrid else "--disable-hybrid-kv-cache-manager")
    if shape.speculative_tokens:
        argv += ["--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": shape.speculative_tokens})]
    gpus = tuple(range(first_gpu, first_gpu + tp)) if shape.gpu else ()
    ranks = (EngineRank(node, gpus, tuple(argv)),)
    return EngineSpec(f"{role}-0", role, 0, "dynamo.vllm", "/venv/bin/python", ranks, {"UCX_TLS": "rc"}, tp, 1, 1)


def spec_of(shape: Shape) -> Spec:
    gpus = 8 if shape.gpu else 0
    # 50 sliding layers of 16 heads of 256, 10 global of 4 heads of 512, K and V, bf16, 64 tokens per block
    heads = 50 * max(1, 16 // shape.decode_tp) * 256 + 10 * max(1, 4 // shape.decode_tp) * 512
    prediction = TransferPrediction((TransferGroup(64, 0, (heads * 2 * 2 * 64,) * shape.decode_tp),), "blocks x bytes")
    return Spec(
        1,
        RunInfo(shape.recipe, "b300", "slurm", "cuda" if shape.gpu else "cpu", "results", "2026-10-19T12:00:00Z",
                f"python launch.py --recipe {shape.recipe}", "0" * 40, ""),
        ModelSpec(shape.model, f"/models/{shape.model}", "gemma-4"),
        (NodeSlot(0, 0, gpus), NodeSlot(0, 1, gpus)),
        (ServiceSpec("etcd", ("etcd",), {}, "etcd_health"), ServiceSpec("frontend", ("python", "-m", "dynamo.frontend"), {}, "http")),
        (_engine("prefill", 0, shape.prefill_tp, shape), _engine("decode", 1, shape.decode_tp, shape)),
        None, Deadlines(), None, None, (), LoadSpec("aiperf", "/models/tok", shape.loads),
        Proof(True, "fail", prediction, shape.prefill_tp != shape.decode_tp, shape.patches, {"vllm/a.py": "ab"}, {"vllm": shape.vllm}),
    )  # fmt: skip


def records_of(load: LoadPhase, shape: Shape) -> tuple[list[dict[str, Any]], float]:
    """Rows of profile_export.jsonl and the phase's duration in seconds: users that take turns, latencies that grow with their number."""
    rng = random.Random(f"{shape.seed}/{load.name}")
    users = load.concurrency or 8
    clock = [0.0] * users
    rows = []
    for i in range(load.requests):
        u = i % users
        ttft = (120 + 4 * users) / shape.speed * (1 + shape.jitter * rng.uniform(-1, 2))
        itl = (8 + 0.12 * users) / shape.speed * (1 + shape.jitter * rng.uniform(-1, 1)) / (1 + 0.5 * bool(shape.speculative_tokens))
        latency = ttft + itl * (load.output_tokens - 1)
        start = clock[u]
        clock[u] += latency / 1000 + 0.002
        metrics = {
            "time_to_first_token": (ttft, "ms"), "inter_token_latency": (itl, "ms"), "request_latency": (latency, "ms"),
            "input_sequence_length": (load.input_tokens, "tokens"), "output_sequence_length": (load.output_tokens, "tokens"),
        }  # fmt: skip
        end_ns = int((T0 + start + latency / 1000) * 1e9)
        rows.append({
            "metadata": {"session_num": i, "request_start_ns": int((T0 + start) * 1e9), "request_end_ns": end_ns,
                         "benchmark_phase": "profiling", "was_cancelled": False},
            "metrics": {k: {"value": v, "unit": unit} for k, (v, unit) in metrics.items()},
        })  # fmt: skip
    return rows, max(clock) - 0.002


def write_phase(folder: Path, load: LoadPhase, shape: Shape) -> None:
    rows, duration = records_of(load, shape)
    folder.mkdir(parents=True)
    (folder / "profile_export.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    tokens_in, tokens_out = load.input_tokens * len(rows), load.output_tokens * len(rows)

    def one(value: float, unit: str) -> dict[str, Any]:
        return {"unit": unit, "avg": value}

    def spread(name: str) -> dict[str, Any]:
        values = sorted(r["metrics"][name]["value"] for r in rows)
        unit, n = rows[0]["metrics"][name]["unit"], len(values)
        return {"unit": unit, "avg": sum(values) / n, "p50": values[n // 2], "min": values[0], "max": values[-1], "count": n}

    spreads = ("time_to_first_token", "inter_token_latency", "request_latency", "input_sequence_length", "output_sequence_length")
    summary = {
        "schema_version": "1.4", "aiperf_version": "0.13.0", "benchmark_id": "synthetic", "is_complete": True, "was_cancelled": False,
        "benchmark_duration": one(duration, "sec"), "request_count": one(len(rows), "requests"),
        "request_throughput": one(len(rows) / duration, "requests/sec"),
        "output_token_throughput": one(tokens_out / duration, "tokens/sec"),
        "total_token_throughput": one((tokens_in + tokens_out) / duration, "tokens/sec"),
        "input_token_throughput": one(tokens_in / duration, "tokens/sec"),
        **{n: spread(n) for n in spreads},
        "start_time": "2026-10-19T12:10:00.000000", "end_time": "2026-10-19T12:20:00.000000",
        "input_config": {"models": {"items": [{"name": "gemma-4"}]}, "endpoint": {"type": "chat", "streaming": True},
                         "phases": [{"kind": "profiling", "concurrency": load.concurrency}]},
    }  # fmt: skip
    write_json(folder / "profile_export_aiperf.json", summary)
    usage = {"vllm:kv_cache_usage_perc": {"series": [{"endpoint_url": "x", "stats": {"avg": shape.kv_usage, "max": shape.kv_usage}}]}}
    write_json(folder / "server_metrics_export.json", {"schema_version": "1.1", "metrics": usage})


def _events(path: Path) -> None:
    stages = (("submitted", None, 0), ("job_started", None, 42), ("control_plane", 42, 50), ("engines_started", 50, 55),
              ("engines_ready", 55, 395), ("first_token", 395, 401), ("recall_before", 401, 430), ("load", 430, 980),
              ("recall_during", 500, 560),
              ("recall_after", 980, 1010), ("idle", 1010, 1012), ("stopped", 1012, 1030), ("judged", None, 1031))  # fmt: skip
    lines = []
    for name, begin, end in stages:
        for state, when in (("begin", begin), ("end", end)):
            if when is not None:
                utc = f"2026-10-19T12:{when // 60:02d}:{when % 60:02d}.000000Z"
                lines.append((when, {"utc": utc, "monotonic_s": 1000.0 + when, "stage": name, "state": state}))
    lines.sort(key=lambda pair: pair[0])
    path.write_text("".join(json.dumps(line) + "\n" for _, line in lines))


def _answers(path: Path, when: str, shape: Shape) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [
        {"utc": f"2026-10-19T12:07:0{i}.000Z", "when": when, "prompt": i, "target": "deployment", "status": shape.status, "error": "",
         "content": f"<script>alert({i})</script> K7Q{i}", "reasoning": "", "finish_reason": "stop", "prompt_tokens": 12500,
         "completion_tokens": 12,
         "latency_s": 2.0, "ttft_s": 1.4, "correct": i < shape.recall, "hang": False}
        for i in range(9)
    ]  # fmt: skip
    path.write_text("".join(json.dumps(r) + "\n" for r in rows))


def _prometheus(run: Path, shape: Shape, spec: Spec) -> None:
    assert spec.proof.prediction is not None
    recall = 9 * spec.proof.prediction.bytes_of_prompt(12500)
    load = sum(x.requests * spec.proof.prediction.bytes_of_prompt(x.input_tokens) for x in shape.loads)
    (run / "metrics").mkdir()
    # recall runs before, during and after load; the counters are cumulative
    moved = {"ready": 0, "before_load": recall, "after_load": 2 * recall + load, "end": 3 * recall + load}
    for when, value in moved.items():
        (run / "metrics" / f"decode-0.{when}.prom").write_text(
            f'vllm:nixl_bytes_transferred_sum{{engine="0"}} {float(value)}\nvllm:nixl_bytes_transferred_count{{engine="0"}} 8\n'
            f'vllm:nixl_num_failed_transfers_total{{engine="0"}} {float(shape.failed_transfers) if when != "ready" else 0.0}\n'
        )


def _gpus(run: Path, shape: Shape, spec: Spec) -> None:
    for e in spec.engines:
        count, busy = e.tensor_parallel, 30 if e.role == "prefill" else 66
        facts = {"process": e.name, "role": e.role, "host": f"node{e.ranks[0].node + 1}", "node": e.ranks[0].node,
                 "versions": {"vllm": shape.vllm}, "file_sha256": {"vllm/a.py": "ab"}, "ports": {},
                 "gpus": [{"index": i, "name": shape.gpu, "uuid": f"GPU-{e.name}-{i}", "memory_used_mib": 9, "memory_total_mib": 283000}
                          for i in range(count)] if shape.gpu else []}  # fmt: skip
        write_json(run / "nodes" / f"{e.name}.json", facts)
        if shape.gpu:
            rows = ["utc,gpu,utilisation_pct,memory_used_mib"]
            rows += [f"2026-10-19T12:{m:02d}:00.000000Z,{g},{busy + (m * 7 + g) % 11},250000" for m in range(7, 17) for g in range(count)]
            (run / "gpu").mkdir(exist_ok=True)
            (run / "gpu" / f"{e.name}.csv").write_text("\n".join(rows) + "\n")


def seal(run: Path) -> None:
    """manifest.json over every other file, as the archive stage writes it."""
    files = {p.relative_to(run).as_posix(): hashlib.sha256(p.read_bytes()).hexdigest() for p in sorted(run.rglob("*")) if p.is_file()}
    files.pop("manifest.json", None)
    write_json(run / "manifest.json", {"schema": 1, "files": files})


def write_run(results: Path, shape: Shape | None = None, **changes: Any) -> Path:
    """results/<recipe>/<job>; returns the folder."""
    shape = replace(shape or Shape(), **changes)
    run = results / shape.recipe / shape.job
    run.mkdir(parents=True)
    spec = spec_of(shape)
    write_json(run / "spec.json", to_json(spec))
    _events(run / "events.jsonl")
    for when in ("before", "during", "after"):
        _answers(run / "recall" / f"{when}.jsonl", when, shape)
    _prometheus(run, shape, spec)
    _gpus(run, shape, spec)
    for load in shape.loads:
        write_phase(run / "load" / load.name / "aiperf", load, shape)
    evidence = Evidence()
    evidence.put("recall.before.correct", shape.recall, "recall/before.jsonl")
    evidence.put("recall.before.asked", 9, "recall/before.jsonl")
    evidence.put("decode-0.nixl.failed_transfers", shape.failed_transfers, "metrics/decode-0.end.prom:3")
    evidence.write(run / "evidence.json")
    good = shape.verdict == "VALID"
    checks = (
        Check("recall.before", shape.recall == 9, f"{shape.recall} of 9", "9 of 9", "recall/before.jsonl"),
        Check("transfers.failed", shape.failed_transfers == 0, str(shape.failed_transfers), "0", "metrics/decode-0.end.prom:3"),
        Check("fabric.counters", None, "not looked at", "traffic seen", "", needed=False),
    )
    reasons = () if good else (f"recall before load: {shape.recall} of 9",)
    line = f"{shape.verdict}  {shape.recipe}  recall {3 * shape.recall}/27"
    Verdict(shape.verdict, line, reasons, checks, True).write(run / "verdict.json")  # type: ignore[arg-type]
    seal(run)
    return run
