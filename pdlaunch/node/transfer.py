"""What the KV hand-over moved, from the workers' counters, and what it should have moved, from the token counts of every request.

The bytes are counted on the decode workers, which read them (vllm/distributed/kv_transfer/kv_connector/v1/nixl/stats.py: one observation of
vllm:nixl_bytes_transferred per request and rank). Right text alone proves nothing: decode can compute the prompt again itself (vllm#26896).
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contracts import SNAPSHOTS, Evidence
from .load import RECORDS, server_token_counts
from .metrics import Metrics, moved, read
from .spec import EngineSpec, Spec
from .timeline import read_events

COUNTERS = {
    "bytes": ("vllm:nixl_bytes_transferred_sum", {}),
    "transfers": ("vllm:nixl_xfer_time_seconds_count", {}),
    "failed_transfers": ("vllm:nixl_num_failed_transfers_total", {}),
    "failed_notifications": ("vllm:nixl_num_failed_notifications_total", {}),
    "expired": ("vllm:nixl_num_kv_expired_reqs_total", {}),
    "preemptions": ("vllm:num_preemptions_total", {}),
    "requests": ("vllm:request_prompt_tokens_count", {}),
    "requests_with_error": ("vllm:request_success_total", {"finished_reason": "error"}),
    "tokens.external_kv_transfer": ("vllm:prompt_tokens_by_source_total", {"source": "external_kv_transfer"}),
    "tokens.local_compute": ("vllm:prompt_tokens_by_source_total", {"source": "local_compute"}),
    "tokens.local_cache_hit": ("vllm:prompt_tokens_by_source_total", {"source": "local_cache_hit"}),
}
FAMILY = "vllm:"
REQUEST_GROUPS = (("gate", 0), ("recall.before", 0), ("behaviour", 0), ("agreement", 0), ("load", 1), ("recall.during", 1),
                  ("recall.after", 2))
"""Requests and the snapshot of SNAPSHOTS after which they are sent."""


@dataclass(frozen=True)
class Window:
    """From one snapshot to a later one; name is `total` for the whole run."""

    name: str
    begin: str
    end: str


def windows(run_dir: Path, engines: tuple[EngineSpec, ...]) -> list[Window]:
    """Consecutive pairs of the snapshots that exist for every engine, then the whole."""
    there = [when for when in SNAPSHOTS if all((run_dir / "metrics" / f"{e.name}.{when}.prom").exists() for e in engines)]
    pairs = [Window(f"{a}-{b}", a, b) for a, b in itertools.pairwise(there)]
    return [*pairs, Window("total", there[0], there[-1])] if pairs else []


def put_transfer(evidence: Evidence, spec: Spec, run_dir: Path) -> None:
    """transfer.<role>.<window>.<counter>, <engine>.<counter> for the whole run, and predicted bytes of each window."""
    engines = tuple(e for e in spec.engines if e.role in ("prefill", "decode", "agg") and e.kind != "dynamo.mocker")
    snapshots = {(e.name, when): read(run_dir / "metrics" / f"{e.name}.{when}.prom") for e in engines for when in SNAPSHOTS}
    _put_scrapes(evidence, engines, snapshots)
    for window in windows(run_dir, engines) if engines else []:
        for role in ("prefill", "decode", "agg"):
            members = [e for e in engines if e.role == role]
            if members:
                _put_window(evidence, role, members, window, snapshots)
        if spec.proof.disaggregated and spec.proof.prediction is not None:
            _put_prediction(evidence, spec, run_dir, window)
    for engine in engines:
        _put_cache(evidence, engine, snapshots)


def _put_scrapes(evidence: Evidence, engines: tuple[EngineSpec, ...], snapshots: dict[tuple[str, str], Metrics | None]) -> None:
    """Which engine answered in whose name: with a busy DYN_SYSTEM_PORT a worker goes on, and its port shows another worker's counters."""
    seen: dict[str, str] = {}
    for engine in engines:
        first = next((m for when in SNAPSHOTS if (m := snapshots[engine.name, when]) is not None), None)
        source = f"metrics/{engine.name}.*.prom"
        if first is not None:
            evidence.put(f"{engine.name}.metrics", first.has_family(FAMILY), source)
        workers = sorted(first.values_of("worker_id")) if first is not None else []
        if workers:
            evidence.put(f"{engine.name}.worker_ids", workers, source)
        for worker in workers:
            if worker in seen:
                evidence.put("metrics.shared", f"{engine.name} and {seen[worker]} show the counters of one worker ({worker})", source)
            seen[worker] = engine.name


def _put_window(
    evidence: Evidence, role: str, members: list[EngineSpec], window: Window, snapshots: dict[tuple[str, str], Metrics | None]
) -> None:
    for counter, (name, labels) in COUNTERS.items():
        parts = {e.name: moved(snapshots[e.name, window.begin], snapshots[e.name, window.end], name, FAMILY, **labels) for e in members}
        known = [value for value in parts.values() if value is not None]
        source = f"metrics/{{{','.join(parts)}}}.{{{window.begin},{window.end}}}.prom {name}"
        if len(known) == len(parts):
            evidence.put(f"transfer.{role}.{window.name}.{counter}", _whole(sum(known)), source, "bytes" if counter == "bytes" else "")
        if window.name == "total":
            for engine, value in parts.items():
                if value is not None:
                    evidence.put(f"{engine}.{counter}", _whole(value), source)


