"""Drawings of one run as plain values for the template, and the hand-off as SVG: stages on a time axis, GPUs of every node, heads that
move."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from typing import Any

from pdlaunch.devices import owners
from pdlaunch.geometry import LayerKind, hand_off, heads_of_rank
from pdlaunch.node.contracts import STAGES
from pdlaunch.runread import Run


@dataclass(frozen=True)
class Bar:
    """One stage. begin_s, end_s: from the first event; end_s None: it never ended. left, width: per cent of the axis."""

    stage: str
    detail: str
    begin_s: float
    end_s: float | None
    state: str
    left: float
    width: float
    source: str


def _seconds(event: dict[str, Any]) -> float:
    return datetime.fromisoformat(event["utc"]).timestamp()


def timeline(run: Run) -> tuple[list[Bar], list[str]]:
    """(bars in the order of a run, problems). Positions by UTC; an event without a readable time is a problem, not a bar."""
    problems, rows = [], []
    for number, event in enumerate(run.events, 1):
        try:
            rows.append((_seconds(event), str(event["stage"]), str(event.get("state", "")), event, number))
        except (KeyError, TypeError, ValueError) as e:
            problems.append(f"events.jsonl:{number}: no stage or time ({e})")
    if not rows:
        return [], problems
    start = min(r[0] for r in rows)
    span = max(max(r[0] for r in rows) - start, 1e-9)
    opened: dict[tuple[str, str], tuple[float, int]] = {}
    bars = []

    def bar(stage: str, detail: str, begin: float, end: float | None, state: str, source: str) -> Bar:
        width = ((end if end is not None else start + span) - begin) / span * 100
        return Bar(stage, detail, begin - start, None if end is None else end - start, state, (begin - start) / span * 100, width, source)

    for when, stage, state, event, number in rows:
        detail = str(event.get("phase", ""))
        if state == "failed":
            why = {k: v for k, v in event.items() if k not in ("utc", "monotonic_s", "stage", "state", "phase")}
            problems.append(f"events.jsonl:{number}: {stage} failed: {', '.join(f'{k} {v}' for k, v in why.items())[:300]}")
        if state == "begin":
            opened[stage, detail] = (when, number)
        elif state in ("end", "failed"):
            began, line = opened.pop((stage, detail), (when, number))
            source = f"events.jsonl:{line}" + (f" and {number}" if line != number else "")
            bars.append(bar(stage, detail, began, when, "failed" if state == "failed" else "done", source))
    for (stage, detail), (began, line) in opened.items():
        bars.append(bar(stage, detail, began, None, "open", f"events.jsonl:{line}"))
    order = {name: i for i, name in enumerate(STAGES)}
    return sorted(bars, key=lambda b: (b.begin_s, order.get(b.stage, len(order)), b.detail)), problems


def milestones(bars: Sequence[Bar]) -> list[tuple[str, float, str]]:
    """(name, seconds, source) between the stages that people ask about, where both exist."""
    at: dict[str, Bar] = {}
    for b in bars:
        if b.state == "done":
            at.setdefault(b.stage, b)
    done = list(at)
    whole = (done[0], done[-1]) if done else ("", "")
    pairs = (
        ("submitted to job start", "submitted", "job_started"),
        ("job start to engines ready", "job_started", "engines_ready"),
        ("engines ready to first token", "engines_ready", "first_token"),
        ("whole run", *whole),
    )
    found = []
    for name, first, last in pairs:
        if first in at and last in at and first != last:
            found.append((name, (at[last].end_s or 0.0) - (at[first].end_s or 0.0), f"{at[first].source}, {at[last].source}"))
    return found


@dataclass(frozen=True)
class Device:
    """One GPU (or CPU rank) of a node; engine "" : free, given to nobody by this job."""

    index: int
    engine: str
    role: str
    with_role: str = ""
    """Role of another engine on the same GPU."""


@dataclass(frozen=True)
class NodeDrawing:
    name: str
    devices: tuple[Device, ...]
    services: tuple[str, ...]
    source: str


def _device(index: int, engines: list[dict[str, Any]]) -> Device:
    if not engines:
        return Device(index, "", "free")
    roles = list(dict.fromkeys(e["role"] for e in engines))
    return Device(index, ", ".join(e["name"] for e in engines), roles[0], roles[1] if len(roles) > 1 else "")


def placement(run: Run) -> list[NodeDrawing]:
    """Nodes with their GPUs by engine. gpus of a NodeSlot are those of the job; a GPU that no engine takes is free for other jobs."""
    taken = owners(run.spec)
    ranks: dict[int, list[tuple[str, str]]] = {}
    for e in run.spec["engines"]:
        for rank in e["ranks"]:
            if not rank["gpus"]:
                each = max(1, e["tensor_parallel"] * e["pipeline_parallel"] * e["data_parallel"] // len(e["ranks"]))
                ranks.setdefault(rank["node"], []).extend([(e["name"], e["role"])] * each)
    hosts = {f.get("node"): f.get("host") for f in run.nodes.values() if f.get("node") is not None}
    drawn = []
    for i, slot in enumerate(run.spec["nodes"]):
        count = max([slot["gpus"], *(g + 1 for n, g in taken if n == i)])
        devices = [_device(g, taken.get((i, g), [])) for g in range(count)]
        devices += [Device(n, name, role) for n, (name, role) in enumerate(ranks.get(i, []))]
        services = tuple(s["name"] for s in run.spec["services"]) if i == 0 else ()
        drawn.append(
            NodeDrawing(
                f"node {i}" + (f" ({hosts[i]})" if hosts.get(i) else ""), tuple(devices), services, "spec.json nodes, engines[].ranks"
            )
        )
    return drawn


CELL, GAP, ROW = 20, 10, 22


def _boxes(kind: LayerKind, tp: int, y: int, unit: int, title: str) -> tuple[list[str], dict[int, dict[int, float]]]:
    """Rank boxes with one cell per head; also rank -> head -> x of the cell's middle."""
    parts, middles = [], {}
    for rank in range(tp):
        heads = heads_of_rank(kind.kv_heads, rank, tp)
        x = rank * unit + GAP / 2
        width = unit - GAP
        cell = width / len(heads)
        middles[rank] = {h: x + (i + 0.5) * cell for i, h in enumerate(heads)}
        parts.append(f"<g><title>{title} rank {rank}: KV heads {', '.join(map(str, heads))}</title>")
        for i, h in enumerate(heads):
            label = f'<text x="{x + (i + 0.5) * cell:.1f}" y="{y + 15}">{h}</text>' if cell >= 11 else ""
            parts.append(
                f'<rect class="h{h % 8}" x="{x + i * cell:.1f}" y="{y}" width="{max(1.0, cell - 1):.1f}" height="{ROW}" rx="3"/>{label}'
            )
        tag = f"{title[0]}{rank}" if unit < 60 else f"{title} {rank}"
        parts.append(f'<text class="rank" x="{x + width / 2:.1f}" y="{y - 6 if title == "prefill" else y + ROW + 15}">{tag}</text></g>')
    return parts, middles


