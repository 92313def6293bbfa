"""The charts of a page as plain values: what each axis is, the points with their labels and sources. page.js draws them with Chart.js."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from pdlaunch.compare import Group
from pdlaunch.errors import ArchiveError
from pdlaunch.pareto import Candidate, LoadPoint, Turnover, average, pareto, turnover
from pdlaunch.report.handoff import Moved
from pdlaunch.runread import CURVE_POINTS, Phase, Run
from pdlaunch.settings import speculation
from pdlaunch.stats import mean

UTILISATION_POINTS = 120


@dataclass(frozen=True)
class Series:
    """points: [x, y, text of the tooltip]. style: line, dashed, points, hollow, cross, bar."""

    label: str
    style: str
    points: list[list[Any]]
    colour: int


@dataclass(frozen=True)
class Variant:
    name: str
    series: list[Series]
    note: str = ""
    marks: list[list[Any]] = field(default_factory=list)
    """Vertical bands: [from, to, label]."""


@dataclass(frozen=True)
class Chart:
    id: str
    title: str
    caption: str
    x: str
    y: str
    variants: list[Variant]
    source: str
    x_log: bool = False
    y_log: bool = False
    x_names: list[str] = field(default_factory=list)
    """Names of a category axis (bar charts); empty: a number axis."""


def _shape(phase: Phase) -> str:
    return f"ISL {phase.setting.input_tokens} / OSL {phase.setting.output_tokens}"


def _value(phase: Phase, name: str) -> float | None:
    metric = phase.metrics.get(name)
    return None if metric is None else metric.value


def _users(phase: Phase) -> str:
    p = phase.setting
    return f"{p.concurrency} users" if p.concurrency else f"{p.request_rate_per_s:g} requests/s"


def _pareto_variant(found: list[tuple[Group, Run, Phase]], y: str, name: str, kind: str) -> Variant | None:
    labelled = {}
    candidates = []
    for group, run, phase in found:
        label = f"{group.name} {run.id} {_users(phase)}"
        labelled[label] = (group, run, phase)
        candidates.append(Candidate(label, _value(phase, "interactivity_median_tpot"), _value(phase, y), run.valid))
    result = pareto(candidates)
    if not result.frontier and not result.left_out:
        return None

    def point(c: Candidate, more: str) -> list[Any]:
        _, run, phase = labelled[c.label]
        factor = _value(phase, "total_per_output")
        tail = f", (ISL+OSL)/OSL {factor:.3g}" if factor else ""
        return [c.x, c.y, f"{c.label}{more}{tail} | {run.id}/{phase.folder}"]

    shown_invalid = [
        (c, why) for c, why in result.left_out if c.x is not None and c.y is not None and math.isfinite(c.x) and math.isfinite(c.y)
    ]
    series = [
        Series("frontier", "line", [point(c, "") for c in result.frontier], 0),
        Series("dominated", "hollow", [point(c, f", dominated by {by}") for c, by in result.dominated], 1),
        Series("not VALID", "cross", [point(c, f", {why}") for c, why in shown_invalid], 2),
    ]
    missing = len(result.left_out) - len(shown_invalid)
    factor = next((f for _, _, p in found if (f := _value(p, "total_per_output"))), None)
    note = f"{len(result.frontier)} on the frontier, {len(result.dominated)} dominated, {len(result.left_out)} left out "
    note += f"({missing} not measured). A frontier is a menu: each point is its own deployment."
    if factor:
        note += f" (ISL+OSL)/OSL is {factor:.3g}: total tokens are that many times output tokens."
    return Variant(f"{name}, {kind} tokens", [s for s in series if s.points], note)


def _by_shape(groups: Sequence[Group]) -> dict[str, list[tuple[Group, Run, Phase]]]:
    found: dict[str, list[tuple[Group, Run, Phase]]] = {}
    for group in groups:
        for run in group.runs:
            for phase in run.phases:
                if phase.metrics:
                    found.setdefault(_shape(phase), []).append((group, run, phase))
    return found


def pareto_chart(groups: Sequence[Group], device: str) -> Chart | None:
    """Throughput per device against interactivity, one variant per workload shape: points of other shapes cannot dominate each other."""
    variants = []
    for name, found in _by_shape(groups).items():
        for kind in ("output", "total"):
            variant = _pareto_variant(found, f"{kind}_tokens_per_s_per_gpu", name, kind)
            if variant is not None:
                variants.append(variant)
    if not variants:
        return None
    return Chart(
        "pareto",
        "Throughput against interactivity",
        "Up and to the right is better. Filled: Pareto frontier. Hollow: dominated.",
        "interactivity, 1000 / median TPOT (tokens/s per user)",
        f"tokens/s per {device}",
        variants,
        "load/*/aiperf/profile_export.jsonl",
    )


def load_points(group: Group, shape: str, metric: str = "output_tokens_per_s_per_gpu") -> list[LoadPoint]:
    """One point per concurrency of a closed-loop workload shape, repetitions averaged."""
    points = []
    for p in (p for run in group.runs if run.valid for p in run.phases):
        if p.setting.concurrency and p.metrics and _shape(p) == shape:
            point = LoadPoint(float(p.setting.concurrency), _value(p, metric), itl_ms=_value(p, "itl_p50_ms"))
            points.append(replace(point, **{k: v for k, v in p.evidence.items() if k in ("kv_usage", "waiting", "preemptions")}))
    return average(points)


def _speculation(group: Group) -> str:
    engines = group.runs[0].engines("decode", "agg")
    return speculation(engines[0]["ranks"][0]["argv"]) if engines else ""


def _but_speculation(group: Group) -> tuple[tuple[str, str], ...]:
    kept = {k: s.value for k, s in group.settings.items() if s.kind not in ("code", "measurement", "workload")}
    return tuple(sorted((k, v) for k, v in kept.items() if not k.endswith(" speculation")))


def speculation_pairs(groups: Sequence[Group]) -> list[tuple[Group, Group]]:
    """(with, without) of groups that differ in nothing but speculative decoding."""
    return [
        (a, b) for a in groups for b in groups if _speculation(a) and not _speculation(b) and _but_speculation(a) == _but_speculation(b)
    ]


def turnovers(groups: Sequence[Group]) -> list[tuple[Group, Group, str, Turnover]]:
    """The turnover of every pair and workload shape."""
    shapes = list(_by_shape(groups))
    return [(a, b, s, turnover(load_points(a, s), load_points(b, s))) for a, b in speculation_pairs(groups) for s in shapes]


def turnover_text(found: Turnover) -> str:
    """The turnover as one sentence."""
    if found.status != "crosses":
        return f"{found.status}: {found.why}"
    text = f"stops paying between {found.low:g} and {found.high:g} users ({found.why}); interpolated crossing {found.crossing:.0f}"
    bracket = (found.crossing_low, found.crossing_high) == (found.low, found.high)
    why = "anywhere in the bracket: too few repetitions to say more" if bracket else "from the spread of repetitions"
    text += f" ({found.crossing_low:.0f} to {found.crossing_high:.0f}, {why}; a straight line in log concurrency is assumed)"
    if found.high_if_monotone is not None:
        text += f"; already behind at {found.high_if_monotone:g} if the series without speculation does not fall"
    if found.peak is not None:
        text += f"; its throughput peaks at {found.peak:g}"
    return f"{text}. Cause: {found.cause} ({found.cause_evidence})"


def concurrency_chart(groups: Sequence[Group], device: str) -> Chart | None:
    """Throughput against concurrency; dashed with speculative decoding; the bracket of each turnover is marked."""
    variants = []
    crossings = turnovers(groups)
    for shape in _by_shape(groups):
        series = []
        for i, group in enumerate(groups):
            points = []
            for p in load_points(group, shape):
                text = f"{group.label}, {p.concurrency:g} users" + (f", sd {p.sd:.3g}" if p.sd else "")
                points.append([p.concurrency, p.throughput, text])
            if points:
                spec = _speculation(group)
                series.append(Series(group.label + (f", {spec}" if spec else ""), "dashed" if spec else "line", points, i))
        here = [(a, b, t) for a, b, s, t in crossings if s == shape]
        marks = [[t.low, t.high, f"{a.name} against {b.name}"] for a, b, t in here if t.status == "crosses"]
        note = " ".join(f"Speculation ({a.name} against {b.name}): {turnover_text(t)}." for a, b, t in here)
        if series:
            variants.append(Variant(shape, series, note, marks))
    if not variants:
        return None
    return Chart(
        "concurrency",
        "Throughput against concurrency",
        "Dashed: speculative decoding on. Shaded: where it stops paying.",
        "concurrent users",
        f"output tokens/s per {device}",
        variants,
        "load/*/aiperf/profile_export.jsonl",
        x_log=True,
    )


def distribution_chart(groups: Sequence[Group]) -> Chart | None:
    """Share of requests at or below a latency, a curve per run and phase."""
    names = (("ttft", "TTFT"), ("itl", "ITL"), ("tpot", "TPOT"), ("latency", "request latency"))
    phases = [(g, r, p) for g in groups for r in g.runs for p in r.phases]
    variants = []
    for key, label in names:
        series: list[Series] = []
        for group, run, phase in phases:
            curve = phase.curves.get(key, ())
            # a logarithmic axis has no place for 0 ms (tokens that arrived together): the curve starts above it
            points = [[round(v, 3), 100 * i / CURVE_POINTS, ""] for i, v in enumerate(curve) if round(v, 3) > 0]
            if points:
                tag = f"{group.name} {phase.setting.name}{'' if run.valid else f' [{run.word}]'}" + (
                    f" ({run.path.name})" if len(group.runs) > 1 else ""
                )
                series.append(Series(tag, "curve", points, len(series)))
        if series:
            variants.append(Variant(label, series))
    if not variants:
        return None
    return Chart(
        "distributions",
        "Latency distributions",
        "Each curve: the share of requests that took at most this long. Left is better.",
        "milliseconds",
        "% of requests",
        variants,
        "load/*/aiperf/profile_export.jsonl",
        x_log=True,
    )


def transfer_chart(run: Run, moved: Sequence[Moved]) -> Chart | None:
    """Predicted and moved KV bytes per interval of one run."""
    if not any(m.moved is not None or m.predicted is not None for m in moved):
        return None
    largest = max(max(m.predicted or 0, m.moved or 0) for m in moved)
    power, unit = next((p, u) for p, u in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (0, "bytes")) if largest >= 2**p or not p)
    predicted = []
    for m in moved:
        if m.predicted is not None:
            text = f"predicted {m.predicted:,} bytes for {m.prompts} prompts | spec.json proof.prediction"
            predicted.append([m.name, m.predicted / 2**power, text])
    seen = [[m.name, m.moved / 2**power, f"moved {m.moved:,.0f} bytes | {m.source}"] for m in moved if m.moved is not None]
    series = [Series("predicted", "bar", predicted, 0), Series("moved", "bar", seen, 1)]
    notes = [f"{m.name}: {m.why}" for m in moved if m.why]
    exact = [m for m in moved if m.predicted is not None and m.moved is not None]
    if exact:
        notes.insert(0, "; ".join(f"{m.name}: {_agreement(m)}" for m in exact))
    return Chart(
        f"kv-{run.path.name}",
        "KV bytes: predicted and moved",
        "Equal bars: every prompt's cache crossed once, whole.",
        "",
        unit,
        [Variant("", [s for s in series if s.points], ". ".join(notes))],
        "metrics/decode-*.prom",
        x_names=[m.name for m in moved],
    )


def _agreement(m: Moved) -> str:
    predicted, moved = m.predicted or 0, m.moved or 0.0
    if moved == predicted:
        return f"exactly {predicted:,} bytes"
    return f"{(moved - predicted) / predicted * 100:+.3g} % of {predicted:,} bytes" if predicted else f"{moved:,.0f} bytes, none predicted"


def utilisation_chart(run: Run) -> tuple[Chart | None, list[str]]:
    """Mean GPU utilisation per role over the run, in at most UTILISATION_POINTS bins; and problems with the samples."""
    samples: dict[str, list[tuple[float, float]]] = {}
    problems = []
    for path in sorted((run.path / "gpu").glob("*.csv")):
        role = path.stem.split("-")[0]
        try:
            text = run.files.read(path).decode("utf-8")
            for row in csv.DictReader(io.StringIO(text)):
                samples.setdefault(role, []).append((datetime.fromisoformat(row["utc"]).timestamp(), float(row["utilisation_pct"])))
        except (ArchiveError, UnicodeDecodeError, KeyError, TypeError, ValueError) as e:
            problems.append(f"gpu/{path.name}: {e}")
    if not samples:
        return None, problems
    start = min(t for rows in samples.values() for t, _ in rows)
    span = max(t for rows in samples.values() for t, _ in rows) - start
    width = max(1.0, span / UTILISATION_POINTS)
    series = []
    for i, (role, rows) in enumerate(sorted(samples.items())):
        bins: dict[int, list[float]] = {}
        for t, used in rows:
            bins.setdefault(int((t - start) / width), []).append(used)
        points = [
            [round(b * width, 1), round(mean(v), 2), f"{role}: {mean(v):.1f} % over {len(v)} samples | gpu/{role}-*.csv"]
            for b, v in sorted(bins.items())
        ]
        series.append(Series(f"{role}, mean {mean([u for _, u in rows]):.1f} %", "line", points, i))
    return Chart(
        f"util-{run.path.name}",
        "GPU utilisation per role",
        "Mean over the GPUs of each role.",
        "seconds since the first sample",
        "%",
        [Variant("", series)],
        "gpu/*.csv",
    ), problems


def turnover_lines(groups: Sequence[Group]) -> list[str]:
    """Each turnover as a line of text."""
    return [f"{a.label} against {b.label}, {shape}: {turnover_text(t)}" for a, b, shape, t in turnovers(groups)]
