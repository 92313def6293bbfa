"""How long each stage of a run took, from events.jsonl: sbatch -> control plane -> engines ready -> first token -> recall -> load -> done.

Durations within a run are differences of the monotonic clock of the supervisor's node; only the time before the job started (the queue) is
a difference of wall clocks, because sbatch may have run on another node.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

AFTER_JUDGEMENT = frozenset({"judged", "archived"})
"""Stages that evidence never holds: they come after it, and a second judgement of the same files must give the same evidence."""


@dataclass(frozen=True)
class Stage:
    """One pass of a stage. label: the stage, with the phase of a load. at_s: its end, from the start of the job. state: end or failed."""

    label: str
    line: int
    state: str
    begin_s: float | None
    at_s: float
    duration_s: float | None


@dataclass(frozen=True)
class Timeline:
    stages: tuple[Stage, ...]
    queue_s: float | None
    """From sbatch to the start of the job; None for a local run."""
    events: tuple[dict[str, Any], ...]
    start: float
    """Monotonic time of the first event, in seconds."""

    def end_of(self, label: str) -> Stage | None:
        return next((s for s in self.stages if s.label == label and s.state == "end"), None)


def read_events(path: Path) -> list[dict[str, Any]]:
    """The lines of events.jsonl that are whole; a last line that a kill cut off is left out. Empty when there is no file."""
    events = []
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError:
        return []
    for number, line in enumerate(lines, start=1):
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if isinstance(event, dict) and "stage" in event and "monotonic_s" in event:
            events.append({**event, "line": number})
    return events


def read_timeline(run_dir: Path) -> Timeline:
    events = [e for e in read_events(run_dir / "events.jsonl") if e["stage"] not in AFTER_JUDGEMENT and e["stage"] != "submitted"]
    start = float(events[0]["monotonic_s"]) if events else 0.0
    open_at: dict[str, float] = {}
    stages = []
    for event in events:
        label = f"{event['stage']}.{event['phase']}" if event.get("phase") else str(event["stage"])
        now = float(event["monotonic_s"]) - start
        if event["state"] == "begin":
            open_at[label] = now
        elif event["state"] in ("end", "failed"):
            begin = open_at.pop(label, None)
            stages.append(Stage(label, event["line"], event["state"], begin, now, None if begin is None else now - begin))
    return Timeline(tuple(stages), _queue_s(run_dir, events), tuple(events), start)


def _queue_s(run_dir: Path, events: list[dict[str, Any]]) -> float | None:
    """Wall time from the receipt of sbatch (receipt.json, utc) to the first event."""
    try:
        receipt = json.loads((run_dir / "receipt.json").read_text(encoding="utf-8"))
        submitted = _utc(receipt["utc"])
        started = _utc(events[0]["utc"])
    except (OSError, ValueError, KeyError, IndexError, TypeError):
        return None
    return max(0.0, (started - submitted).total_seconds())


def _utc(text: str) -> datetime:
    return datetime.fromisoformat(text.replace("Z", "+00:00"))
