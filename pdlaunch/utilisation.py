"""GPU utilisation of one role against the load it served: means, busy hours, fitted rates with their uncertainty, saturation.

Load is prompt tokens per second, utilisation is the mean over the role's GPUs in per cent; both are means over one period (an hour in the
public table, `data/gemma4-prefill-utilisation.csv`). A layout is the role on a number of GPUs.

The post behind that table gives "0.95 against 2.75 points per 1,000 prompt tokens per second" without naming its fit. Two fits give both
numbers to the two digits printed, over the busy hours only: least squares through the origin (0.948 and 2.754) and the median of the hourly
ratios (0.954 and 2.751). PUBLISHED_FIT is the first: it is the one whose "dashed line" can be drawn and whose uncertainty is defined.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from pdlaunch.stats import mean, t_quantile

BUSY_TOKENS_PER_S = 5000.0
PUBLISHED_FIT = "through_origin_busy"


@dataclass(frozen=True)
class Period:
    """One row. day: the calendar day in the table's own time zone, for the leave-one-day-out range."""

    role: str
    gpus: int
    utilisation_pct: float
    load_tokens_per_s: float
    time: str
    source: str

    @property
    def day(self) -> str:
        return self.time[:10]


@dataclass(frozen=True)
class Fit:
    """utilisation_pct = intercept + rate * (prompt tokens per second / 1000).

    stderr and the 95 % interval: HC3 (robust to unequal scatter) for least squares, the linearised ratio estimator for the ratio of sums,
    the binomial order-statistic interval for the median; None where the method has none or the points are too few. They treat periods as
    independent, which hours of one afternoon are not: `leave_one_day_out` is the honest companion. r2 is about the mean of the fitted
    points.
    """

    name: str
    method: str
    points: int
    rate: float
    intercept: float
    stderr: float | None
    low: float | None
    high: float | None
    r2: float | None
    leave_one_day_out: tuple[float, float] | None

    @property
    def saturation_tokens_per_s(self) -> float:
        """Load at which the fitted line reaches 100 %: an extrapolation; infinite for a rate that is not positive."""
        return (100 - self.intercept) / self.rate * 1000 if self.rate > 0 else math.inf


@dataclass(frozen=True)
class LayoutSummary:
    role: str
    gpus: int
    periods: int
    mean_pct: float
    busy_periods: int
    busy_mean_pct: float
    peak: Period
    """The period of the highest utilisation (the post's "busiest hour"); not always that of the highest load, which is `heaviest`."""
    heaviest: Period
    fits: tuple[Fit, ...]
    by_day: tuple[tuple[str, int, float], ...]
    """(day, busy periods, rate through the origin) of each day with busy periods."""

    def fit(self, name: str = PUBLISHED_FIT) -> Fit | None:
        return next((f for f in self.fits if f.name == name), None)


@dataclass(frozen=True)
class Ratio:
    """How many times busier one GPU of the smaller layout is at equal load, by one fit."""

    fit: str
    few: str
    many: str
    ratio: float
    low: float | None
    high: float | None
    gpu_factor: float
    """What the GPU counts alone explain."""

    @property
    def unexplained(self) -> float:
        return self.ratio / self.gpu_factor


