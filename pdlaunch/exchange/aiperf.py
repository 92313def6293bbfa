"""AIPerf's profile_export_aiperf.json (schema 1.4): a point as AIPerf would summarise it, and back.

AIPerf has no roles, no verdict and no denominators other than the GPUs that its telemetry sees; those stand under the key `pdlaunch`,
which AIPerf's readers skip (a metric is an object with `unit`). AIPerf's own rates divide by its window, a little longer than
benchmark_duration.
"""

from __future__ import annotations

import math
from typing import Any

from pdlaunch.errors import ArchiveError
from pdlaunch.exchange.points import Point, from_json, to_json

_METRICS = {
    "ttft_ms": ("time_to_first_token", "ms"),
    "itl_ms": ("inter_token_latency", "ms"),
    "latency_ms": ("request_latency", "ms"),
    "input_tokens": ("input_sequence_length", "tokens"),
    "output_tokens": ("output_sequence_length", "tokens"),
}
_RATES = {
    "request": ("request_throughput", "requests/sec"),
    "input": ("input_token_throughput", "tokens/sec"),
    "output": ("output_token_throughput", "tokens/sec"),
    "total": ("total_token_throughput", "tokens/sec"),
}
_STATS = {"mean": "avg", "sd": "std", **{k: k for k in ("min", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")}}


def write(point: Point) -> dict[str, Any]:
    """The summary. tpot is not an AIPerf metric and stands only in the point."""
    body: dict[str, Any] = {"schema_version": "1.4", "aiperf_version": point.versions.get("aiperf", "0.13.0")}
    for ours, (name, unit) in _METRICS.items():
        if ours in point.stats:
            values = {theirs: point.stats[ours][key] for key, theirs in _STATS.items() if key in point.stats[ours]}
            body[name] = {"unit": unit, **values, "count": point.requests}
    for ours, (name, unit) in _RATES.items():
        if ours in point.rates:
            body[name] = {"unit": unit, "avg": point.rates[ours]}
    body["request_count"] = {"unit": "requests", "avg": float(point.requests)}
    if point.failures:
        body["error_request_count"] = {"unit": "requests", "avg": float(point.failures)}
    if point.duration_s is not None:
        body["benchmark_duration"] = {"unit": "sec", "avg": point.duration_s}
    load = {"concurrency": point.concurrency} if point.concurrency is not None else {"request_rate": point.request_rate_per_s}
    body |= {
        "input_config": {
            "models": {"items": [{"name": point.model}]},
            "phases": [{"name": "profiling", "kind": "profiling", **load}],
            "datasets": [{"name": "main", "type": "synthetic", "prompts": {"isl": {"mean": point.isl}, "osl": {"mean": point.osl}}}],
        },
        "is_complete": True,
        "was_cancelled": False,
        "start_time": point.start,
        "end_time": point.end,
        "pdlaunch": {"point": to_json(point)},
    }
    return body


def _config(summary: dict[str, Any]) -> tuple[str, int, int, dict[str, Any]]:
    config = summary.get("input_config") or {}
    models = ((config.get("models") or {}).get("items") or [{}])[0]
    prompts = ((config.get("datasets") or [{}])[0]).get("prompts") or {}
    phases = [p for p in config.get("phases") or [] if p.get("kind") == "profiling"] or [{}]
    lengths = [int((prompts.get(k) or {}).get("mean") or 0) for k in ("isl", "osl")]
    return str(models.get("name", "")), lengths[0], lengths[1], phases[0]


def read(summary: dict[str, Any]) -> Point:
    """The inverse; of a file that AIPerf itself wrote, everything that it says (no roles: AIPerf does not know them)."""
    if "aiperf_version" not in summary:
        raise ArchiveError("no aiperf_version", rule="profile_export_aiperf.json of AIPerf")
    own = summary.get("pdlaunch")
    if own:
        return from_json(own["point"])
    stats: dict[str, dict[str, float]] = {}
    for ours, (name, unit) in {**_METRICS}.items():
        block = summary.get(name)
        if not isinstance(block, dict):
            continue
        if block.get("unit") != unit:
            raise ArchiveError(f"{name}: unit {block.get('unit')!r}", rule=unit)
        stats[ours] = {key: float(block[theirs]) for key, theirs in _STATS.items() if isinstance(block.get(theirs), int | float)}
    rates = {ours: float(summary[name]["avg"]) for ours, (name, _) in _RATES.items() if name in summary}

    def average(name: str) -> float | None:
        value = (summary.get(name) or {}).get("avg")
        return float(value) if isinstance(value, int | float) and math.isfinite(value) else None

    model, isl, osl, phase = _config(summary)
    return Point(
        str(summary.get("benchmark_id", "")),
        str(phase.get("name", "profiling")),
        model,
        "",
        {"aiperf": str(summary["aiperf_version"])},
        "",
        "",
        "",
        isl,
        osl,
        phase.get("concurrency"),
        phase.get("request_rate") or phase.get("rate"),
        int(average("request_count") or 0),
        int(average("error_request_count") or 0),
        average("benchmark_duration"),
        str(summary.get("start_time", "")),
        str(summary.get("end_time", "")),
        "GPU",
        {},
        rates,
        stats,
        "",
    )
