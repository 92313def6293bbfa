"""One measured phase in neutral terms: what the three formats have in common, with the denominators spelled out.

A statistic that a format cannot hold is not invented on the way back: it is absent. Times in ms, rates per second.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from pdlaunch.aiperf_files import PhaseFiles, read_phase
from pdlaunch.errors import ArchiveError
from pdlaunch.metrics_defs import Denominators, tpot_ms
from pdlaunch.node.spec import SpecError
from pdlaunch.node.spec import from_json as bind
from pdlaunch.runread import Run
from pdlaunch.settings import speculation
from pdlaunch.stats import mean, percentile

LARGEST = 1e18
"""Nothing that is measured is larger: nanoseconds of thirty years."""
STATS = ("mean", "sd", "min", "p1", "p5", "p10", "p25", "p50", "p75", "p90", "p95", "p99", "max")


@dataclass(frozen=True)
class Role:
    """gpus: the distinct GPUs of the role; parallel sizes of one engine."""

    tp: int
    pp: int
    dp: int
    engines: int
    gpus: int


@dataclass(frozen=True)
class Point:
    """stats: name (ttft_ms, tpot_ms, itl_ms, latency_ms, input_tokens, output_tokens) -> statistic -> value.

    rates: request, input, output, total, per second over duration_s. denominator: "GPU" or "rank" (a CPU run: a rank stands for a GPU).
    """

    run: str
    phase: str
    model: str
    framework: str
    versions: dict[str, str]
    hardware: str
    precision: str
    speculation: str
    isl: int
    osl: int
    concurrency: int | None
    request_rate_per_s: float | None
    requests: int
    failures: int
    duration_s: float | None
    start: str
    end: str
    denominator: str
    roles: dict[str, Role]
    rates: dict[str, float]
    stats: dict[str, dict[str, float]]
    verdict: str
    extra: dict[str, Any] = field(default_factory=dict)
    """What a format holds beyond this, kept so that it can be written back."""
    shared_gpus: int = 0
    """GPUs that two roles use: the sum over the roles counts them twice."""
    sharing: str = ""
    """Which engines share GPUs, a control engine included, and what that means; empty when every engine has its own."""

    @property
    def gpus(self) -> int:
        return sum(r.gpus for r in self.roles.values()) - self.shared_gpus

    def per_gpu(self) -> dict[str, float]:
        """total and output per GPU of all engines; input per prefill GPU, output per decode GPU. Without a role: over all."""
        found = {}
        if self.gpus:
            found = {f"{k}_per_gpu": self.rates[k] / self.gpus for k in ("total", "output") if k in self.rates}
        for key, rate, role in (("input_per_prefill_gpu", "input", "prefill"), ("output_per_decode_gpu", "output", "decode")):
            if role in self.roles and self.roles[role].gpus and rate in self.rates:
                found[key] = self.rates[rate] / self.roles[role].gpus
        return found


def statistics(values: list[float]) -> dict[str, float]:
    """Every statistic of STATS over the values; {} of nothing. sd divides by n, as AIPerf's std and vllm bench's do (not by n - 1)."""
    if not values:
        return {}
    middle = mean(values)
    ordered = sorted(values)
    found = {
        "mean": middle,
        "sd": math.sqrt(math.fsum((v - middle) ** 2 for v in values) / len(values)),
        "min": ordered[0],
        "max": ordered[-1],
    }
    found |= {p: percentile(ordered, float(p[1:])) for p in STATS if p[0] == "p"}
    return {k: found[k] for k in STATS if math.isfinite(found[k])}


def roles_of(run: Run) -> dict[str, Role]:
    """Serving roles with their GPUs (ranks on a CPU run)."""
    per: Denominators = run.denominators
    counts = {"prefill": per.prefill, "decode": per.decode, "agg": per.aggregated}
    found = {}
    for role, gpus in counts.items():
        engines = run.engines(role)
        if engines:
            e = engines[0]
            found[role] = Role(e["tensor_parallel"], e["pipeline_parallel"], e["data_parallel"], len(engines), gpus)
    return found


def _hardware(run: Run) -> str:
    names = sorted({g.get("name", "?") for f in run.nodes.values() for g in f.get("gpus") or []})
    return ", ".join(names) or str(run.spec["run"]["device"])


def _dtype(argv: list[str]) -> str:
    return argv[argv.index("--dtype") + 1] if "--dtype" in argv[:-1] else "auto"


def points_of(run: Run, read: Callable[[Any], bytes] | None = None) -> list[Point]:
    """Every load phase of a run that AIPerf measured, from its request records. A phase without usable files is left out (run.problems
    says why)."""
    found = []
    versions = {k: str(v) for f in run.nodes.values() for k, v in (f.get("versions") or {}).items()} or dict(run.spec["proof"]["versions"])
    engines = run.engines("decode", "agg")
    argv = list(engines[0]["ranks"][0]["argv"]) if engines else []
    for phase in run.phases:
        if not phase.metrics:
            continue
        files: PhaseFiles = read_phase(run.path / phase.folder, read or run.files.read)
        good = [r for r in files.records if r.ok]
        duration = files.stat("benchmark_duration")
        tokens_in, tokens_out = sum(r.input_tokens for r in good), sum(r.output_tokens for r in good)
        rates = {}
        if duration is not None and duration > 0:
            rates = {"request": len(good) / duration, "input": tokens_in / duration, "output": tokens_out / duration}
            rates["total"] = rates["input"] + rates["output"]
        series: dict[str, list[float | None]] = {
            "ttft_ms": [r.ttft_ms for r in good],
            "tpot_ms": [tpot_ms(r) for r in good],
            "itl_ms": [r.itl_ms for r in good],
            "latency_ms": [r.latency_ms for r in good],
            "input_tokens": [float(r.input_tokens) for r in good],
            "output_tokens": [float(r.output_tokens) for r in good],
        }
        stats = {name: statistics([v for v in values if v is not None]) for name, values in series.items()}
        p = phase.setting
        found.append(
            Point(
                run.id,
                p.name,
                run.spec["model"]["id"],
                "dynamo-vllm",
                versions,
                _hardware(run),
                _dtype(argv),
                speculation(argv) or "none",
                p.input_tokens,
                p.output_tokens,
                p.concurrency,
                p.request_rate_per_s,
                len(good),
                len(files.records) - len(good),
                duration,
                str(files.summary.get("start_time", "")),
                str(files.summary.get("end_time", "")),
                run.denominators.kind,
                roles_of(run),
                rates,
                {k: v for k, v in stats.items() if v},
                run.word,
                shared_gpus=run.denominators.shared,
                sharing=run.sharing.text,
            )
        )
    return found


def to_json(point: Point) -> dict[str, Any]:
    return dataclasses.asdict(point)


def from_json(data: dict[str, Any]) -> Point:
    """The inverse of to_json."""
    return Point(**{**data, "roles": {k: Role(**v) for k, v in data["roles"].items()}})


def checked(point: Point) -> Point:
    """The point of a foreign file; ArchiveError unless every field has its type and every number is one that can be computed with."""
    fields = dataclasses.asdict(point)
    extra = fields.pop("extra")
    try:
        found = bind(Point, fields)
    except (SpecError, OverflowError) as e:
        raise ArchiveError(str(e), rule="a measured phase") from None
    if not isinstance(extra, dict):
        raise ArchiveError(f"extra: {extra!r}"[:80], rule="an object")
    _plain(fields | {"extra": extra}, "")
    for name in ("start", "end"):
        try:
            moment = getattr(found, name)
            datetime.fromisoformat(moment or "2026-01-01").astimezone(UTC)
        except (ValueError, OverflowError):
            raise ArchiveError(f"{name}: {moment!r}"[:80], rule="a time as in 2026-11-30T02:28:02Z") from None
    return dataclasses.replace(found, extra=extra)


def _plain(value: Any, path: str) -> None:
    if isinstance(value, dict):
        for key, inner in value.items():
            _plain(inner, f"{path}.{key}" if path else str(key))
    elif isinstance(value, list | tuple):
        for inner in value:
            _plain(inner, path)
    elif isinstance(value, int | float) and not abs(value) <= LARGEST:
        raise ArchiveError(f"{path}: {value!r}"[:80], rule=f"a number between -{LARGEST:g} and {LARGEST:g}")
    elif isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
        raise ArchiveError(f"{path}: {value!r}"[:80], rule="text that a file can hold")