def handoff_svg(kind: LayerKind, prefill_tp: int, decode_tp: int) -> str:
    """Prefill ranks above, decode ranks below, one line per head that a decode rank reads. Same colour, same head; copies share it."""
    widest = max(prefill_tp, decode_tp)
    unit_small = max(50, CELL * max(1, min(4, kind.kv_heads // widest)) + GAP)
    width = widest * unit_small
    top, bottom = 24, 128
    upper, from_middle = _boxes(kind, prefill_tp, top, width // prefill_tp, "prefill")
    lower, to_middle = _boxes(kind, decode_tp, bottom, width // decode_tp, "decode")
    lines = []
    for r in hand_off([kind], prefill_tp, decode_tp):
        for h in r.heads:
            a, b = from_middle[r.prefill_rank][h], to_middle[r.decode_rank][h]
            middle = (top + ROW + bottom) / 2
            lines.append(f'<path class="h{h % 8}" d="M{a:.1f} {top + ROW} C{a:.1f} {middle} {b:.1f} {middle} {b:.1f} {bottom}"/>')
    name = escape(f"{kind.name} layers: {kind.kv_heads} KV heads from prefill TP{prefill_tp} to decode TP{decode_tp}")
    size = f'viewBox="0 0 {width} {bottom + ROW + 22}" style="min-width:{min(width, 340)}px;max-width:{round(width * 1.5)}px"'
    body = f'<g class="wires">{"".join(lines)}</g>{"".join(upper)}{"".join(lower)}'
    return f'<svg class="handoff" {size} role="img" aria-label="{name}">{body}</svg>'


def handoff_text(kind: LayerKind, prefill_tp: int, decode_tp: int) -> list[str]:
    """What the drawing shows, in words: copies, and what each decode rank takes."""
    found = hand_off([kind], prefill_tp, decode_tp)
    copies = {tp: max(1, tp // kind.kv_heads) for tp in (prefill_tp, decode_tp)}
    held = {tp: len(heads_of_rank(kind.kv_heads, 0, tp)) for tp in (prefill_tp, decode_tp)}
    words = [f"{held[prefill_tp]} per prefill rank, {held[decode_tp]} per decode rank"]
    for role, tp in (("prefill", prefill_tp), ("decode", decode_tp)):
        if copies[tp] > 1:
            words.append(f"each head is copied onto {copies[tp]} {role} ranks")
    whole = all(r.whole for r in found)
    sources = {d: sum(r.decode_rank == d for r in found) for d in range(decode_tp)}
    if max(sources.values(), default=1) > 1:
        words.append(f"a decode rank reads from {max(sources.values())} prefill ranks")
    elif whole:
        words.append("every decode rank reads the whole block of its prefill rank")
    else:
        share = len(found[0].heads) / len(heads_of_rank(kind.kv_heads, found[0].prefill_rank, prefill_tp))
        words.append(f"every decode rank reads {share:.3g} of its prefill rank's block")
    return words
