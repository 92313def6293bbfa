"""Run folders as the node leaves them, small and consistent: two decode ranks, a known number of bytes per block, a known prompt length.

A test changes one thing and looks at the verdict. The texts of metrics, logs and AIPerf's JSON have the form of the real ones.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

from pdlaunch.node import evidence, verdict
from pdlaunch.node.contracts import Evidence, Verdict, write_json
from pdlaunch.node.spec import (
    AgreementSpec,
    Deadlines,
    EngineRank,
    EngineSpec,
    LoadPhase,
    LoadSpec,
    ModelSpec,
    NodeSlot,
    Proof,
    RecallSpec,
    RunInfo,
    Spec,
    TransferGroup,
    TransferPrediction,
    to_json,
)

BYTES_PER_BLOCK = 2000
PROMPTS = 9
TOKENS = {"gate": 100, "recall": 810, "load": 70, "agreement": 500, "behaviour": 40}
PHASE = LoadPhase("c2", input_tokens=70, output_tokens=8, requests=4, concurrency=2, warmup_requests=1)
TIMES = ("before", "during", "after")
SPLIT = (
    "(Worker_TP1 pid=77) ERROR 11-30 01:01:01 [base_worker.py:1282] AssertionError: SPLIT region 5: remote P KV block_len 131072 must "
    "equal local 131072 * remote_heads 4 // local_heads 2 // block_size_ratio 1."
)
PLAN = "INFO [region_heads.py:152] NIXL per-region KV heads plan: engine=e1 rank={rank}/2 remote_tp=1 regions=6 split=5 replicated=1"
ACTIVE = "INFO [region_heads.py:120] NIXL per-region KV heads active: rank={rank}/{tp} regions=6 heads=1"
KV_CONFIG = '{"kv_connector":"NixlConnector","kv_role":"kv_both","kv_load_failure_policy":"%s"}'


def blocks(tokens: int) -> int:
    return -(-tokens // 64)


def engine(role: Any, tp: int, policy: str = "fail", replica: int = 0, kind: Any = "dynamo.vllm") -> EngineSpec:
    argv = ("python", "-m", kind, "--kv-transfer-config", KV_CONFIG % policy) if kind == "dynamo.vllm" else ("python", "-m", kind)
    return EngineSpec(f"{role}-{replica}", role, replica, kind, "python", (EngineRank(0, (), argv),), {}, tp, 1, 1)


def spec(**changes: Any) -> Spec:
    prediction = TransferPrediction((TransferGroup(64, 0, (BYTES_PER_BLOCK // 2,) * 2),), "blocks x bytes")
    base = Spec(
        schema=1,
        run=RunInfo("tiny-p1d2", "local", "local", "cpu", "results", "2026-11-30T01:00:00Z", "launch.py", "0" * 40, ""),
        model=ModelSpec("m", "m", "m"),
        nodes=(NodeSlot(0, 0, 0),),
        services=(),
        engines=(engine("prefill", 1), engine("decode", 2)),
        slurm=None,
        deadlines=Deadlines(),
        recall=RecallSpec(PROMPTS, 800, TIMES),
        agreement=None,
        behaviour=("build_identity",),
        load=LoadSpec("aiperf", "m", (PHASE,)),
        proof=Proof(
            True,
            "fail",
            prediction,
            True,
            ("p",),
            {"vllm/a.py": "ab"},
            {"vllm": "0.31.0"},
            {
                "active_line": r"KV heads active: rank=(?P<rank>\d+)/",
                "plan_line": r"KV heads plan: engine=(?P<engine>\S+) rank=(?P<rank>\d+)/",
            },
        ),
    )
    return replace(base, **changes)


class Folder:
    """A run folder; write() makes a good one, the other methods spoil it or read it."""

    def __init__(self, path: Path, spec: Spec) -> None:
        self.path, self.spec = path, spec

    def write(self) -> Folder:
        write_json(self.path / "spec.json", to_json(self.spec))
        self.events()
        write_json(
            self.path / "gate.json",
            {"ready": True, "expected": {"prefill": 1, "decode": 1}, "found": {"prefill": 1, "decode": 1}, "failure": ""},
        )
        self.rows("gate.jsonl", [self.row("gate")])
        for when in TIMES:
            self.rows(f"recall/{when}.jsonl", [self.recall_row(i) for i in range(PROMPTS)])
        self.rows("behaviour.jsonl", [{"check": "build_identity", "passed": True, "why": "", "target": "nodes"}])
        self.aiperf()
        self.counters()
        for e in self.spec.engines:
            active = [ACTIVE.format(rank=r, tp=e.tensor_parallel) for r in range(e.tensor_parallel)]
            plans = [PLAN.format(rank=r) for r in range(2 if e.role == "decode" else 0)]
            self.log(f"{e.name}", ["INFO start", *active, *plans])
            write_json(
                self.path / "nodes" / f"{e.name}.json",
                {
                    "process": e.name,
                    "role": e.role,
                    "host": "vm",
                    "versions": {"vllm": "0.31.0+cpu"},
                    "file_sha256": {"vllm/a.py": "ab"},
                    "gpus": [],
                    "gpu_error": "no nvidia-smi: no GPU on this node",
                    "fabric_before": {},
                    "fabric_error": "no RDMA device",
                    "exit": {"code": 0, "asked": True, "killed": False},
                },
            )
        return self

    def row(self, kind: str, **changes: Any) -> dict[str, Any]:
        return {
            "utc": "2026-11-30T01:00:10.000000Z",
            "target": "deployment",
            "status": 200,
            "error": "",
            "hang": False,
            "content": "x",
            "reasoning": "",
            "finish_reason": "stop",
            "prompt_tokens": TOKENS[kind],
            "completion_tokens": 4,
            "latency_s": 1.0,
            "ttft_s": 0.5,
            **changes,
        }

    def recall_row(self, index: int, **changes: Any) -> dict[str, Any]:
        code = f"CODE{index:04d}"
        return self.row("recall", prompt=index, code=code, content=code, correct=True, leaked_from=[], why="") | changes

    def rows(self, name: str, rows: Iterable[dict[str, Any]]) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(json.dumps(r) + "\n" for r in rows), encoding="utf-8")

    def wrong_recall(self, when: str, count: int = PROMPTS, **changes: Any) -> None:
        wrong = {"content": "the the of", "correct": False, "why": "the code is not in the answer 'the the of'", **changes}
        self.rows(f"recall/{when}.jsonl", [self.recall_row(i, **(wrong if i < count else {})) for i in range(PROMPTS)])

    def events(self, stop_log_bytes: dict[str, int] | None = None) -> None:
        lines: list[tuple[float, str, str, dict[str, Any]]] = [
            (0.0, "job_started", "end", {}),
            (0.1, "control_plane", "begin", {}),
            (1.1, "control_plane", "end", {}),
            (1.2, "engines_started", "end", {}),
            (1.3, "engines_ready", "begin", {}),
            (41.3, "engines_ready", "end", {}),
            (41.4, "first_token", "begin", {}),
            (42.4, "first_token", "end", {}),
            (43.0, "recall_before", "begin", {}),
            (53.0, "recall_before", "end", {}),
            (54.0, "load", "begin", {"phase": "c2"}),
            (60.0, "recall_during", "begin", {}),
            (70.0, "recall_during", "end", {}),
            (84.0, "load", "end", {"phase": "c2"}),
            (85.0, "recall_after", "begin", {}),
            (89.0, "recall_after", "end", {}),
            (90.0, "stopped", "begin", {"log_bytes": stop_log_bytes or {"prefill-0": 10**6, "decode-0": 10**6}}),
            (95.0, "stopped", "end", {}),
        ]
        self.rows(
            "events.jsonl",
            [
                {
                    "utc": f"2026-11-30T01:{int(5 + t // 60):02d}:{t % 60:09.6f}Z",
                    "monotonic_s": 100 + t,
                    "stage": stage,
                    "state": state,
                    **detail,
                }
                for t, stage, state, detail in lines
            ],
        )

    def log(self, process: str, lines: Iterable[str]) -> int:
        """Appends lines; returns the number of the last one."""
        path = self.path / "logs" / f"{process}.log"
        path.parent.mkdir(exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in lines)
        return len(path.read_text().splitlines())

    def counters(self, process: str = "", **decode: float) -> None:
        """Snapshots of both engines. decode: final values that replace the right ones, as bytes=0 or failed_transfers=18."""
        count = {"ready": 0, "before_load": 1 + PROMPTS, "after_load": 1 + 2 * PROMPTS + 5, "end": 1 + 3 * PROMPTS + 5}
        kinds = {"ready": (0, 0, 0), "before_load": (1, PROMPTS, 0), "after_load": (1, 2 * PROMPTS, 5), "end": (1, 3 * PROMPTS, 5)}
        for when, requests in count.items():
            gate, recall, load = kinds[when]
            tokens = gate * TOKENS["gate"] + recall * TOKENS["recall"] + load * TOKENS["load"]
            n = gate * blocks(TOKENS["gate"]) + recall * blocks(TOKENS["recall"]) + load * blocks(TOKENS["load"])
            values: dict[str, float] = {
                "bytes": n * BYTES_PER_BLOCK,
                "transfers": 2 * requests,
                "requests": requests,
                "external": tokens,
                "local_compute": 0,
                "local_cache_hit": 0,
                "failed_transfers": 0,
                "failed_notifications": 0,
                "expired": 0,
                "preemptions": 0,
                "errors": 0,
            }
            self.prom("decode-0", when, values | (decode if when == "end" and process in ("", "decode-0") else {}))
            prefill = {**values, "bytes": 0, "transfers": 0, "external": 0, "local_compute": tokens}
            self.prom("prefill-0", when, prefill | (decode if when == "end" and process == "prefill-0" else {}))

    def prom(self, process: str, when: str, v: dict[str, float], worker: str = "") -> None:
        labels = f'engine="0",model_name="m",worker_id="{worker or process}"'
        lines = ["# TYPE vllm:nixl_bytes_transferred histogram"]
        for name, key, more in (
            ("nixl_bytes_transferred_sum", "bytes", ""),
            ("nixl_xfer_time_seconds_count", "transfers", ""),
            ("nixl_num_failed_transfers_total", "failed_transfers", ""),
            ("nixl_num_failed_notifications_total", "failed_notifications", ""),
            ("nixl_num_kv_expired_reqs_total", "expired", ""),
            ("num_preemptions_total", "preemptions", ""),
            ("request_prompt_tokens_count", "requests", ""),
            ("request_success_total", "errors", ',finished_reason="error"'),
            ("prompt_tokens_by_source_total", "external", ',source="external_kv_transfer"'),
            ("prompt_tokens_by_source_total", "local_compute", ',source="local_compute"'),
            ("prompt_tokens_by_source_total", "local_cache_hit", ',source="local_cache_hit"'),
        ):
            if key in v:
                lines.append(f"vllm:{name}{{{labels}{more}}} {float(v[key])!r}")
        lines.append(f'vllm:cache_config_info{{{labels},block_size="64",num_gpu_blocks="186",kv_cache_size_tokens="11904"}} 1.0')
        path = self.path / "metrics" / f"{process}.{when}.prom"
        path.parent.mkdir(exist_ok=True)
        path.write_text("\n".join(lines) + "\n")

    def aiperf(self, **changes: Any) -> None:
        """The phase as AIPerf leaves it; changes replace keys of its JSON (None removes one)."""
        folder = self.path / "load" / "c2"
        write_json(folder / "command.json", {"argv": ["aiperf"]})
        write_json(folder / "phase.json", {"exit_code": 0, "stopped": False, "wall_s": 14.0})
        ms = {"unit": "ms", "avg": 50.0, "p50": 49.0, "p99": 90.0}
        export = {
            "aiperf_version": "0.13.0",
            "is_complete": True,
            "was_cancelled": False,
            "error_summary": [],
            "completed_request_count": {"unit": "requests", "avg": 4.0},
            "request_count": {"unit": "requests", "avg": 4.0},
            "request_error_rate": {"unit": "%", "avg": 0.0},
            "total_output_tokens": {"unit": "tokens", "avg": 32.0},
            "output_sequence_length": {"unit": "tokens", "avg": 8.0, "min": 8.0, "max": 8.0},
            "time_to_first_token": ms,
            "input_sequence_length": {"unit": "tokens", "avg": 70.0},
            "inter_token_latency": ms,
            "request_latency": ms,
        } | changes
        write_json(folder / "aiperf" / "profile_export_aiperf.json", {k: v for k, v in export.items() if v is not None})
        self.rows(
            "load/c2/aiperf/profile_export.jsonl",
            [
                {
                    "metadata": {"benchmark_phase": "warmup" if i == 0 else "profiling"},
                    "metrics": {"usage_prompt_tokens": {"value": TOKENS["load"], "unit": "tokens"}},
                    "error": None,
                }
                for i in range(5)
            ],
        )

    def node(self, process: str, **changes: Any) -> None:
        path = self.path / "nodes" / f"{process}.json"
        write_json(path, json.loads(path.read_text()) | changes)

    def evidence(self) -> Evidence:
        return evidence.collect(self.spec, self.path)

    def verdict(self, ended: str = "") -> Verdict:
        return verdict.judge(self.spec, self.evidence(), ended)


def good_run(path: Path, **changes: Any) -> Folder:
    return Folder(path, spec(**changes)).write()


AGREEMENT = AgreementSpec(prompts=2, prompt_tokens=(500,), max_tokens=8)
