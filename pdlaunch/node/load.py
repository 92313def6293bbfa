"""One AIPerf 0.13.0 phase in a fresh folder, under a deadline, judged by the JSON that it wrote.

AIPerf's exit code says little: it is 0 with half the requests failed, and 0 when --failed-request-threshold cancelled the run (both seen).
A load tool that ends with 0 and zero tokens is a known way to publish a wrong number.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import tempfile
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contracts import write_json
from .folders import temporary
from .process import Child, Exit, tail
from .spec import LoadPhase, LoadSpec, to_json

SLO_METRICS = ("time_to_first_token", "time_to_second_token", "inter_token_latency", "request_latency")
"""Goodput metrics in milliseconds. An unknown one kills AIPerf's record processor and the run then waits for ever."""
STREAMING_METRICS = frozenset(SLO_METRICS) - {"request_latency"}
MAX_REQUEST_TIMEOUT_S = 600.0
STOP_GRACE_S = 5.0
MAX_TMP_CHARS = 40
"""AIPerf's IPC sockets lie in the temporary folder, and a socket path may have 107 characters."""
EXPORT = "profile_export_aiperf.json"
RECORDS = "profile_export.jsonl"

_MS = {"ms": 1.0, "s": 1000.0, "sec": 1000.0, "us": 0.001, "ns": 1e-6}
KEPT_METRICS = ("time_to_first_token", "inter_token_latency", "request_latency", "request_throughput", "output_token_throughput",
                "total_token_throughput", "input_sequence_length", "output_sequence_length", "goodput", "good_request_fraction",
                "benchmark_duration", "request_count", "error_request_count", "completed_request_count", "request_error_rate")
_STATISTICS = ("avg", "min", "max", "p50", "p90", "p95", "p99", "std", "count")


@dataclass(frozen=True)
class PhaseResult:
    """What a phase did; why is empty when it passed. exit_code None: AIPerf could not be started or did not end."""

    name: str
    passed: bool
    why: tuple[str, ...]
    requested: int
    completed: int | None
    errors: int | None
    error_rate_pct: float | None
    output_tokens: int | None
    exit_code: int | None
    timed_out: bool
    stopped: bool
    wall_s: float
    metrics: dict[str, dict[str, Any]]
    """AIPerf metric -> {unit, avg, p50, ...}, latencies in ms whatever unit AIPerf used."""
    aiperf_version: str = ""


