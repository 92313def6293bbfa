"""The files that a run leaves: events.jsonl, evidence.json and verdict.json, and where each of them lies.

RUN = results/<recipe>/<utc>-<jobid>/
    spec.json, recipe.yaml, cluster.yaml, job.sbatch   copied from the bundle (its manifest.json as bundle_manifest.json)
    manifest.json           written last: {"schema": 1, "files": {relative path: sha256 of every other file}, ...}
    model_config.json       the model's config.json, where the head node can see it
    plan.json               what was priced against what was measured (launch.py plan --run), where launch.py can be seen
    events.jsonl            one line per change of stage; a stage that takes time has begin and end (or failed), an instant only end
    gate.json               last answer of /v1/models/<id>/ready: {ready, expected, found (workers per role), failure}
    gate.jsonl              answer rows: the first completion, then those of spec.page_smoke, which also have smoke (name of the prompt),
                            attempt, code, decoys, tokens and failure ("" or why it is not the answer that was wanted)
    evidence.json           what was observed, each value with its source
    verdict.json            VALID, INVALID or INCOMPLETE, with every check
    logs/<process>.log      output of every process
    nodes/<process>.json    facts found on the node, see NODE_FACTS below; nodes/head.json: addresses and ports of the services
    gpu/<process>.csv       GPU samples
    recall/<when>.jsonl     one raw answer per line; RUN/agreement.jsonl and RUN/behaviour.jsonl
    metrics/<process>.<when>.prom   /metrics of each worker and of the frontend at: ready, before_load, after_load, end
    load/<phase>/           aiperf/ (what AIPerf wrote), command.json, aiperf.log, phase.json (how the phase was judged)

One answer row (a line of gate.jsonl, recall/<when>.jsonl, behaviour.jsonl, agreement.jsonl) is one request, ANSWER_KEYS at least:
    {utc, target: "deployment"|"control", status, error, content, reasoning, finish_reason, prompt_tokens, completion_tokens,
     latency_s, ttft_s}
    error is "" for a good answer, else what went wrong in words; prompt_tokens is usage.prompt_tokens or null when the server did not say.
    The snapshot `ready` is taken before the first request of the gate and `before_load` after the last request before load, so that the
    bytes of these requests can be counted exactly.
nodes/<process>.json (<process> is prefill-0, or prefill-0.r1 for rank 1), written before the engine starts and again at its end:
    {process, role, host, node_ip, ports: {name: port}, versions: {distribution: version}, file_sha256: {path relative to site-packages:
    sha256, or null for a missing file}, gpus: [{index, name, uuid, memory_used_mib, memory_total_mib}], fabric_before, fabric_after:
    {"mlx5_0/1/port_xmit_data": n}, fabric_error: "" or why there are no counters}. A fact that was not looked at is absent; versions and
    file_sha256 only of engines. Also: rank, node (index), pid, engine_pid, metrics_url ("" without one), argv and environment (redacted),
    removed_environment (names kept from the engine), python {executable, version, site_packages}, gpu_error ("" or why there are no GPUs),
    gpu_processes, disk_free_gib, exit (null while it runs, then {code, asked, killed, why, utc}), removed {shm, processes}: what the engine
    left behind and was removed.
gpu/<process>.csv: header GPU_CSV_HEADER, one row per sample and GPU; a node without GPUs leaves no file and `gpus: []`.
events.jsonl: the event ("stopped", "begin") carries log_bytes: {process: size of its log at the first TERM}, so that lines of the stop
    are known.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

SCHEMA_VERSION = 1

VerdictWord = Literal["VALID", "INVALID", "INCOMPLETE"]

STAGES = ("submitted", "job_started", "control_plane", "engines_started", "engines_ready", "first_token",
          "recall_before", "behaviour", "agreement", "load", "recall_during", "recall_after", "idle", "stopped", "judged", "archived")
"""Names of the `stage` field in events.jsonl, in the order of a complete run; a stage that the recipe does not ask for is absent."""

SNAPSHOTS = ("ready", "before_load", "after_load", "end")
ANSWER_KEYS = ("utc", "target", "status", "error", "content", "reasoning", "finish_reason", "prompt_tokens", "completion_tokens",
               "latency_s", "ttft_s")
GPU_CSV_HEADER = "utc,gpu,utilisation_pct,memory_used_mib"


def write_json(path: Path, value: Any) -> None:
    """Write to a temporary name in the same folder, then rename, so that a reader never sees half a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False) + "\n", encoding="utf-8")
    temporary.replace(path)


def utc_now() -> str:
    return datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%S.%fZ")  # noqa: UP017 - datetime.UTC needs Python 3.11


@dataclass
class Events:
    """Appends to events.jsonl: {utc, monotonic_s, stage, state, detail}; state is begin, end, failed or note."""

    path: Path

    def add(self, stage: str, state: Literal["begin", "end", "failed", "note"], **detail: Any) -> None:
        line = {"utc": utc_now(), "monotonic_s": round(time.monotonic(), 6), "stage": stage, "state": state, **detail}
        with self.path.open("a", encoding="utf-8") as f:
            f.write(json.dumps(line, ensure_ascii=False) + "\n")


@dataclass(frozen=True)
class Value:
    value: Any
    source: str
    """File of the archive with line (logs/decode-0.log:812), URL, or command."""
    unit: str = ""


@dataclass
class Evidence:
    """Flat names such as recall.before.correct or decode-0.nixl.bytes_transferred -> Value."""

    values: dict[str, Value] = field(default_factory=dict)

    def put(self, name: str, value: Any, source: str, unit: str = "") -> None:
        self.values[name] = Value(value, source, unit)

    def get(self, name: str) -> Any:
        """The value, or None when it was not observed: absent is never the same as zero."""
        found = self.values.get(name)
        return None if found is None else found.value

    def write(self, path: Path) -> None:
        body = {name: {"value": v.value, "unit": v.unit, "source": v.source} for name, v in sorted(self.values.items())}
        write_json(path, {"schema": SCHEMA_VERSION, "values": body})

    @classmethod
    def read(cls, path: Path) -> Evidence:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"{path}: schema {data.get('schema')!r}; this version understands {SCHEMA_VERSION}")
        return cls({k: Value(v["value"], v["source"], v["unit"]) for k, v in data["values"].items()})


@dataclass(frozen=True)
class Check:
    name: str
    passed: bool | None
    """None: could not be judged because the run did not get there."""
    observed: str
    required: str
    source: str = ""
    needed: bool = True
    """False: shown, never decides."""


@dataclass(frozen=True)
class Verdict:
    verdict: VerdictWord
    line: str
    """The one line that a person reads, as 'VALID  tiny-p1d2  recall 27/27, 92,798,976 bytes in 18 transfers, 0 failed'."""
    reasons: tuple[str, ...]
    checks: tuple[Check, ...]
    text_checked: bool

    def write(self, path: Path) -> None:
        write_json(path, {"schema": SCHEMA_VERSION, "verdict": self.verdict, "line": self.line, "reasons": list(self.reasons),
                          "text_checked": self.text_checked, "checks": [vars(c) for c in self.checks]})

    @classmethod
    def read(cls, path: Path) -> Verdict:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data.get("schema") != SCHEMA_VERSION:
            raise ValueError(f"{path}: schema {data.get('schema')!r}; this version understands {SCHEMA_VERSION}")
        return cls(data["verdict"], data["line"], tuple(data["reasons"]), tuple(Check(**c) for c in data["checks"]), data["text_checked"])
