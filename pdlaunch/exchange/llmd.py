"""llm-d benchmark report 0.2.1 (llmd_benchmark_report, schema_v0_2.py), written as plain values; its own package validates them in the
tests.

Latencies in seconds and s/token, lengths as counts. What the standardized part has no field for (denominators, verdict, speculation,
roles of an aggregated engine, per-GPU rates) stands in scenario.load.native.config.pdlaunch, which the schema leaves free, so that a
round trip loses nothing.
"""

from __future__ import annotations

import hashlib
import json
import math
from datetime import UTC, datetime
from typing import Any

from pdlaunch.errors import ArchiveError
from pdlaunch.exchange.points import Point, Role, to_json
from pdlaunch.exchange.points import from_json as point_from_json

VERSION = "0.2.1"
_LATENCY = {
    "time_to_first_token": ("ttft_ms", "s"),
    "time_per_output_token": ("tpot_ms", "s/token"),
    "inter_token_latency": ("itl_ms", "s/token"),
    "request_latency": ("latency_ms", "s"),
}
_LENGTH = {"input_length": "input_tokens", "output_length": "output_tokens"}
_RATES = {
    "input_token_rate": ("input", "tokens/s"),
    "output_token_rate": ("output", "tokens/s"),
    "total_token_rate": ("total", "tokens/s"),
    "request_rate": ("request", "queries/s"),
}
_STATS = {"mean": "mean", "sd": "stddev", **{k: k for k in ("min", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")}}
_ROLES = {"prefill": "prefill", "decode": "decode", "agg": "replica"}


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:32]


def _statistics(stats: dict[str, float], units: str, scale: float) -> dict[str, Any]:
    return {"units": units, **{theirs: stats[ours] * scale for ours, theirs in _STATS.items() if ours in stats}}


def _zoned(text: str) -> str | None:
    """AIPerf writes naive local time; the report wants a zone, so the machine's is added. None for no time."""
    if not text:
        return None
    moment = datetime.fromisoformat(text)
    return (moment if moment.tzinfo else moment.astimezone()).astimezone(UTC).isoformat()


def _component(point: Point, role: str) -> dict[str, Any]:
    r = point.roles[role]
    return {
        "metadata": {
            "schema_version": "0.0.1",
            "label": f"{role}-engines",
            "cfg_id": _digest([role, to_json(point)["roles"]]),
            "description": None,
        },
        "standardized": {
            "kind": "inference_engine",
            "tool": "vllm",
            "tool_version": point.versions.get("vllm", "unknown"),
            "role": _ROLES[role],
            "replicas": r.engines,
            "model": {"name": point.model},
            "accelerator": {
                "model": point.hardware,
                "count": r.gpus,
                "parallelism": {"tp": r.tp, "pp": r.pp, "dp": r.dp, "dp_local": r.dp, "workers": r.engines, "ep": 1},
            },
        },
        "native": {"args": None, "envars": None, "config": None},
    }


def write(point: Point) -> dict[str, Any]:
    """The report of one phase. Only finite numbers are written; a field without a measurement is absent."""
    length = {
        name: {"distribution": "fixed", "value": value} for name, value in (("input_seq_len", point.isl), ("output_seq_len", point.osl))
    }
    load = {
        "tool": "aiperf",
        "tool_version": point.versions.get("aiperf", "0.13"),
        "parallelism": 1,
        "source": "random",
        "stage": 0,
        **length,
    }
    load |= {k: v for k, v in (("rate_qps", point.request_rate_per_s), ("concurrency", point.concurrency)) if v is not None}
    requests: dict[str, Any] = {"total": point.requests + point.failures, "failures": point.failures}
    requests |= {k: _statistics(point.stats[ours], "count", 1.0) for k, ours in _LENGTH.items() if ours in point.stats}
    latency = {k: _statistics(point.stats[ours], units, 1e-3) for k, (ours, units) in _LATENCY.items() if ours in point.stats}
    throughput = {k: {"units": units, "mean": point.rates[ours]} for k, (ours, units) in _RATES.items() if ours in point.rates}
    time = {"start": _zoned(point.start), "end": _zoned(point.end)}
    if point.duration_s is not None:
        time["duration"] = f"PT{point.duration_s!r}S"
    own = {
        "denominators": {"kind": point.denominator, **{k: r.gpus for k, r in point.roles.items()}, "total": point.gpus},
        "per_gpu": point.per_gpu(),
        "point": to_json(point),
    }
    return {
        "version": VERSION,
        "run": {
            "uid": _digest([point.run, point.phase]),
            "eid": point.run,
            "time": {k: v for k, v in time.items() if v is not None},
            "description": f"{point.run} phase {point.phase}" + (f"; {point.sharing}" if point.sharing else ""),
            "keywords": [point.verdict, f"speculation {point.speculation}", *(["shared GPUs"] if point.sharing else [])],
        },
        "scenario": {
            "stack": [_component(point, role) for role in point.roles],
            "load": {
                "metadata": {"schema_version": "0.0.1", "cfg_id": _digest(load), "description": point.phase},
                "standardized": load,
                "native": {"args": None, "envars": None, "config": {"pdlaunch": own}},
            },
        },
        "results": {"request_performance": {"aggregate": {"requests": requests, "latency": latency, "throughput": throughput}}},
    }


def _values(block: dict[str, Any], path: str) -> dict[str, float]:
    units = block.get("units")
    scale = {"s": 1000.0, "s/token": 1000.0, "ms": 1.0, "ms/token": 1.0, "count": 1.0}.get(str(units))
    if scale is None:
        raise ArchiveError(f"{path}: units {units!r}", rule="s, ms, s/token, ms/token or count")
    found = {}
    for ours, theirs in _STATS.items():
        value = block.get(theirs)
        if isinstance(value, int | float) and math.isfinite(value):
            found[ours] = value * scale
    return found


def read(report: dict[str, Any]) -> Point:
    """The inverse. Of a report that this project did not write, only what the standardized part says."""
    if str(report.get("version")) not in ("0.2", VERSION):
        raise ArchiveError(f"version {report.get('version')!r}", rule=f"llm-d benchmark report {VERSION}")
    load = (report.get("scenario") or {}).get("load") or {}
    own = ((load.get("native") or {}).get("config") or {}).get("pdlaunch")
    if own:
        return point_from_json(own["point"])
    aggregate = ((report.get("results") or {}).get("request_performance") or {}).get("aggregate") or {}
    standard, requests = load.get("standardized") or {}, aggregate.get("requests") or {}
    stats = {ours: _values(aggregate["latency"][k], k) for k, (ours, _) in _LATENCY.items() if (aggregate.get("latency") or {}).get(k)}
    stats |= {ours: _values(requests[k], k) for k, ours in _LENGTH.items() if requests.get(k)}
    rates = {
        ours: float(aggregate["throughput"][k]["mean"]) for k, (ours, _) in _RATES.items() if (aggregate.get("throughput") or {}).get(k)
    }
    roles, hardware, model, versions = {}, "", "", {}
    for part in (report.get("scenario") or {}).get("stack") or []:
        s = part["standardized"]
        if s.get("kind") != "inference_engine":
            continue
        p = s["accelerator"]["parallelism"]
        role = {v: k for k, v in _ROLES.items()}.get(s["role"], s["role"])
        roles[role] = Role(p.get("tp", 1), p.get("pp", 1), p.get("dp", 1), s["replicas"], s["accelerator"]["count"])
        hardware, model, versions[s["tool"]] = s["accelerator"]["model"], s["model"]["name"], s["tool_version"]
    failures = int(requests.get("failures") or 0)
    concurrency = standard.get("concurrency")
    users = int(concurrency) if isinstance(concurrency, int | float) and math.isfinite(concurrency) else None
    return Point(
        str(report["run"].get("eid") or report["run"]["uid"]),
        str((load.get("metadata") or {}).get("description") or ""),
        model,
        "llm-d",
        versions,
        hardware,
        "",
        "",
        int(((standard.get("input_seq_len") or {}).get("value")) or 0),
        int(((standard.get("output_seq_len") or {}).get("value")) or 0),
        users,
        standard.get("rate_qps"),
        int(requests.get("total") or 0) - failures,
        failures,
        None,
        "",
        "",
        "GPU",
        roles,
        rates,
        stats,
        "",
    )
