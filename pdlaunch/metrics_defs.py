"""What each number of a report means: its unit, formula and denominator, and the functions that compute it from AIPerf's files.

Formulas. R: the successful requests of the phase; D: AIPerf's benchmark_duration (first start to last end, seconds); per request: latency
W, TTFT, input tokens I, output tokens O. AIPerf's own rates divide by its observation window (phase start to the end of the last
request's processing), which is longer than D by window_excess_pct: 0.5 % on phases of two seconds, nothing on minutes. Sources of the
rules: AIPerf 0.13 metrics/types/*.py (ITL, per-user rate), vllm bench serve (TPOT), InferenceX utils/process_result.py (1000/TPOT,
per-role denominators), srt-slurm #270 (GPUs that work, not nodes x GPUs per node).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pdlaunch.aiperf_files import PhaseFiles, Record
from pdlaunch.stats import mean, percentile, percentile_of_sorted

Better = Literal["lower", "higher", ""]


@dataclass(frozen=True)
class Definition:
    """better: which direction is an improvement; empty for a quantity that describes and does not judge."""

    name: str
    label: str
    unit: str
    better: Better
    formula: str
    denominator: str
    source: str


def _percentiles(name: str, label: str, formula: str) -> list[Definition]:
    return [
        Definition(
            f"{name}_{p}_ms", f"{label} {p}", "ms", "lower", f"{p} over R of {formula}", "successful requests", "profile_export.jsonl"
        )
        for p in ("p50", "p90", "p99")
    ]


_TOKENS = "(sum I + sum O) / D"
_LIST = [
    *_percentiles("ttft", "TTFT", "time to the first token"),
    *_percentiles("itl", "ITL", "(W - TTFT) / (O - tokens of the first chunk), AIPerf's inter_token_latency"),
    *_percentiles("tpot", "TPOT", "(W - TTFT) / (O - 1), vllm bench's TPOT"),
    *_percentiles("latency", "Request latency", "W, first byte sent to last byte received"),
    Definition("requests_ok", "Successful requests", "requests", "", "|R|", "-", "profile_export.jsonl"),
    Definition("requests_failed", "Failed requests", "requests", "lower", "profiling requests not in R", "-", "profile_export.jsonl"),
    Definition(
        "request_rate", "Request rate", "requests/s", "higher", "|R| / D", "duration D", "profile_export_aiperf.json benchmark_duration"
    ),
    Definition(
        "goodput",
        "Goodput",
        "requests/s",
        "higher",
        "requests of R that meet every SLO of the phase / D",
        "duration D",
        "profile_export.jsonl, spec.json slos_ms",
    ),
    Definition(
        "total_tokens_per_s", "Total tokens/s", "tokens/s", "higher", _TOKENS, "duration D; counts prompt tokens", "profile_export.jsonl"
    ),
    Definition("input_tokens_per_s", "Input tokens/s", "tokens/s", "higher", "sum I / D", "duration D", "profile_export.jsonl"),
    Definition("output_tokens_per_s", "Output tokens/s", "tokens/s", "higher", "sum O / D", "duration D", "profile_export.jsonl"),
    Definition("total_per_output", "(ISL+OSL)/OSL", "ratio", "", "(sum I + sum O) / sum O", "output tokens", "profile_export.jsonl"),
    Definition(
        "total_tokens_per_s_per_gpu",
        "Total tokens/s per GPU",
        "tokens/s/GPU",
        "higher",
        _TOKENS + " / G",
        "G: GPUs given to prefill, decode and aggregated engines, a shared one once",
        "spec.json engines[].ranks[].gpus",
    ),
    Definition(
        "output_tokens_per_s_per_gpu",
        "Output tokens/s per GPU",
        "tokens/s/GPU",
        "higher",
        "sum O / D / G",
        "G, as above",
        "spec.json engines[].ranks[].gpus",
    ),
    Definition(
        "input_tokens_per_s_per_prefill_gpu",
        "Input tokens/s per prefill GPU",
        "tokens/s/GPU",
        "higher",
        "sum I / D / prefill GPUs",
        "GPUs of prefill engines only",
        "spec.json engines[].ranks[].gpus",
    ),
    Definition(
        "output_tokens_per_s_per_decode_gpu",
        "Output tokens/s per decode GPU",
        "tokens/s/GPU",
        "higher",
        "sum O / D / decode GPUs",
        "GPUs of decode engines only",
        "spec.json engines[].ranks[].gpus",
    ),
    Definition(
        "interactivity_median_tpot",
        "Interactivity, 1000/median TPOT",
        "tokens/s/user",
        "higher",
        "1000 / p50 of TPOT in ms",
        "one user while its request decodes; no queue, no prefill",
        "profile_export.jsonl",
    ),
    Definition(
        "interactivity_mean_inverse_itl",
        "Interactivity, mean of 1/ITL",
        "tokens/s/user",
        "higher",
        "mean over R with an ITL above 0 of 1000 / ITL in ms (never below the reciprocal of their mean ITL)",
        "as above, averaged over requests",
        "profile_export.jsonl",
    ),
    Definition(
        "interactivity_output_per_user",
        "Interactivity, output/users",
        "tokens/s/user",
        "higher",
        "sum O / D / N",
        "N: concurrency of the phase; queue and prefill count",
        "profile_export.jsonl, spec.json load",
    ),
    Definition(
        "littles_law_residual_pct",
        "Little's-law residual",
        "%",
        "",
        "(request rate x mean W - N) / N",
        "N: concurrency of the phase",
        "profile_export.jsonl, spec.json load",
    ),
    Definition(
        "energy_per_output_token_j",
        "Energy per output token",
        "J/token",
        "lower",
        "energy of all GPUs in AIPerf's telemetry over D / sum O",
        "output tokens",
        "profile_export_aiperf.json nvidia_total_gpu_energy",
    ),
    Definition(
        "window_excess_pct",
        "AIPerf's window over D",
        "%",
        "",
        "(|R| / AIPerf's request_throughput - D) / D: how much lower AIPerf's own rates are",
        "duration D",
        "profile_export_aiperf.json request_throughput",
    ),
    Definition("duration_s", "Duration", "s", "", "last end - first start", "-", "profile_export_aiperf.json benchmark_duration"),
]
DEFINITIONS: dict[str, Definition] = {d.name: d for d in _LIST}


@dataclass(frozen=True)
class Denominators:
    """What rates are divided by: the distinct GPUs that engines were given (trap T26), never whole nodes; control engines serve no load
    and do not count. shared: how many GPUs too many the sum over the roles has, because two of them use one GPU.

    kind "rank": the run had no GPU; one CPU rank stands for one GPU, so that shapes can be compared, and the page says so.
    """

    kind: Literal["GPU", "rank"]
    prefill: int
    decode: int
    aggregated: int
    source: str = "spec.json engines[].ranks[].gpus"
    shared: int = 0

    @property
    def total(self) -> int:
        return self.prefill + self.decode + self.aggregated - self.shared


@dataclass(frozen=True)
class Metric:
    """value None: not measured, and why says what was missing. A value is always finite."""

    value: float | None
    unit: str
    source: str
    why: str = ""


def tpot_ms(record: Record) -> float | None:
    """Time per output token after the first; None for a request with fewer than two output tokens."""
    if record.latency_ms is None or record.ttft_ms is None or record.output_tokens < 2:
        return None
    return (record.latency_ms - record.ttft_ms) / (record.output_tokens - 1)


def meets(record: Record, slos_ms: dict[str, float]) -> bool:
    """Whether a request meets every limit, by AIPerf's names (time_to_first_token, inter_token_latency, request_latency); a missing time
    fails."""
    found = {"time_to_first_token": record.ttft_ms, "inter_token_latency": record.itl_ms, "request_latency": record.latency_ms}
    unknown = sorted(set(slos_ms) - set(found))
    if unknown:
        raise ValueError(f"SLO on {unknown}; known: {sorted(found)}")
    for name, limit in slos_ms.items():
        value = found[name]
        if value is None or value > limit:
            return False
    return True


def total_to_output(total_tokens_per_s: float, isl: float, osl: float) -> float:
    """Output rate that a total-token rate stands for: total * OSL / (ISL + OSL). 5,000 at 8192/1024 is 556 (second seed)."""
    return total_tokens_per_s * osl / (isl + osl)


def output_per_user(output_tokens_per_s_per_gpu: float, gpus: int, users: int) -> float:
    """Output tokens per second that one of `users` gets, queue included: 556 on 48 GPUs for 2,560 users is 10.4 (second seed)."""
    return output_tokens_per_s_per_gpu * gpus / users


@dataclass(frozen=True)
class Reconciliation:
    """Why the interactivities differ: 1000/median TPOT x mean_over_median x generating_share x occupancy = output per user, exactly.

    mean_over_median: pooled decode rate, sum (O-1) / sum (W - TTFT), over 1/median TPOT. generating_share: whole-request rate sum O / sum
    W over the pooled decode rate (TTFT, with its queue, is the rest). occupancy: sum W / (N D), the share of the N users that had a
    request open.
    """

    median: float
    mean_over_median: float
    generating_share: float
    occupancy: float
    output_per_user: float


def reconcile(records: Sequence[Record], duration_s: float, users: int) -> Reconciliation | None:
    """None when no request has two output tokens and both times, the phase has no length, or the median TPOT is 0 (tokens that arrived
    together), whose reciprocal does not exist."""
    usable = [r for r in records if r.ok and r.latency_ms and r.ttft_ms is not None and r.output_tokens > 1]
    decode_s = math.fsum((r.latency_ms or 0.0) - (r.ttft_ms or 0.0) for r in usable) / 1000
    if not usable or duration_s <= 0 or users < 1 or decode_s <= 0:
        return None
    middle_ms = percentile([t for r in usable if (t := tpot_ms(r)) is not None], 50)
    if middle_ms <= 0:
        return None
    median = 1000 / middle_ms
    pooled = sum(r.output_tokens - 1 for r in usable) / decode_s
    whole_s = math.fsum(r.latency_ms or 0.0 for r in usable) / 1000
    whole = sum(r.output_tokens for r in usable) / whole_s
    occupancy = whole_s / (users * duration_s)
    return Reconciliation(median, pooled / median, whole / pooled, occupancy, whole * occupancy)


def _energy(files: PhaseFiles, output_tokens: int) -> tuple[float | None, str]:
    for vendor in ("nvidia", "amd"):
        joules = files.stat(f"{vendor}_total_gpu_energy")
        if joules is not None:
            return (joules / output_tokens, "") if output_tokens else (None, "no output token")
    return None, "no GPU energy in AIPerf's telemetry"


def _interactivities(good: Sequence[Record], median_tpot_ms: float | None) -> dict[str, tuple[float | None, str]]:
    """The two reciprocals, each with why it has no value: tokens that arrive together have a time of 0 between them."""
    found: dict[str, tuple[float | None, str]] = {}
    if median_tpot_ms is None:
        found["interactivity_median_tpot"] = None, "no successful request has a TPOT"
    elif median_tpot_ms <= 0:
        found["interactivity_median_tpot"] = None, f"cannot be computed: median TPOT is {median_tpot_ms:g}"
    else:
        found["interactivity_median_tpot"] = 1000 / median_tpot_ms, ""
    known = [r.itl_ms for r in good if r.itl_ms is not None]
    inverse = [1000 / itl for itl in known if itl > 0]
    none = "cannot be computed: no ITL is above 0" if known else "no successful request has an ITL"
    found["interactivity_mean_inverse_itl"] = (mean(inverse), "") if inverse else (None, none)
    return found


def compute(files: PhaseFiles, per: Denominators, users: int | None, slos_ms: dict[str, float]) -> dict[str, Metric]:
    """Every definition for one phase. users: the concurrency that was asked for; None for an open loop at a request rate."""
    good = [r for r in files.records if r.ok]
    duration = files.stat("benchmark_duration")
    values: dict[str, float | None] = dict.fromkeys(DEFINITIONS)
    why: dict[str, str] = {}
    series = {
        "ttft": [r.ttft_ms for r in good], "itl": [r.itl_ms for r in good],
        "tpot": [tpot_ms(r) for r in good], "latency": [r.latency_ms for r in good],
    }  # fmt: skip
    for name, found in series.items():
        present = sorted(v for v in found if v is not None)
        for p in (50, 90, 99):
            if present:
                values[f"{name}_p{p}_ms"] = percentile_of_sorted(present, p)
            else:
                why[f"{name}_p{p}_ms"] = "no successful request has it"
    values["requests_ok"], values["requests_failed"] = float(len(good)), float(len(files.records) - len(good))
    tokens_in, tokens_out = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
    if tokens_out:
        values["total_per_output"] = (tokens_in + tokens_out) / tokens_out
    if duration is None or duration <= 0:
        reason = "benchmark_duration is missing" if duration is None else "the phase has zero length"
        rates = [n for n in DEFINITIONS if n.endswith(("_per_s", "_rate", "_gpu", "_per_user"))]
        why.update(dict.fromkeys([*rates, "goodput", "littles_law_residual_pct"], reason))
    else:
        values["duration_s"] = duration
        values["request_rate"] = len(good) / duration
        theirs = files.stat("request_throughput")
        if theirs:
            values["window_excess_pct"] = (len(good) / theirs - duration) / duration * 100
        values.update(_rates(tokens_in / duration, tokens_out / duration, per))
        if slos_ms:
            values["goodput"] = sum(meets(r, slos_ms) for r in good) / duration
        else:
            why["goodput"] = "the phase sets no SLO"
        if users:
            values["interactivity_output_per_user"] = tokens_out / duration / users
            latencies = [r.latency_ms for r in good if r.latency_ms is not None]
            if latencies:
                values["littles_law_residual_pct"] = (len(good) / duration * mean(latencies) / 1000 - users) / users * 100
        else:
            why.update(dict.fromkeys(("interactivity_output_per_user", "littles_law_residual_pct"), "open loop: no number of users"))
    for name, (found_value, reason) in _interactivities(good, values["tpot_p50_ms"]).items():
        values[name], why[name] = found_value, reason
    values["energy_per_output_token_j"], why["energy_per_output_token_j"] = _energy(files, tokens_out)
    return {
        name: Metric(
            values[name], d.unit.replace("GPU", per.kind), d.source, "" if values[name] is not None else why.get(name, "not measured")
        )
        for name, d in DEFINITIONS.items()
    }


def _rates(tokens_in_per_s: float, tokens_out_per_s: float, per: Denominators) -> dict[str, float | None]:
    """Token rates of the whole deployment, per device and per role. An aggregated engine has no role, so it has no per-role rate."""
    total = tokens_in_per_s + tokens_out_per_s
    return {
        "total_tokens_per_s": total, "input_tokens_per_s": tokens_in_per_s, "output_tokens_per_s": tokens_out_per_s,
        "total_tokens_per_s_per_gpu": total / per.total if per.total else None,
        "output_tokens_per_s_per_gpu": tokens_out_per_s / per.total if per.total else None,
        "input_tokens_per_s_per_prefill_gpu": tokens_in_per_s / per.prefill if per.prefill else None,
        "output_tokens_per_s_per_decode_gpu": tokens_out_per_s / per.decode if per.decode else None,
    }  # fmt: skip
