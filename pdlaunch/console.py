"""What a person sees while a run goes on: stage, elapsed time, what it waits for; plain lines when the output is no terminal."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.live import Live


def shown(rows: Sequence[Mapping[str, Any]] | Mapping[str, Any], form: str) -> str:
    """Rows as aligned columns (form table) or as JSON; a mapping is one row per key, and per item of a list."""
    if form == "json":
        return json.dumps(rows, indent=1, ensure_ascii=False)
    if isinstance(rows, Mapping):
        items = [(name, value if isinstance(value, list) else [value]) for name, value in rows.items()]
        rows = [{"": "" if i else name, "value": item} for name, values in items for i, item in enumerate(values)]
    columns = list(rows[0]) if rows else []
    cells = [columns, *([str(row[c]) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    return "\n".join("  ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)).rstrip() for line in cells)


@dataclass
class EventFeed:
    """New whole lines of an events.jsonl that another process appends to."""

    path: Path
    offset: int = 0

    def new(self) -> list[dict[str, Any]]:
        try:
            with self.path.open("rb") as f:
                f.seek(self.offset)
                data = f.read()
        except FileNotFoundError:
            return []
        whole = data.rfind(b"\n") + 1
        self.offset += whole
        return [json.loads(line) for line in data[:whole].splitlines() if line]


@dataclass
class Stage:
    name: str
    began_s: float
    ended_s: float | None = None
    state: str = "begin"
    detail: str = ""


@dataclass
class Progress:
    """Stages in the order in which they began."""

    stages: list[Stage] = field(default_factory=list)

    def add(self, event: dict[str, Any], now_s: float) -> None:
        open_stage = next((s for s in reversed(self.stages) if s.name == event["stage"] and s.ended_s is None), None)
        detail = describe(event)
        if event["state"] == "begin":
            self.stages.append(Stage(event["stage"], now_s, detail=detail))
        elif event["state"] == "note" and open_stage is not None:
            open_stage.detail = detail
        elif event["state"] in ("end", "failed"):
            if open_stage is None:
                open_stage = Stage(event["stage"], now_s)
                self.stages.append(open_stage)
            open_stage.ended_s, open_stage.state, open_stage.detail = now_s, event["state"], detail or open_stage.detail


def describe(event: dict[str, Any]) -> str:
    """The detail of an event in one line."""
    shown = {k: v for k, v in event.items() if k not in ("utc", "monotonic_s", "stage", "state", "log_bytes", "host", "pid", "run_dir")}
    parts = [f"{v}" if k in ("failure", "reason", "line") else f"{k} {v}" for k, v in shown.items()]
    return " ".join(", ".join(parts).split())[:300]


class LiveView:
    """A rich table that is drawn again on every tick; use as a context manager. A terminal that went away ends the drawing, not the run."""

    def __init__(self, title: str, run_dir: Path) -> None:
        from rich.console import Console
        from rich.live import Live

        self.title, self.feed, self.progress = title, EventFeed(run_dir / "events.jsonl"), Progress()
        self.began_s = time.monotonic()
        self.live: Live = Live(console=Console(), auto_refresh=False, transient=False)

    def __enter__(self) -> LiveView:
        with contextlib.suppress(OSError):
            self.live.__enter__()
        self.tick()
        return self

    def __exit__(self, *failure: Any) -> None:
        self.tick()
        with contextlib.suppress(OSError):
            self.live.__exit__(*failure)

    def tick(self) -> None:
        now_s = time.monotonic()
        for event in self.feed.new():
            self.progress.add(event, now_s)
        with contextlib.suppress(OSError):
            self.live.update(self._table(now_s), refresh=True)

    def _table(self, now_s: float) -> Any:
        from rich.markup import escape
        from rich.table import Table

        table = Table(title=f"{self.title}  {now_s - self.began_s:.0f} s", title_justify="left", box=None, pad_edge=False)
        for column in ("", "stage", "seconds", "detail"):
            table.add_column(column, justify="right" if column == "seconds" else "left", overflow="fold")
        marks = {"begin": "[yellow]…[/]", "end": "[green]✓[/]", "failed": "[red]✗[/]"}
        for stage in self.progress.stages:
            seconds = (stage.ended_s if stage.ended_s is not None else now_s) - stage.began_s
            table.add_row(marks[stage.state], stage.name, f"{seconds:.0f}", escape(stage.detail))
        return table
