"""Small statistics of the reports: t quantiles, spread over repetitions, percentiles. No dependency, no random numbers."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass


def t_cdf(t: float, df: int) -> float:
    """P(T <= t) of Student's t for integer degrees of freedom (Abramowitz and Stegun 26.7.3 and 26.7.4)."""
    theta = math.atan2(t, math.sqrt(df))
    c2 = math.cos(theta) ** 2
    if df % 2:
        total, term = 0.0, math.cos(theta)
        for k in range(1, (df - 1) // 2 + 1):
            total += term
            term *= c2 * 2 * k / (2 * k + 1)
        area = 2 / math.pi * (theta + math.sin(theta) * total)
    else:
        total, term = 0.0, 1.0
        for k in range(1, df // 2 + 1):
            total += term
            term *= c2 * (2 * k - 1) / (2 * k)
        area = math.sin(theta) * total
    return 0.5 + area / 2


@functools.cache
def t_quantile(p: float, df: int) -> float:
    """The t with P(T <= t) = p, for 0.5 <= p < 1 and df >= 1, by bisection to 1e-9."""
    if df < 1 or not 0.5 <= p < 1:
        raise ValueError(f"t_quantile needs df >= 1 and 0.5 <= p < 1, got df={df}, p={p}")
    low, high = 0.0, 1.0
    while t_cdf(high, df) < p:
        high *= 2
    while high - low > 1e-9 * max(1.0, high):
        middle = (low + high) / 2
        low, high = (middle, high) if t_cdf(middle, df) < p else (low, middle)
    return (low + high) / 2


def finite(values: Sequence[float | None]) -> list[float]:
    """The values that are numbers; None, NaN and infinities are left out."""
    return [float(v) for v in values if v is not None and math.isfinite(v)]


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean; NaN of nothing."""
    return math.fsum(values) / len(values) if values else math.nan


def percentile(values: Sequence[float], p: float) -> float:
    """p in 0..100 with linear interpolation between closest ranks (NumPy's default, which AIPerf uses); NaN of nothing."""
    return percentile_of_sorted(sorted(values), p)


def percentile_of_sorted(ordered: Sequence[float], p: float) -> float:
    """The same of values that are in ascending order already."""
    if not ordered:
        return math.nan
    position = (len(ordered) - 1) * p / 100
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


@dataclass(frozen=True)
class Spread:
    """n values of one quantity: mean, sample standard deviation (n - 1), and the 95 % t interval of the mean. NaN where n is too small."""

    n: int
    mean: float
    sd: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float | None]) -> Spread:
        good = finite(values)
        n = len(good)
        m = mean(good)
        if n < 2:
            return cls(n, m, math.nan, math.nan, math.nan)
        sd = math.sqrt(math.fsum((v - m) ** 2 for v in good) / (n - 1))
        half = t_quantile(0.975, n - 1) * sd / math.sqrt(n)
        return cls(n, m, sd, m - half, m + half)


def welch_interval(a: Spread, b: Spread) -> tuple[float, float] | None:
    """95 % interval of mean(b) - mean(a) by Welch's method; None when either side has fewer than two values."""
    if a.n < 2 or b.n < 2:
        return None
    va, vb = a.sd**2 / a.n, b.sd**2 / b.n
    difference = b.mean - a.mean
    if va + vb == 0:
        return difference, difference
    df = max(1, math.floor((va + vb) ** 2 / (va**2 / (a.n - 1) + vb**2 / (b.n - 1))))
    half = t_quantile(0.975, df) * math.sqrt(va + vb)
    return difference - half, difference + half
