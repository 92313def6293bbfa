"""Everything that a page shows of one run, as plain values for the template."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from markupsafe import Markup

from pdlaunch.errors import PlanError
from pdlaunch.geometry import LayerKind
from pdlaunch.metrics_defs import DEFINITIONS, Metric
from pdlaunch.report.drawings import handoff_svg, handoff_text, milestones, placement, timeline
from pdlaunch.report.handoff import kinds_of, log_agrees, transfers
from pdlaunch.report.series import Chart, transfer_chart, utilisation_chart
from pdlaunch.runread import Phase, Run
from pdlaunch.settings import phase_text


@dataclass
class Detail:
    """Everything the template shows of one run."""

    id: str
    name: str
    checks: list[dict[str, Any]] = field(default_factory=list)
    evidence: list[dict[str, Any]] = field(default_factory=list)
    bars: list[dict[str, Any]] = field(default_factory=list)
    milestones: list[tuple[str, str, str]] = field(default_factory=list)
    nodes: list[Any] = field(default_factory=list)
    roles: list[tuple[str, str]] = field(default_factory=list)
    devices: str = ""
    handoffs: list[dict[str, Any]] = field(default_factory=list)
    handoff_note: str = ""
    moved: list[dict[str, Any]] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    loads: dict[str, Any] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def figure(value: float | None) -> str:
    """Four significant digits, thousands separated; "-" for what was not measured."""
    if value is None or value != value:
        return "-"
    if value and abs(value) < 1000:
        return f"{value:.4g}"
    return f"{value:,.0f}"


def duration(seconds: float) -> str:
    """92.4 s, 5 min 40 s or 1 h 12 min."""
    if seconds < 100:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _checks(run: Run) -> list[dict[str, Any]]:
    words = {True: ("pass", "passed"), False: ("fail", "FAILED"), None: ("unknown", "not judged")}
    rows = []
    for check in run.verdict["checks"]:
        kind, word = words[check["passed"]]
        if not check.get("needed", True) and check["passed"] is False:
            kind = "unknown"
        rows.append({**check, "kind": kind, "word": word})
    return sorted(rows, key=lambda r: (r["passed"] is not False, r["passed"] is not None, not r.get("needed", True)))


def _stages(run: Run, detail: Detail) -> None:
    bars, problems = timeline(run)
    for b in bars:
        instant = b.end_s is not None and b.end_s <= b.begin_s
        text = f"at {duration(b.begin_s)}" if instant else "never ended" if b.end_s is None else duration(b.end_s - b.begin_s)
        css = "failed" if b.state == "failed" else "open" if b.state == "open" else "at" if instant else ""
        detail.bars.append(
            {
                "stage": b.stage,
                "detail": b.detail,
                "left": round(min(b.left, 99.4), 2),
                "width": round(b.width, 2),
                "text": text,
                "css": css,
                "source": b.source,
            }
        )
    detail.milestones = [(name, duration(s), source) for name, s, source in milestones(bars)]
    detail.problems += problems


def _placement(run: Run, detail: Detail) -> None:
    detail.nodes = placement(run)
    names: dict[str, list[str]] = {}
    for e in run.spec["engines"]:
        names.setdefault(e["role"], []).append(f"{e['name']} TP{e['tensor_parallel']}")
    free = sum(d.role == "free" for n in detail.nodes for d in n.devices)
    detail.roles = [(role, ", ".join(engines)) for role, engines in names.items()] + (
        [("free", f"{free} free for other jobs")] if free else []
    )
    kinds = sorted({g.get("name", "?") for f in run.nodes.values() for g in f.get("gpus") or []})
    detail.devices = f"GPUs: {', '.join(kinds)} (nodes/*.json gpus)." if kinds else "No GPU: each box is one CPU rank."


def _handoff(run: Run, detail: Detail, root: Path) -> None:
    prefill, decode = run.engines("prefill"), run.engines("decode")
    if not prefill or not decode:
        detail.handoff_note = "No hand-off: the run is not disaggregated."
        return
    p, d = prefill[0]["tensor_parallel"], decode[0]["tensor_parallel"]
    kinds, source = kinds_of(run, root)
    detail.handoff_note = f"The heads cannot be drawn: {source}."
    if kinds:
        try:
            detail.handoffs = [_drawing(kind, p, d) for kind in kinds]
            agreed = [log_agrees(run, role, kinds, tp) for role, tp in (("prefill", p), ("decode", d))]
            detail.handoff_note = f"Geometry from {source}. {'. '.join(agreed)}."
        except PlanError as e:
            detail.handoff_note = f"The heads cannot be drawn: {e}."
    _moved(run, detail)


def _drawing(kind: LayerKind, p: int, d: int) -> dict[str, Any]:
    heads = f"{kind.kv_heads} KV head{'' if kind.kv_heads == 1 else 's'} of size {kind.head_size_k}"
    layers = "1 layer" if len(kind.layers) == 1 else f"{len(kind.layers)} layers"
    title = f"{kind.name.replace('_', ' ')}, {layers}: {heads}, TP{p} to TP{d}"
    svg = Markup(handoff_svg(kind, p, d))
    return {"title": title, "text": "; ".join(handoff_text(kind, p, d)), "svg": svg}


def _moved(run: Run, detail: Detail) -> None:
    moved = transfers(run)
    for m in moved:
        equal = m.predicted is not None and m.moved == m.predicted
        text = "equal" if equal else m.why
        if not text and m.predicted:
            text = f"{((m.moved or 0) - m.predicted) / m.predicted:+.2%}"
        detail.moved.append(
            {
                "name": m.name,
                "prompts": m.prompts,
                "predicted": "-" if m.predicted is None else f"{m.predicted:,}",
                "moved": "-" if m.moved is None else f"{m.moved:,.0f}",
                "text": text,
                "source": m.source,
            }
        )
    detail.charts += [c for c in (transfer_chart(run, moved),) if c]


def definition(name: str) -> str:
    d = DEFINITIONS[name]
    return d.formula if d.denominator == "-" else f"{d.formula}; per {d.denominator}"


def _loads(run: Run) -> dict[str, Any]:
    """All phases as one table: a row per metric, a column per phase."""
    rows = []
    usable = [p for p in run.phases if p.metrics]
    for name, d in DEFINITIONS.items():
        metrics: list[Metric] = [p.metrics[name] for p in usable]
        if not metrics:
            continue
        cells = [
            {"value": figure(m.value), "source": f"{run.id}/{p.folder}/{m.source}" if m.value is not None else m.why}
            for p, m in zip(usable, metrics, strict=True)
        ]
        rows.append({"label": d.label, "unit": metrics[0].unit, "cells": cells, "definition": definition(name)})
    phases = [
        {
            "name": p.setting.name,
            "text": f"{phase_text(vars(p.setting))}, {p.setting.requests} requests, connections {p.setting.connection_reuse}",
            "why": _why(p),
        }
        for p in usable
    ]
    return {"rows": rows, "phases": phases, "problems": [x for p in run.phases for x in p.problems]}


def _why(phase: Phase) -> str:
    r = phase.reconciliation
    if r is None:
        missing = phase.metrics["interactivity_median_tpot"].why
        return f"interactivity by 1000/median TPOT {missing}" if missing.startswith("cannot") else ""
    return (
        f"why the interactivities differ: {r.median:.4g} (1000/median TPOT) x {r.mean_over_median:.3f} (mean over median) x "
        f"{r.generating_share:.3f} "
        f"(share of a request spent generating, the rest is TTFT) x {r.occupancy:.3f} (share of users with a request open) = "
        f"{r.output_per_user:.4g} output tokens/s per user"
    )


def detail_of(run: Run, name: str, root: Path) -> Detail:
    """All that is shown of one run."""
    detail = Detail(run.id, name, _checks(run))
    detail.evidence = [
        {"name": k, "value": json.dumps(v.get("value"), ensure_ascii=False)[:300], "unit": v.get("unit", ""), "source": v.get("source", "")}
        for k, v in run.evidence.items()
    ]
    _stages(run, detail)
    _placement(run, detail)
    _handoff(run, detail, root)
    chart, problems = utilisation_chart(run)
    detail.charts += [chart] if chart else []
    detail.loads = _loads(run)
    shown = {x for p in run.phases for x in p.problems}
    detail.problems += problems + [p for p in run.problems if p not in shown]
    return detail