@dataclass(frozen=True)
class Report:
    busy_tokens_per_s: float
    layouts: tuple[LayoutSummary, ...]
    ratios: tuple[Ratio, ...]
    findings: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Plain JSON values: a number that does not exist (no busy period, a line that never saturates) is null."""
        body = dataclasses.asdict(self)
        for layout, written in zip(self.layouts, body["layouts"], strict=True):
            written["busy_mean_pct"] = _or_none(layout.busy_mean_pct)
            for fit, row in zip(layout.fits, written["fits"], strict=True):
                row["saturation_tokens_per_s"] = _or_none(fit.saturation_tokens_per_s)
        return body


def _or_none(value: float) -> float | None:
    return value if math.isfinite(value) else None


Points = Sequence[tuple[float, float]]
"""(load in 1,000 prompt tokens/s, utilisation in %)."""


def _through_origin(points: Points) -> tuple[float, float, float | None]:
    xx = math.fsum(x * x for x, _ in points)
    rate = math.fsum(x * y for x, y in points) / xx
    if len(points) < 3:
        return rate, 0.0, None
    robust = math.fsum((x * (y - rate * x) / (1 - x * x / xx)) ** 2 for x, y in points if x * x < xx)
    return rate, 0.0, math.sqrt(robust) / xx


def _line(points: Points) -> tuple[float, float, float | None]:
    n, mx, my = len(points), mean([x for x, _ in points]), mean([y for _, y in points])
    sxx = math.fsum((x - mx) ** 2 for x, _ in points)
    rate = math.fsum((x - mx) * (y - my) for x, y in points) / sxx
    intercept = my - rate * mx
    if n < 4:
        return rate, intercept, None
    robust = 0.0
    for x, y in points:
        leverage = 1 / n + (x - mx) ** 2 / sxx
        if leverage < 1:
            robust += ((x - mx) * (y - intercept - rate * x) / (1 - leverage)) ** 2
    return rate, intercept, math.sqrt(robust) / sxx


def _ratio_of_sums(points: Points) -> tuple[float, float, float | None]:
    sx, n = math.fsum(x for x, _ in points), len(points)
    rate = math.fsum(y for _, y in points) / sx
    if n < 3:
        return rate, 0.0, None
    return rate, 0.0, math.sqrt(n / (n - 1) * math.fsum((y - rate * x) ** 2 for x, y in points)) / sx


def _median_ratio(points: Points) -> tuple[float, float, float | None]:
    return statistics.median(y / x for x, y in points), 0.0, None


def _theil_sen(points: Points) -> tuple[float, float, float | None]:
    slopes = [(b[1] - a[1]) / (b[0] - a[0]) for i, a in enumerate(points) for b in points[:i] if a[0] != b[0]]
    rate = statistics.median(slopes)
    return rate, statistics.median(y - rate * x for x, y in points), None


_METHODS: dict[str, tuple[str, bool, Callable[[Points], tuple[float, float, float | None]]]] = {
    "through_origin_busy": ("least squares through the origin, busy periods", True, _through_origin),
    "median_ratio_busy": ("median of utilisation/load, busy periods", True, _median_ratio),
    "ratio_of_sums_busy": ("sum of utilisation / sum of load, busy periods", True, _ratio_of_sums),
    "line_busy": ("least squares with an intercept, busy periods", True, _line),
    "theil_sen_busy": ("Theil-Sen median of pairwise slopes, busy periods", True, _theil_sen),
    "through_origin_all": ("least squares through the origin, every period with load", False, _through_origin),
    "line_all": ("least squares with an intercept, every period with load", False, _line),
    "ratio_of_sums_all": ("sum of utilisation / sum of load, every period with load", False, _ratio_of_sums),
}


def _median_interval(points: Points) -> tuple[float, float] | None:
    """95 % interval of the median ratio from order statistics: exact for any distribution; None below 6 points."""
    ratios, n = sorted(y / x for x, y in points), len(points)
    if n < 6:
        return None
    rank, below = 0, 0.0
    while True:
        below += math.comb(n, rank) / 2**n
        if below > 0.025:
            break
        rank += 1
    return ratios[rank - 1], ratios[n - rank]


def _fit(name: str, periods: Sequence[Period], busy: float) -> Fit | None:
    method, busy_only, solve = _METHODS[name]
    chosen = [p for p in periods if p.load_tokens_per_s > 0 and (not busy_only or p.load_tokens_per_s >= busy)]
    points = [(p.load_tokens_per_s / 1000, p.utilisation_pct) for p in chosen]
    needs_two = name.startswith(("line", "theil"))
    if len({x for x, _ in points}) < (2 if needs_two else 1):
        return None
    rate, intercept, stderr = solve(points)
    low = high = None
    if stderr is not None:
        half = t_quantile(0.975, len(points) - (2 if name.startswith("line") else 1)) * stderr
        low, high = rate - half, rate + half
    elif name == "median_ratio_busy":
        low, high = _median_interval(points) or (None, None)
    my = mean([y for _, y in points])
    total = math.fsum((y - my) ** 2 for _, y in points)
    left = math.fsum((y - intercept - rate * x) ** 2 for x, y in points)
    dropped = []
    days = sorted({p.day for p in chosen})
    for day in days if len(days) > 1 else []:
        rest = [(p.load_tokens_per_s / 1000, p.utilisation_pct) for p in chosen if p.day != day]
        if len({x for x, _ in rest}) >= (2 if needs_two else 1):
            dropped.append(solve(rest)[0])
    return Fit(
        name,
        method,
        len(points),
        rate,
        intercept,
        stderr,
        low,
        high,
        1 - left / total if total > 0 else None,
        (min(dropped), max(dropped)) if dropped else None,
    )


def _layout(role: str, gpus: int, periods: Sequence[Period], busy: float) -> LayoutSummary:
    loaded = [p for p in periods if p.load_tokens_per_s >= busy]
    days = []
    for day in sorted({p.day for p in loaded}):
        today = [(p.load_tokens_per_s / 1000, p.utilisation_pct) for p in loaded if p.day == day]
        days.append((day, len(today), _through_origin(today)[0]))
    fits = tuple(f for f in (_fit(name, periods, busy) for name in _METHODS) if f is not None)
    return LayoutSummary(
        role,
        gpus,
        len(periods),
        mean([p.utilisation_pct for p in periods]),
        len(loaded),
        mean([p.utilisation_pct for p in loaded]),
        max(periods, key=lambda p: p.utilisation_pct),
        max(periods, key=lambda p: p.load_tokens_per_s),
        fits,
        tuple(days),
    )


def _ratio(few: LayoutSummary, many: LayoutSummary, name: str) -> Ratio | None:
    a, b = few.fit(name), many.fit(name)
    if a is None or b is None or a.rate <= 0 or b.rate <= 0:
        return None
    low = high = None
    if a.stderr is not None and b.stderr is not None:
        relative = math.hypot(a.stderr / a.rate, b.stderr / b.rate)
        half = t_quantile(0.975, max(1, min(a.points, b.points) - 1)) * relative
        low, high = a.rate / b.rate * math.exp(-half), a.rate / b.rate * math.exp(half)
    return Ratio(name, f"{few.role} on {few.gpus}", f"{many.role} on {many.gpus}", a.rate / b.rate, low, high, many.gpus / few.gpus)


def _findings(layouts: Sequence[LayoutSummary], ratios: Sequence[Ratio]) -> list[str]:
    """What the data can tell and what it cannot, in sentences made from the numbers."""
    said = []
    for layout in layouts:
        name, fit = f"{layout.role} on {layout.gpus} GPUs", layout.fit()
        if fit is None:
            said.append(f"{name}: no busy period, so no rate.")
            continue
        saturation = fit.saturation_tokens_per_s
        if math.isfinite(saturation):
            said.append(
                f"{name}: the fitted line reaches 100 % at {saturation:,.0f} prompt tokens/s, "
                f"{saturation / layout.heaviest.load_tokens_per_s:.1f} "
                "times the highest load seen: an extrapolation, and queues grow long before it."
            )
        if fit.r2 is not None and fit.r2 < 0.5:
            said.append(
                f"{name}: load explains {max(0.0, fit.r2):.0%} of the variation of busy periods (R2 {fit.r2:.2f} about the mean), "
                "so something besides the prompt rate moves utilisation."
            )
        rates = [r for _, _, r in layout.by_day]
        if len(rates) > 1 and min(rates) > 0 and max(rates) / min(rates) > 1.5:
            low, high = min(layout.by_day, key=lambda d: d[2]), max(layout.by_day, key=lambda d: d[2])
            said.append(
                f"{name}: without any change of layout the daily rate runs from {low[2]:.2f} ({low[0]}) to {high[2]:.2f} ({high[0]}), "
                f"a factor of {high[2] / low[2]:.1f}."
            )
    for ratio in (r for r in ratios if r.fit == PUBLISHED_FIT):
        few = next(x for x in layouts if f"{x.role} on {x.gpus}" == ratio.few)
        many = next(x for x in layouts if f"{x.role} on {x.gpus}" == ratio.many)
        said.append(
            f"{ratio.few} against {ratio.many}: {ratio.ratio:.1f} times as busy per prompt token; {ratio.gpu_factor:.3g} of it is "
            f"the number of GPUs, "
            f"{ratio.unexplained:.2f} is not."
        )
        if not few.by_day or not many.by_day:
            continue
        earlier, later = sorted((few, many), key=lambda x: x.by_day[0][0])
        last, first = earlier.by_day[-1], later.by_day[0]
        if not last[2] or not first[2]:
            continue  # a day of busy periods without any utilisation: no ratio
        nearest = last[2] / first[2] if earlier is few else first[2] / last[2]
        said.append(
            f"The nearest days of the two layouts ({last[0]} and {first[0]}) differ by {nearest:.2f}, not {ratio.ratio:.1f}. The "
            f"data cannot "
            "separate layout from traffic: the layouts never ran in the same hours. It has no prompt lengths, prefix-cache "
            "hits or batch sizes, so it "
            "cannot say why the rate moves; the two layouts on the same replayed traffic would."
        )
    return said


def analyse(periods: Sequence[Period], busy_tokens_per_s: float = BUSY_TOKENS_PER_S) -> Report:
    """Summaries per layout, ratios between layouts of one role (fewer GPUs over more) for every fit, and findings in words."""
    groups: dict[tuple[str, int], list[Period]] = {}
    for p in periods:
        groups.setdefault((p.role, p.gpus), []).append(p)
    layouts = tuple(
        _layout(role, gpus, rows, busy_tokens_per_s) for (role, gpus), rows in sorted(groups.items(), key=lambda g: (g[0][0], -g[0][1]))
    )
    ratios = [
        _ratio(few, many, name)
        for many in layouts
        for few in layouts
        if few.role == many.role and few.gpus < many.gpus
        for name in _METHODS
    ]
    kept = tuple(r for r in ratios if r is not None)
    return Report(busy_tokens_per_s, layouts, kept, tuple(_findings(layouts, kept)))


def table(report: Report) -> str:
    """Text for a terminal: one block per layout, then the ratios, then the findings."""
    lines = []
    for x in report.layouts:
        lines.append(f"{x.role} on {x.gpus} GPUs: {x.periods} periods")
        lines.append(
            f"  mean {x.mean_pct:.1f} %; busy mean {x.busy_mean_pct:.1f} % over {x.busy_periods} periods with at least "
            f"{report.busy_tokens_per_s:,.0f} prompt tokens/s"
            if x.busy_periods
            else f"  mean {x.mean_pct:.1f} %; no busy period"
        )
        lines.append(
            f"  busiest {x.peak.utilisation_pct:.1f} % at {x.peak.load_tokens_per_s:,.0f} tokens/s ({x.peak.time}, {x.peak.source}); "
            f"heaviest load {x.heaviest.load_tokens_per_s:,.0f} tokens/s at {x.heaviest.utilisation_pct:.1f} %"
        )
        lines.append(
            f"  {'fit':<22}{'n':>4}{'rate':>8}{'95 % interval':>17}{'one day left out':>18}"
            f"{'intercept':>11}{'R2':>7}{'100 % at tokens/s':>19}"
        )
        for f in x.fits:
            interval = f"{f.low:.2f} .. {f.high:.2f}" if f.low is not None and f.high is not None else "-"
            days = f"{f.leave_one_day_out[0]:.2f} .. {f.leave_one_day_out[1]:.2f}" if f.leave_one_day_out else "-"
            r2 = "-" if f.r2 is None else f"{f.r2:.2f}"
            lines.append(
                f"  {f.name:<22}{f.points:>4}{f.rate:>8.3f}{interval:>17}{days:>18}"
                f"{f.intercept:>11.2f}{r2:>7}{f.saturation_tokens_per_s:>19,.0f}"
            )
        lines.append("  rate per day: " + ", ".join(f"{day} {rate:.2f} ({n})" for day, n, rate in x.by_day))
        lines.append("")
    for r in report.ratios:
        interval = f" ({r.low:.2f} .. {r.high:.2f})" if r.low is not None else ""
        mark = "  <- the published 2.9" if r.fit == PUBLISHED_FIT and abs(r.ratio - 2.904) < 0.001 else ""
        lines.append(f"{r.few} / {r.many}, {r.fit}: {r.ratio:.2f}{interval}; GPU count {r.gpu_factor:g}, rest {r.unexplained:.2f}{mark}")
    lines += ["", *report.findings, "", "Rates are utilisation points per 1,000 prompt tokens/s. Intervals treat periods as independent."]
    return "\n".join(lines)