def phase_problems(phase: LoadPhase) -> list[tuple[str, str]]:
    """(key, rule) of what AIPerf 0.13.0 would refuse, hang on or misread; for the launcher, before anything is submitted."""
    rules = [
        ("name", bool(re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", phase.name)), "letters, digits, '.', '_' and '-', at most 64"),
        ("input_tokens", phase.input_tokens >= 1, "at least 1"),
        ("output_tokens", phase.output_tokens >= 1, "at least 1"),
        ("requests", phase.requests >= 1, "at least 1"),
        ("concurrency", phase.concurrency is None or phase.concurrency >= 1, "at least 1"),
        ("concurrency", phase.concurrency is None or phase.concurrency <= phase.requests, "at most the number of requests"),
        ("request_rate_per_s", phase.request_rate_per_s is None or phase.request_rate_per_s > 0, "above 0"),
        ("concurrency", not (phase.concurrency is None and phase.request_rate_per_s is None), "give concurrency or request_rate_per_s"),
        ("warmup_requests", phase.warmup_requests >= 0, "at least 0 (0 means no warm-up)"),
        ("seed", 0 <= phase.seed < 2**32, "0 to 4294967295"),
        ("max_error_rate_pct", 0 <= phase.max_error_rate_pct < 100, "0 to below 100, in percent"),
        ("output_length_tolerance_pct", 0 <= phase.output_length_tolerance_pct < 100, "0 to below 100, in percent"),
        ("timeout_s", phase.timeout_s >= 30, "at least 30 s: AIPerf alone needs about 15 s to start and to write its results"),
    ]
    found = [(key, rule) for key, good, rule in rules if not good]
    for metric, limit in phase.slos_ms.items():
        if metric not in SLO_METRICS:
            found.append((f"slos_ms.{metric}", f"one of {', '.join(SLO_METRICS)}"))
        elif metric in STREAMING_METRICS and not phase.streaming:
            found.append((f"slos_ms.{metric}", "needs streaming: true"))
        elif limit <= 0:
            found.append((f"slos_ms.{metric}", "above 0, in milliseconds"))
    return found


def aiperf_argv(load: LoadSpec, phase: LoadPhase, base_url: str, model: str, metrics_urls: list[str], artifact_dir: Path) -> list[str]:
    """The command of one phase. Every request has a prompt of its own: with AIPerf's default of 100 entries later ones hit the cache."""
    argv = [
        load.aiperf, "profile", "--model", model, "--url", base_url, "--endpoint-type", "chat", "--tokenizer", load.tokenizer,
        "--isl", str(phase.input_tokens), "--isl-stddev", "0", "--osl", str(phase.output_tokens), "--osl-stddev", "0",
        "--extra-inputs", "ignore_eos:true", "--extra-inputs", "temperature:0", "--use-server-token-count",
        "--connection-reuse-strategy", phase.connection_reuse, "--num-dataset-entries", str(phase.requests + phase.warmup_requests),
        "--request-count", str(phase.requests), "--random-seed", str(phase.seed), "--ui", "none", "--export-level", "records",
        "--no-gpu-telemetry", "--artifact-dir", str(artifact_dir),
        "--request-timeout-seconds", f"{min(MAX_REQUEST_TIMEOUT_S, phase.timeout_s / 2):g}",
    ]
    argv += ["--streaming"] if phase.streaming else []
    argv += ["--concurrency", str(phase.concurrency)] if phase.concurrency is not None else []
    argv += ["--request-rate", f"{phase.request_rate_per_s:g}"] if phase.request_rate_per_s is not None else []
    argv += ["--warmup-request-count", str(phase.warmup_requests)] if phase.warmup_requests else []
    argv += ["--goodput", " ".join(f"{metric}:{limit:g}" for metric, limit in phase.slos_ms.items())] if phase.slos_ms else []
    return argv + (["--server-metrics", *metrics_urls] if metrics_urls else ["--no-server-metrics"])

SIGNALLED = frozenset({128 + signal.SIGINT, 128 + signal.SIGKILL, 128 + signal.SIGTERM})
SIGNAL_RACE_S = 1.0
"""A signal that ends the whole job reaches AIPerf and the supervisor in any order; AIPerf's end is then the stop."""


def run_phase(
    load: LoadSpec, phase: LoadPhase, base_url: str, model: str, metrics_urls: list[str], out_dir: Path, stop: threading.Event
) -> PhaseResult:
    """Run AIPerf in out_dir/aiperf and write out_dir/phase.json. Blocks at most phase.timeout_s and a few seconds for the stop.

    Raises FileExistsError when out_dir/aiperf is there: old files would be read as new results. StageFailed when it cannot be started.
    """
    artifacts = out_dir / "aiperf"
    artifacts.mkdir(parents=True, exist_ok=False)
    argv = aiperf_argv(load, phase, base_url, model, metrics_urls, artifacts)
    write_json(out_dir / "command.json", {"argv": argv, "command": shlex.join(["env", "-u", "HF_HUB_OFFLINE", *argv])})
    began = time.monotonic()
    tmp = _private_tmp()
    try:
        child = Child(f"aiperf-{phase.name}", argv, _environment(load, tmp), out_dir / "aiperf.log")
        ended = child.wait(phase.timeout_s, stop)
        if ended is not None and ended.code in SIGNALLED and stop.wait(SIGNAL_RACE_S):
            ended = None
        if ended is None:
            child.stop(STOP_GRACE_S)
        else:
            child.kill_group()
    finally:
        shutil.rmtree(tmp, ignore_errors=True)
    result = judge_phase(phase, artifacts, ended, out_dir / "aiperf.log", stopped=ended is None and stop.is_set(),
                         wall_s=time.monotonic() - began)
    write_json(out_dir / "phase.json", to_json(result))
    return result


def _environment(load: LoadSpec, tmp: str) -> dict[str, str]:
    """With HF_HUB_OFFLINE set, AIPerf refuses a tokenizer that is a local folder (aiperf#1339)."""
    hidden = {"HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE"} if Path(load.tokenizer).is_dir() else set()
    return {**{k: v for k, v in os.environ.items() if k not in hidden}, "TMPDIR": tmp, "COLUMNS": "200"}


def _private_tmp() -> str:
    """AIPerf leaves aiperf_mmap_* folders behind; here they go with their parent."""
    base = tempfile.gettempdir()
    return str(temporary(base if len(base) <= MAX_TMP_CHARS else "/tmp"))


def judge_phase(phase: LoadPhase, artifacts: Path, ended: Exit | None, log: Path, *, stopped: bool, wall_s: float) -> PhaseResult:
    """Judge what lies in `artifacts`; ended is None when AIPerf had to be stopped."""
    why = []
    if stopped:
        why.append("the run was stopped during this phase")
    elif ended is None:
        why.append(f"AIPerf did not end within {phase.timeout_s:g} s")
    elif ended.code != 0:
        why.append(f"AIPerf ended with exit code {ended.code}")
    export = read_export(artifacts / EXPORT)
    if export is None:
        why.append(f"AIPerf left no {EXPORT}: {_record_error(artifacts / RECORDS) or _last_error(log)}")
    else:
        why += export_problems(export, phase)
    document = export or {}
    metrics = {name: document[name] for name in KEPT_METRICS if isinstance(document.get(name), dict)}
    errors = _value(document, "error_request_count")
    return PhaseResult(
        name=phase.name, passed=not why, why=tuple(why), requested=phase.requests,
        completed=_whole(_value(document, "completed_request_count")),
        errors=None if export is None else _whole(errors or 0.0), error_rate_pct=_value(document, "request_error_rate"),
        output_tokens=_whole(_value(document, "total_output_tokens")), exit_code=None if ended is None else ended.code,
        timed_out=ended is None and not stopped, stopped=stopped, wall_s=round(wall_s, 3),
        metrics={name: in_milliseconds(metric) for name, metric in metrics.items()},
        aiperf_version=str(document.get("aiperf_version", "")))


def judge_again(phase: LoadPhase, folder: Path) -> PhaseResult | None:
    """The result of an archived phase from AIPerf's own files; only how AIPerf ended is taken from phase.json. None when it did not start.

    A phase that was under way when the supervisor died has no phase.json: it counts as stopped.
    """
    if not (folder / "command.json").exists():
        return None
    told = read_export(folder / "phase.json") or {"stopped": True}
    code = told.get("exit_code")
    ended = Exit(int(code), False, False) if isinstance(code, int) else None
    return judge_phase(phase, folder / "aiperf", ended, folder / "aiperf.log", stopped=bool(told.get("stopped")),
                       wall_s=float(told.get("wall_s") or 0.0))


def read_export(path: Path) -> dict[str, Any] | None:
    """profile_export_aiperf.json, or None when it is absent or not a JSON object."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return document if isinstance(document, dict) else None


def export_problems(export: dict[str, Any], phase: LoadPhase) -> list[str]:
    """What makes the numbers of this export worthless, in plain words; the weightiest first."""
    found = []
    if export.get("was_cancelled") is not False:
        found.append(f"AIPerf says was_cancelled: {export.get('was_cancelled')}")
    if export.get("is_complete") is not True:
        found.append(f"AIPerf says is_complete: {export.get('is_complete')} ({export.get('incomplete_reason') or 'no reason given'})")
    completed = _value(export, "completed_request_count")
    if completed != phase.requests:
        found.append(f"{_shown(completed)} of {phase.requests} requests completed")
    rate, unit = _value(export, "request_error_rate"), (export.get("request_error_rate") or {}).get("unit")
    if rate is None or unit != "%":
        found.append(f"the error rate is not a percentage: {export.get('request_error_rate')}")
    elif rate > phase.max_error_rate_pct:
        found.append(f"error rate {rate:.3g} % is above {phase.max_error_rate_pct:g} %{_first_error(export)}")
    tokens = _value(export, "total_output_tokens")
    if not tokens or tokens <= 0:
        found.append(f"{_shown(tokens)} output tokens")
    else:
        found += _length_problems(export, phase)
    for name in SLO_METRICS:
        if isinstance(export.get(name), dict) and export[name].get("unit") not in _MS:
            found.append(f"{name} has the unknown unit {export[name].get('unit')!r}")
    return found


def _length_problems(export: dict[str, Any], phase: LoadPhase) -> list[str]:
    lengths = export.get("output_sequence_length") or {}
    allowed = max(1.0, phase.output_tokens * phase.output_length_tolerance_pct / 100)
    off = [f"{name} {_shown(lengths.get(name))}" for name in ("avg", "min", "max")
           if not isinstance(lengths.get(name), int | float) or abs(lengths[name] - phase.output_tokens) > allowed]
    if not off:
        return []
    return [f"output lengths ({', '.join(off)}) are not within {phase.output_length_tolerance_pct:g} % of {phase.output_tokens}"]


def in_milliseconds(metric: dict[str, Any]) -> dict[str, Any]:
    """unit and statistics of one metric; times in ms except for benchmark_duration's own `sec`, which stays what it is called."""
    unit = metric.get("unit")
    factor = _MS.get(str(unit), 1.0) if unit in ("s", "us", "ns") else 1.0
    kept = {name: metric[name] * factor for name in _STATISTICS if name != "count" and isinstance(metric.get(name), int | float)}
    if isinstance(metric.get("count"), int | float):
        kept["count"] = metric["count"]
    return {"unit": "ms" if unit in ("s", "us", "ns") else unit, **kept}


def server_token_counts(records: Path) -> list[int | None]:
    """usage.prompt_tokens of every request that AIPerf sent, warm-up included; None where the server did not say (errors too)."""
    counts: list[int | None] = []
    with records.open(encoding="utf-8") as file:
        for line in file:
            record = json.loads(line)
            value = ((record.get("metrics") or {}).get("usage_prompt_tokens") or {}).get("value")
            counts.append(int(value) if isinstance(value, int | float) and not record.get("error") else None)
    return counts


def _value(export: dict[str, Any], name: str) -> float | None:
    metric = export.get(name)
    value = metric.get("avg") if isinstance(metric, dict) else None
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _shown(value: Any) -> str:
    return "an unknown number" if value is None else f"{value:g}" if isinstance(value, int | float) else str(value)


def _first_error(export: dict[str, Any]) -> str:
    for entry in export.get("error_summary") or []:
        details = entry.get("error_details") or {}
        return f" (first error: {details.get('type')}: {str(details.get('message'))[:200]})"
    return ""


def _record_error(records: Path) -> str:
    """The first error of a request, as AIPerf recorded it; '' when there is none."""
    try:
        for line in records.read_text(encoding="utf-8").splitlines():
            error = json.loads(line).get("error")
            if error:
                return f"{error.get('type')}: {str(error.get('message'))[:300]}"
    except (OSError, ValueError, AttributeError):
        return ""
    return ""


def _last_error(log: Path) -> str:
    lines = [line for line in tail(log, 200).splitlines() if " ERROR " in line or "Reason:" in line]
    return lines[-1].strip(" │|")[:300] if lines else (tail(log, 1) or "no output")
