"""Two or more archived runs: what differs, whether they may be compared, and their metrics side by side with what can be said of each.

The first run (with its repetitions) is the baseline. A difference is called better or worse only beyond the noise: with repetitions on
both sides the 95 % Welch interval of the difference; with repetitions on one side the 95 % prediction interval of one more run; with
single runs the noise is not known and an assumed band is used, which the finding says. Where engines share GPUs in another way on one
side, nothing is called better or worse: the difference may come from the sharing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pdlaunch.devices import Sharing
from pdlaunch.errors import ArchiveError
from pdlaunch.metrics_defs import DEFINITIONS, Better, Metric
from pdlaunch.runread import Phase, Run
from pdlaunch.settings import KINDS, Kind, Setting, fingerprint, phase_text, settings
from pdlaunch.stats import Spread, t_quantile, welch_interval

ASSUMED_NOISE_PCT = 5.0


@dataclass(frozen=True)
class Group:
    """Runs of one configuration. name: A, B, ... in the order given. label: with the verdicts of runs that are not VALID, and whether
    engines share GPUs."""

    name: str
    runs: tuple[Run, ...]
    settings: dict[str, Setting] = field(repr=False)

    @property
    def label(self) -> str:
        recipe = self.runs[0].spec["run"]["recipe"]
        words = sorted({r.word for r in self.runs if not r.valid}) + ["shared GPUs"] * bool(self.sharing.pattern)
        marked = f" [{', '.join(words)}]" if words else ""
        return f"{self.name} {recipe}{marked}" + (f" ({len(self.runs)} runs)" if len(self.runs) > 1 else "")

    @property
    def sharing(self) -> Sharing:
        """Alike for all runs of the group, whose settings are equal."""
        return self.runs[0].sharing


@dataclass(frozen=True)
class Difference:
    """One setting that is not the same everywhere. values: per group, "-" where it is not set."""

    kind: Kind
    name: str
    values: tuple[str, ...]
    source: str


@dataclass(frozen=True)
class Line:
    """One metric of one workload in two groups. finding: one of better, worse, within noise, changed, not comparable; and why in words."""

    workload: str
    metric: str
    label: str
    unit: str
    base: Spread
    other: Spread
    other_group: str
    delta_pct: float | None
    finding: str
    why: str
    source: str


@dataclass(frozen=True)
class Comparison:
    groups: tuple[Group, ...]
    refused: tuple[tuple[str, str], ...]
    """(run or path, why) of what was asked for and left out."""
    marked: tuple[str, ...]
    """Ids of runs that are not VALID and are shown because they were asked for."""
    shared: tuple[tuple[str, str], ...]
    """(group, what its engines share) of groups with more than one engine on a GPU."""
    differences: tuple[Difference, ...]
    incomparable: tuple[tuple[str, str], ...]
    """(group, why it must not be compared with the baseline)."""
    lines: tuple[Line, ...]
    unmatched: tuple[str, ...]
    """Workloads that only some groups ran."""
    problems: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        groups = [
            {"name": g.name, "label": g.label, "runs": [r.id for r in g.runs], "verdicts": [r.word for r in g.runs]} for g in self.groups
        ]
        body = {
            "groups": groups, "refused": [list(x) for x in self.refused], "marked_not_valid": list(self.marked),
            "shared_gpus": [list(x) for x in self.shared],
            "differences": [asdict(d) for d in self.differences], "incomparable": [list(x) for x in self.incomparable],
            "lines": [asdict(x) for x in self.lines], "unmatched": list(self.unmatched), "problems": list(self.problems),
            "definitions": {k: asdict(d) for k, d in DEFINITIONS.items()},
        }  # fmt: skip
        return dict(_without_nan(body))


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nan(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(v) for v in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _letters(index: int) -> str:
    name = ""
    index += 1
    while index:
        index, rest = divmod(index - 1, 26)
        name = chr(65 + rest) + name
    return name


def grouped(runs: Sequence[Run]) -> list[Group]:
    """Runs of equal settings together, in order of first appearance; runs that are not VALID never share a group with runs that are."""
    found: dict[tuple[str, bool], tuple[dict[str, Setting], list[Run]]] = {}
    for run in runs:
        flat = settings(run)
        found.setdefault((fingerprint(flat), run.valid), (flat, []))[1].append(run)
    return [Group(_letters(i), tuple(members), flat) for i, (flat, members) in enumerate(found.values())]


def differences(groups: Sequence[Group]) -> list[Difference]:
    """Settings that are not equal in all groups, by kind."""
    names = sorted({name for g in groups for name in g.settings})
    found = []
    for name in names:
        present = [g.settings.get(name) for g in groups]
        values = tuple("-" if s is None else s.value for s in present)
        if len(set(values)) > 1:
            one = next(s for s in present if s is not None)
            found.append(Difference(one.kind, name, values, one.source))
    return sorted(found, key=lambda d: (KINDS.index(d.kind), d.name))


def _workloads(group: Group) -> dict[tuple[Any, ...], list[Phase]]:
    found: dict[tuple[Any, ...], list[Phase]] = {}
    for run in group.runs:
        for phase in run.phases:
            found.setdefault(phase.workload, []).append(phase)
    return found


def why_incomparable(base: Group, other: Group) -> str:
    """Empty when the two may be compared; else the reason: another model, text never checked on one side, no workload in common,
    connections reused on one side only.
    """
    a, b = base.settings, other.settings
    if a["model"].value != b["model"].value:
        return f"another model: {a['model'].value} and {b['model'].value}"
    if a["text checked"].value != b["text checked"].value:
        return "one side is a simulator whose text was never checked"
    ours, theirs = _workloads(base), _workloads(other)
    if not ours or not theirs:
        return "one side has no load phase"
    if set(ours) & set(theirs):
        return ""
    but_reuse = {w[:-1] for w in ours} & {w[:-1] for w in theirs}
    if but_reuse:
        said = "a reused connection holds the first chunk of a stream about 40 ms (the frontend sets no TCP_NODELAY)"
        return f"another connection reuse: {said}, so TTFT and ITL of pooled and never must not be compared"
    texts = [sorted({phase_text(vars(p.setting)) for phases in side.values() for p in phases}) for side in (ours, theirs)]
    return f"another workload: {'; '.join(texts[0])} against {'; '.join(texts[1])}"


def judge(better: Better, base: Spread, other: Spread, assumed_pct: float = ASSUMED_NOISE_PCT) -> tuple[str, str]:
    """(finding, why). better "" describes, so a difference is `changed`."""
    if not base.n or not other.n:
        return "not comparable", "not measured on " + ("either side" if not base.n and not other.n else "one side")
    delta = other.mean - base.mean
    interval = welch_interval(base, other)
    if interval is not None:
        low, high = interval
        noise, why = low <= 0 <= high, f"95 % interval of the difference {low:+.4g} .. {high:+.4g} ({base.n} and {other.n} runs)"
    elif max(base.n, other.n) > 1:
        many = base if base.n > 1 else other
        half = t_quantile(0.975, many.n - 1) * many.sd * math.sqrt(1 + 1 / many.n)
        noise, why = abs(delta) <= half, f"one run against {many.n}: 95 % of single runs lie within ±{half:.4g}"
    else:
        band = abs(base.mean) * assumed_pct / 100
        noise, why = abs(delta) <= band, f"single runs: noise not known, {assumed_pct:g} % assumed"
    if noise:
        return "within noise", why
    if not better:
        return "changed", why
    return ("better" if (delta > 0) == (better == "higher") else "worse"), why


def _spread(phases: Sequence[Phase], name: str) -> Spread:
    return Spread.of([p.metrics[name].value for p in phases if name in p.metrics])


def _unit(phases: Sequence[Phase], name: str) -> str:
    found: Metric | None = next((p.metrics[name] for p in phases if name in p.metrics), None)
    return found.unit if found else DEFINITIONS[name].unit


def _lines(base: Group, other: Group, assumed_pct: float) -> list[Line]:
    ours, theirs = _workloads(base), _workloads(other)
    lines = []
    for workload in ours:
        if workload not in theirs:
            continue
        text = phase_text(vars(ours[workload][0].setting))
        for name, d in DEFINITIONS.items():
            a, b = _spread(ours[workload], name), _spread(theirs[workload], name)
            if not a.n and not b.n:
                continue
            unit, other_unit = _unit(ours[workload], name), _unit(theirs[workload], name)
            if unit != other_unit:
                finding, why = (
                    "not comparable",
                    f"per {unit.rsplit('/', 1)[-1]} on one side, per {other_unit.rsplit('/', 1)[-1]} on the other",
                )
            else:
                finding, why = judge(d.better, a, b, assumed_pct)
                if finding in ("better", "worse") and base.sharing.pattern != other.sharing.pattern:
                    finding, why = "changed", f"engines share GPUs in another way, so no judgement; {why}"
            comparable = finding != "not comparable" and a.mean and unit != "%"
            delta = (b.mean - a.mean) / abs(a.mean) * 100 if comparable else None
            lines.append(Line(text, name, d.label, unit, a, b, other.name, delta, finding, why, f"load/*/aiperf/{d.source}"))
    return lines


def compare(runs: Sequence[Run], *, include_invalid: bool = False, refused: Sequence[tuple[str, str]] = (),
            assumed_noise_pct: float = ASSUMED_NOISE_PCT) -> Comparison:  # fmt: skip
    """ArchiveError when fewer than two runs remain. refused: what could not even be read, carried into the result."""
    left, kept = list(refused), []
    seen: dict[str, Path] = {}
    for run in runs:
        if run.id in seen:
            left.append((str(run.path), f"has the same id as {seen[run.id]} ({run.id}): one of them is a copy"))
            continue
        seen[run.id] = run.path
        if run.files.differs or not (run.valid or include_invalid):
            left.append((run.id, run.doubt))
        else:
            kept.append(run)
    if len(kept) < 2:
        said = "\n".join(f"  {who}: {why}" for who, why in left)
        what = f"{len(kept)} of {len(kept) + len(left)} runs can be compared{':' if said else ''}\n{said}".rstrip()
        raise ArchiveError(what, rule="two VALID runs at least",
                           hint="--include-invalid compares runs that are not VALID, and marks them everywhere")  # fmt: skip
    groups = grouped(kept)
    incomparable, lines, unmatched = [], [], set()
    for other in groups[1:]:
        why = why_incomparable(groups[0], other)
        if why:
            incomparable.append((other.name, why))
            continue
        lines.extend(_lines(groups[0], other, assumed_noise_pct))
        ours, theirs = _workloads(groups[0]), _workloads(other)
        for workload in set(ours) ^ set(theirs):
            phase = (ours.get(workload) or theirs[workload])[0]
            unmatched.add(f"{phase_text(vars(phase.setting))}, connections {phase.setting.connection_reuse}: only in "
                          f"{groups[0].name if workload in ours else other.name}")  # fmt: skip
    marked = tuple(r.id for r in kept if not r.valid)
    problems = tuple(f"{r.id}: {p}" for r in kept for p in r.problems)
    return Comparison(
        tuple(groups),
        tuple(left),
        marked,
        tuple((g.name, g.sharing.text) for g in groups if g.sharing.pattern),
        tuple(differences(groups)),
        tuple(incomparable),
        tuple(lines),
        tuple(sorted(unmatched)),
        problems,
    )
