"""Prometheus text as the workers write it, and what counters moved between two snapshots.

A counter that a successful scrape does not show has not counted yet and is 0 (prometheus_client creates labelled children on first use); a
scrape that failed, or that shows no family of the engine at all (another process on the port), says nothing: None, never 0.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_NAME = re.compile(r"[A-Za-z_:][A-Za-z0-9_:]*")
_LABEL = re.compile(r'\s*([A-Za-z_][A-Za-z0-9_]*)\s*=\s*"((?:[^"\\]|\\.)*)"\s*,?\s*')
_ESCAPES = {"\\\\": "\\", '\\"': '"', "\\n": "\n"}


@dataclass(frozen=True)
class Sample:
    labels: dict[str, str]
    value: float
    line: int


@dataclass
class Metrics:
    """Samples by metric name, in the order of the text."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)

    def total(self, name: str, **labels: str) -> float | None:
        """Sum over the label sets that hold `labels`; None when no sample does."""
        found = [s.value for s in self.samples.get(name, ()) if all(s.labels.get(k) == v for k, v in labels.items())]
        return sum(found) if found else None

    def has_family(self, prefix: str) -> bool:
        return any(name.startswith(prefix) for name in self.samples)

    def labels(self, name: str) -> dict[str, str]:
        """Labels of the first sample of an info metric; empty when there is none."""
        found = self.samples.get(name)
        return found[0].labels if found else {}

    def values_of(self, label: str) -> set[str]:
        return {s.labels[label] for group in self.samples.values() for s in group if label in s.labels}


def parse(text: str) -> Metrics:
    """Samples of an exposition (text format 0.0.4 and OpenMetrics); ValueError names the line that is neither a sample nor a comment."""
    metrics = Metrics()
    for number, line in enumerate(text.splitlines(), start=1):
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        name = _NAME.match(stripped)
        if name is None:
            raise ValueError(f"line {number} is not a Prometheus sample: {line[:120]!r}")
        rest = stripped[name.end():]
        labels: dict[str, str] = {}
        if rest.startswith("{"):
            labels, rest = _labels(rest, number)
        fields = rest.split()
        try:
            value = float(fields[0])
        except (IndexError, ValueError):
            raise ValueError(f"line {number} has no value: {line[:120]!r}") from None
        metrics.samples.setdefault(name.group(), []).append(Sample(labels, value, number))
    return metrics


def _labels(text: str, number: int) -> tuple[dict[str, str], str]:
    """(labels, what follows the closing brace); quoted values may hold braces, commas and escapes."""
    labels: dict[str, str] = {}
    position = 1
    while pair := _LABEL.match(text, position):
        labels[pair.group(1)] = re.sub(r'\\[\\"n]', lambda m: _ESCAPES[m.group()], pair.group(2))
        position = pair.end()
    if text[position:position + 1] != "}":
        raise ValueError(f"line {number} has labels that cannot be read: {text[:120]!r}")
    return labels, text[position + 1:]


def read(path: Path) -> Metrics | None:
    """The snapshot of a file; None when it is absent, empty or not Prometheus text."""
    try:
        metrics = parse(path.read_text(encoding="utf-8", errors="replace"))
    except (OSError, ValueError):
        return None
    return metrics if metrics.samples else None


def moved(before: Metrics | None, after: Metrics | None, name: str, family: str, **labels: str) -> float | None:
    """How far a counter moved between two snapshots; None when a snapshot is missing or shows no metric of `family`, or the counter fell.

    A counter that fell belongs to a process that was started again in between, so the difference would be a lie.
    """
    if before is None or after is None or not before.has_family(family) or not after.has_family(family):
        return None
    difference = (after.total(name, **labels) or 0.0) - (before.total(name, **labels) or 0.0)
    return None if difference < 0 else difference