def _put_prediction(evidence: Evidence, spec: Spec, run_dir: Path, window: Window) -> None:
    """predicted_bytes where every request of the window is known and nothing but a fresh hand-over happened; else why it is not exact."""
    prediction = spec.proof.prediction
    assert prediction is not None
    groups = request_groups(spec, run_dir)
    first, last = SNAPSHOTS.index(window.begin), SNAPSHOTS.index(window.end)
    inside = [name for name, after in REQUEST_GROUPS if first <= after < last]
    names = [name for name in inside if name in groups]
    counts = [n for name in names for n in groups[name]]
    prefix = f"transfer.decode.{window.name}"
    doubts = [f"{name} left no record" for name in inside if name in _sent(spec, run_dir) and name not in groups]
    doubts += [f"{sum(n is None for n in groups[name])} requests of {name} have no token count" for name in names if None in groups[name]]
    for counter in ("tokens.local_cache_hit", "preemptions", "failed_transfers"):
        value = evidence.get(f"{prefix}.{counter}")
        if value is None or value:
            doubts.append(f"{counter} is {'not known' if value is None else value}")
    source = f"spec.json proof.prediction and the token counts of {', '.join(names) or 'no request'}"
    evidence.put(f"{prefix}.requests_counted", len(counts), source)
    if doubts:
        evidence.put(f"{prefix}.not_exact", "; ".join(doubts), source)
    else:
        tokens = [n for n in counts if n is not None]
        evidence.put(f"{prefix}.predicted_bytes", sum(prediction.bytes_of_prompt(n) for n in tokens), source, "bytes")
        evidence.put(f"{prefix}.predicted_tokens", sum(tokens), source)


def _sent(spec: Spec, run_dir: Path) -> set[str]:
    """Groups of requests whose stage began, behaviour only where it asks the model something."""
    begun = {event["stage"] for event in read_events(run_dir / "events.jsonl") if event["state"] == "begin"}
    stages = {"gate": "first_token", "behaviour": "behaviour", "agreement": "agreement", "load": "load",
              **{f"recall.{when}": f"recall_{when}" for when in ("before", "during", "after")}}
    silent = set() if set(spec.behaviour) - {"build_identity"} else {"behaviour"}
    return {group for group, stage in stages.items() if stage in begun} - silent


def request_groups(spec: Spec, run_dir: Path) -> dict[str, list[int | None]]:
    """usage.prompt_tokens of every request to the deployment, by group; None where a request failed or the server did not say.

    A group that the spec asks for and that left no file is missing here: nothing of it was sent.
    """
    files = {"gate": "gate.jsonl", "behaviour": "behaviour.jsonl", "agreement": "agreement.jsonl",
             **{f"recall.{when}": f"recall/{when}.jsonl" for when in ("before", "during", "after")}}
    groups: dict[str, list[int | None]] = {}
    for name, relative in files.items():
        rows = read_rows(run_dir / relative)
        if rows:
            groups[name] = [None if row.get("error") else row.get("prompt_tokens") for row in rows
                            if row.get("target", "deployment") == "deployment" and not str(row.get("error", "")).startswith("not sent")]
    phases: list[int | None] = []
    for phase in spec.load.phases if spec.load else ():
        records = run_dir / "load" / phase.name / "aiperf" / RECORDS
        asked = phase.requests + phase.warmup_requests
        if (run_dir / "load" / phase.name / "command.json").exists():
            counts = server_token_counts(records) if records.exists() else []
            phases += counts + [None] * max(0, asked - len(counts))
    return {**groups, "load": phases} if phases else groups


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The whole lines of a .jsonl file; empty when it is absent."""
    rows = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for line in lines:
        try:
            row = json.loads(line)
        except ValueError:
            continue
        if isinstance(row, dict):
            rows.append(row)
    return rows


def _put_cache(evidence: Evidence, engine: EngineSpec, snapshots: dict[tuple[str, str], Metrics | None]) -> None:
    for when in SNAPSHOTS:
        metrics = snapshots[engine.name, when]
        labels = metrics.labels("vllm:cache_config_info") if metrics is not None else {}
        if labels:
            for key in ("block_size", "num_gpu_blocks", "kv_cache_size_tokens", "kv_cache_max_concurrency", "cache_dtype",
                        "enable_prefix_caching", "kv_cache_layout", "kv_cache_memory_bytes"):
                if key in labels:
                    evidence.put(f"{engine.name}.cache.{key}", labels[key], f"metrics/{engine.name}.{when}.prom vllm:cache_config_info")
            return


def _whole(value: float) -> int | float:
    return int(value) if value.is_integer() else value
