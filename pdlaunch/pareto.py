"""The Pareto frontier over (interactivity, throughput per GPU), and the concurrency at which speculative decoding stops paying."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Candidate:
    """One measured point. x, y: both better when higher. valid False: the run's verdict was not VALID, so it can dominate nothing."""

    label: str
    x: float | None
    y: float | None
    valid: bool = True


@dataclass(frozen=True)
class Frontier:
    """frontier: by rising x (so falling y). dominated: each with the label of a point that is at least as good on both axes.
    left_out: points that took no part, each with why.
    """

    frontier: tuple[Candidate, ...]
    dominated: tuple[tuple[Candidate, str], ...]
    left_out: tuple[tuple[Candidate, str], ...]


def pareto(points: Iterable[Candidate]) -> Frontier:
    """A point is dominated when another is at least as good on both axes and better on one. Equal points are all kept. NaN, infinite,
    missing and invalid points are left out first: a NaN compares false with everything and would survive any comparison (AIPerf
    quarantines them too).
    """
    left_out, usable = [], []
    for p in points:
        if not p.valid:
            left_out.append((p, "its run is not VALID"))
        elif p.x is None or p.y is None or not math.isfinite(p.x) or not math.isfinite(p.y):
            left_out.append((p, "not measured (missing, NaN or infinite)"))
        else:
            usable.append((p.x, p.y, p))
    usable.sort(key=lambda t: (-t[0], -t[1]))
    frontier: list[Candidate] = []
    dominated = []
    best: tuple[float, float, Candidate] | None = None
    for x, y, p in usable:
        if best is None or y > best[1] or (x, y) == best[:2]:
            frontier.append(p)
            best = (x, y, p)
        else:
            dominated.append((p, best[2].label))
    return Frontier(tuple(reversed(frontier)), tuple(dominated), tuple(left_out))


@dataclass(frozen=True)
class LoadPoint:
    """Throughput (per GPU or whole, the same for both series) at one concurrency. sd: over repetitions. The rest is evidence for the cause:
    highest share of KV blocks in use, mean waiting requests, preemptions, mean ITL in ms; None where the archive holds none.
    """

    concurrency: float
    throughput: float | None
    sd: float | None = None
    kv_usage: float | None = None
    waiting: float | None = None
    preemptions: float | None = None
    itl_ms: float | None = None


Cause = Literal["KV ran out", "step cost", "both", "not known"]


@dataclass(frozen=True)
class Turnover:
    """status: "crosses" with a bracket; "pays throughout" or "never pays" over the common range; "no data" (why says what is missing).

    low, high: measured concurrencies between which the advantage changes sign: certain as far as the points are.
    crossing: where log(on/off), taken linear in log concurrency, is zero. crossing_low, crossing_high: the
    same with one standard deviation of the ratio added and taken away; the
    bracket unless all four points have repetitions. peak: concurrency of the highest throughput with speculation, when it falls afterwards.
    """

    status: Literal["crosses", "pays throughout", "never pays", "no data"]
    why: str
    low: float | None = None
    high: float | None = None
    crossing: float | None = None
    crossing_low: float | None = None
    crossing_high: float | None = None
    loss_at_highest: float | None = None
    """1 - on/off at the highest common concurrency; negative when speculation still pays there."""
    peak: float | None = None
    high_if_monotone: float | None = None
    """A smaller upper end, where speculation was measured alone and is already below what the other series had at `low`: certain only if
    that series does not fall between the two.
    """
    cause: Cause = "not known"
    cause_evidence: str = ""
    crossings: int = 0


def _series(points: Iterable[LoadPoint]) -> dict[float, LoadPoint]:
    """Finite, positive points; of several at one concurrency the last is kept by callers that average first, so here it is an error."""
    found: dict[float, LoadPoint] = {}
    for p in points:
        if p.throughput is None or not math.isfinite(p.throughput) or p.throughput <= 0:
            continue
        if not math.isfinite(p.concurrency) or p.concurrency <= 0:
            continue
        if p.concurrency in found:
            raise ValueError(f"two points at concurrency {p.concurrency:g}: average repetitions first")
        found[p.concurrency] = p
    return found


def _gain(on: LoadPoint, off: LoadPoint, shift: float = 0.0) -> float:
    """log(on/off) plus `shift` standard deviations of that ratio."""
    a, b = on.throughput or 0.0, off.throughput or 0.0
    relative = math.hypot((on.sd or 0.0) / a, (off.sd or 0.0) / b)
    return math.log(a / b) + shift * relative


def _zero(low: float, high: float, at_low: float, at_high: float) -> float:
    """Where a line through (log low, at_low) and (log high, at_high) is zero, kept within the bracket."""
    if at_low == at_high:
        return math.sqrt(low * high)
    share = min(1.0, max(0.0, at_low / (at_low - at_high)))
    return low * math.exp(share * math.log(high / low))


