"""Reads what AIPerf 0.13 wrote for one load phase: profile_export_aiperf.json (schema 1.x) and profile_export.jsonl. Never the console
text.

Units are read from the files' unit tags and converted; an unknown unit is an error, not a guess (trap T27).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch.errors import ArchiveError, Where

SUMMARY = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"
_TO_MS = {"ms": 1.0, "sec": 1000.0, "s": 1000.0, "us": 1e-3, "ns": 1e-6}
_UNITS = {
    "request_throughput": "requests/sec", "output_token_throughput": "tokens/sec", "total_token_throughput": "tokens/sec",
    "input_token_throughput": "tokens/sec", "benchmark_duration": "sec", "goodput": "requests/sec", "request_error_rate": "%",
    "output_token_throughput_per_user": "tokens/sec/user",
}  # fmt: skip
_CHUNKS = b'"inter_chunk_latency":{"value":['


@dataclass(frozen=True, slots=True)
class Record:
    """One request of the profiling phase. Times in ns since the epoch and ms; ok is False for a failed or cancelled one."""

    start_ns: int
    end_ns: int
    ok: bool
    ttft_ms: float | None
    itl_ms: float | None
    latency_ms: float | None
    input_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class PhaseFiles:
    """summary: the JSON as it is. problems: what was found and survived, each in words."""

    folder: Path
    summary: dict[str, Any]
    records: tuple[Record, ...]
    problems: tuple[str, ...]
    warmup_tokens: tuple[int, ...] = ()
    """Input tokens of each warm-up request that succeeded: they take no part in any metric, but their KV cache was moved too."""

    def stat(self, name: str, which: str = "avg") -> float | None:
        """A statistic of a metric in AIPerf's own unit (checked for those with a known one); None when absent or not finite."""
        metric = self.summary.get(name)
        if not isinstance(metric, dict):
            return None
        wanted = _UNITS.get(name)
        if wanted is not None and metric.get("unit") != wanted:
            raise _bad(self.folder / SUMMARY, f"unit {metric.get('unit')!r}", f"{wanted!r}", name)
        value = metric.get(which)
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) else None


def _bad(path: Path, what: str, rule: str, key: str | None = None, line: int | None = None) -> ArchiveError:
    return ArchiveError(what, where=Where(path, line, key), rule=rule)


def parse_summary(data: bytes, path: Path) -> dict[str, Any]:
    """profile_export_aiperf.json; ArchiveError when it is cut short, foreign or of another major schema. path is only for messages."""
    try:
        body = json.loads(data)
    except (ValueError, RecursionError) as e:
        raise _bad(path, f"not JSON: {e}", "the file as AIPerf wrote it") from None
    if not isinstance(body, dict) or "aiperf_version" not in body or "schema_version" not in body:
        raise _bad(path, "no aiperf_version and schema_version", "profile_export_aiperf.json of AIPerf 0.13")
    if str(body["schema_version"]).split(".")[0] != "1":
        raise _bad(path, f"schema_version {body['schema_version']!r}", "1.x", "schema_version")
    return body


def _metric(metrics: dict[str, Any], name: str, *, milliseconds: bool = False) -> float | None:
    found = metrics.get(name)
    if found is None:
        return None
    value = found["value"]
    if milliseconds:
        if found["unit"] not in _TO_MS:
            raise ValueError(f"{name}: unit {found['unit']!r} is not a time")
        value *= _TO_MS[found["unit"]]
    return float(value)


def _record(line: bytes) -> tuple[Record, bool]:
    """(the request, whether it belongs to the profiling phase).

    The list of chunk latencies is cut out unread: it is nine tenths of the file and no definition uses
    it."""
    start = line.find(_CHUNKS)
    if start >= 0:
        line = line[: start + len(_CHUNKS)] + line[line.index(b"]", start) :]
    row = json.loads(line)
    meta, metrics = row["metadata"], row["metrics"]
    good = not row.get("error") and not meta.get("was_cancelled", False)
    record = Record(
        int(meta["request_start_ns"]), int(meta["request_end_ns"]), good,
        _metric(metrics, "time_to_first_token", milliseconds=True), _metric(metrics, "inter_token_latency", milliseconds=True),
        _metric(metrics, "request_latency", milliseconds=True),
        int(_metric(metrics, "input_sequence_length") or 0), int(_metric(metrics, "output_sequence_length") or 0),
    )  # fmt: skip
    return record, meta.get("benchmark_phase") == "profiling"


def parse_records(data: bytes, name: str) -> tuple[list[Record], list[int], list[str]]:
    """(profiling requests, input tokens of each good warm-up request, a problem per line that is no request: number and why)."""
    records: list[Record] = []
    warmup: list[int] = []
    problems: list[str] = []
    for number, line in enumerate(data.splitlines(), 1):
        try:
            record, profiling = _record(line)
        except (ValueError, KeyError, TypeError, AttributeError) as e:
            problems.append(f"{name}:{number}: not a request record ({type(e).__name__}: {e})")
            continue
        if not profiling:
            warmup += [record.input_tokens] if record.ok else []
            continue
        times = (record.ttft_ms, record.itl_ms, record.latency_ms)
        if any(t is not None and not (math.isfinite(t) and t >= 0) for t in times) or record.end_ns < record.start_ns:
            problems.append(f"{name}:{number}: a time that is negative, NaN or infinite; the request is left out")
            continue
        records.append(record)
    return records, warmup, problems


def read_phase(folder: Path, read: Callable[[Path], bytes] = Path.read_bytes) -> PhaseFiles:
    """Both files of load/<phase>/aiperf. A record that cannot be read is left out and reported; a wrong summary is an ArchiveError.

    read: how bytes are fetched; an archived run passes one that also checks the manifest.
    """
    path = folder / SUMMARY
    if not path.exists():
        raise _bad(path, "missing", "AIPerf writes it unless every request failed")
    summary = parse_summary(read(path), path)
    path = folder / RECORDS
    if not path.exists():
        return PhaseFiles(folder, summary, (), (f"{path.name} is missing: no percentile can be computed from requests",))
    records, warmup, problems = parse_records(read(path), path.name)
    good = sum(r.ok for r in records)
    counted = summary.get("request_count", {}).get("avg")
    if counted is not None and good != counted:
        problems.append(f"{SUMMARY} counts {counted:g} successful requests, {path.name} holds {good}")
    return PhaseFiles(folder, summary, tuple(records), tuple(problems), tuple(warmup))