def _cause(before: LoadPoint, after: LoadPoint, off_after: LoadPoint) -> tuple[Cause, str]:
    """KV ran out: blocks at least 95 % used with requests waiting or preempted, with speculation and not without. Step cost: ITL grew by
    more than the concurrency did not explain (more than 1.25 times the ITL without speculation) while blocks stayed free.
    """
    full = after.kv_usage is not None and after.kv_usage >= 0.95 and ((after.waiting or 0) > 0 or (after.preemptions or 0) > 0)
    free = after.kv_usage is not None and after.kv_usage < 0.95
    slower = after.itl_ms is not None and off_after.itl_ms is not None and after.itl_ms > 1.25 * off_after.itl_ms
    said = []
    if after.kv_usage is not None:
        others = [
            f"{'not known' if n is None else f'{n:g}'} {word}" for n, word in ((after.waiting, "waiting"), (after.preemptions, "preempted"))
        ]
        said.append(f"KV blocks {after.kv_usage:.0%} used at {after.concurrency:g} with speculation, {', '.join(others)}")
    if after.itl_ms is not None and off_after.itl_ms is not None:
        grown = f", from {before.itl_ms:.1f} at {before.concurrency:g}" if before.itl_ms is not None else ""
        said.append(f"ITL {after.itl_ms:.1f} ms with speculation against {off_after.itl_ms:.1f} without{grown}")
    text = "; ".join(said) or "the archive holds neither KV usage nor ITL of both sides at the bracket"
    if full:
        return ("both" if slower else "KV ran out"), text
    if slower and free:
        return "step cost", text
    return "not known", text


def turnover(with_speculation: Iterable[LoadPoint], without: Iterable[LoadPoint]) -> Turnover:
    """Compare both series at their common concurrencies. The first change from paying to not paying is the turnover; `crossings` counts
    all changes. Where the series share no concurrency inside the fall, the bracket is bounded by monotone reasoning only if both ends are
    measured: nothing is extrapolated.
    """
    on, off = _series(with_speculation), _series(without)
    common = sorted(set(on) & set(off))
    if len(common) < 2:
        have = f"{len(on)} points with speculation, {len(off)} without, {len(common)} concurrencies in common"
        return Turnover("no data", f"{have}; two are needed")
    gains = {c: _gain(on[c], off[c]) for c in common}
    top = max(on, key=lambda c: on[c].throughput or 0.0)
    peak = top if top < max(on) else None
    loss = 1 - math.exp(gains[common[-1]])
    changes = [(a, b) for a, b in itertools.pairwise(common) if (gains[a] > 0) != (gains[b] > 0)]
    falls = [(a, b) for a, b in changes if gains[a] > 0]
    if not falls:
        said = f"at every common concurrency from {common[0]:g} to {common[-1]:g}" if not changes else "it starts to pay and stays so"
        status: Literal["pays throughout", "never pays"] = "pays throughout" if gains[common[-1]] > 0 else "never pays"
        return Turnover(status, said,
                        loss_at_highest=loss, peak=peak, crossings=len(changes))  # fmt: skip
    low, high = falls[0]
    crossing = _zero(low, high, gains[low], gains[high])
    repeated = all(p.sd is not None for p in (on[low], on[high], off[low], off[high]))
    if repeated:
        shifted = [(max(0.0, _gain(on[low], off[low], s)), min(0.0, _gain(on[high], off[high], s))) for s in (-1.0, 1.0)]
        ends = [_zero(low, high, *pair) for pair in shifted]
        around = (min(ends), max(ends))
    else:
        around = (low, high)
    alone = [c for c in sorted(on) if low < c < high and (on[c].throughput or 0.0) < (off[low].throughput or 0.0)]
    cause, evidence = _cause(on[low], on[high], off[high])
    said = f"pays at {low:g} ({math.exp(gains[low]):.2f} times), costs at {high:g} ({math.exp(gains[high]):.2f} times)"
    return Turnover("crosses", said, low, high, crossing, *around, loss, peak, alone[0] if alone else None, cause, evidence, len(changes))


def average(points: Sequence[LoadPoint]) -> list[LoadPoint]:
    """One point per concurrency: mean and sample standard deviation of the throughput over repetitions, the worst of the evidence."""
    groups: dict[float, list[LoadPoint]] = {}
    for p in points:
        if p.throughput is not None and math.isfinite(p.throughput):
            groups.setdefault(p.concurrency, []).append(p)
    averaged = []
    for c, rows in sorted(groups.items()):
        values = [p.throughput or 0.0 for p in rows]
        m = math.fsum(values) / len(values)
        sd = math.sqrt(math.fsum((v - m) ** 2 for v in values) / (len(values) - 1)) if len(values) > 1 else None

        def worst(name: str, rows: list[LoadPoint] = rows) -> float | None:
            present = [v for p in rows if (v := getattr(p, name)) is not None]
            return max(present) if present else None

        averaged.append(LoadPoint(c, m, sd, worst("kv_usage"), worst("waiting"), worst("preemptions"), worst("itl_ms")))
    return averaged
