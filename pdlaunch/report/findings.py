"""The lines of a comparison as a person reads them: blocks per workload, one sentence over each, and a compact table for many groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pdlaunch.compare import Comparison, Line
from pdlaunch.metrics_defs import DEFINITIONS
from pdlaunch.report.detail import definition, figure
from pdlaunch.stats import Spread

KEY_METRICS = (
    "ttft_p50_ms",
    "tpot_p50_ms",
    "output_tokens_per_s",
    "output_tokens_per_s_per_gpu",
    "total_tokens_per_s_per_gpu",
    "interactivity_median_tpot",
    "littles_law_residual_pct",
)


def _line(line: Line) -> dict[str, Any]:
    kinds = {"better": "better", "worse": "worse", "not comparable": "unknown"}

    def spread(s: Spread) -> str:
        return figure(s.mean if s.n else None) + (f" ± {s.sd:.2g}" if s.n > 1 else "")

    return {
        "label": line.label,
        "unit": line.unit,
        "base": spread(line.base),
        "other": spread(line.other),
        "source": line.source,
        "why": line.why,
        "delta": "-" if line.delta_pct is None else f"{line.delta_pct:+.1f} %",
        "finding": line.finding,
        "kind": kinds.get(line.finding, ""),
        "definition": definition(line.metric),
    }


def summary_of(lines: Sequence[Line]) -> str:
    """Findings in one sentence per direction: what is better, what is worse, what changed unjudged, how much is within noise."""
    said = []
    for word in ("better", "worse"):
        hits = [x for x in lines if x.finding == word]
        if hits:
            names = "; ".join(f"{x.label} {x.delta_pct:+.0f} %" for x in hits if x.delta_pct is not None)
            said.append(f"{word.capitalize()}: {names}.")
    changed = sum(x.finding == "changed" and bool(DEFINITIONS[x.metric].better) for x in lines)
    if changed:
        said.append(f"Changed and not judged, engines share GPUs: {changed} of {len(lines)}.")
    same = sum(x.finding == "within noise" for x in lines)
    return " ".join([*said, f"Within noise: {same} of {len(lines)}."])


def findings(found: Comparison) -> list[dict[str, Any]]:
    blocks = []
    for group in found.groups[1:]:
        lines = [x for x in found.lines if x.other_group == group.name]
        workloads = list(dict.fromkeys(x.workload for x in lines))
        for workload in workloads:
            mine = [x for x in lines if x.workload == workload]
            key = [x for x in mine if x.metric in KEY_METRICS]
            rest = [x for x in mine if x.metric not in KEY_METRICS]
            parts = [
                {"title": "Key metrics", "open": True, "lines": [_line(x) for x in key]},
                {"title": f"{len(rest)} more", "open": False, "lines": [_line(x) for x in rest]},
            ]
            blocks.append(
                {
                    "title": f"{group.label} against {found.groups[0].label}: {workload}",
                    "base": found.groups[0].name,
                    "other": group.name,
                    "summary": summary_of(key),
                    "parts": parts,
                }
            )
    return blocks


def _cell(line: Line | None) -> dict[str, str] | None:
    if line is None:
        return None
    delta = "" if line.delta_pct is None else f"{line.delta_pct:+.0f} %"
    return {"text": figure(line.other.mean if line.other.n else None), "source": line.source, "finding": line.finding, "delta": delta}


def compact(found: Comparison) -> dict[str, Any]:
    """A table for many groups: one row per group and workload, key metrics only."""
    cells: dict[tuple[str, str], dict[str, Line]] = {}
    for x in found.lines:
        if x.metric in KEY_METRICS:
            cells.setdefault((x.other_group, x.workload), {})[x.metric] = x
    rows = []
    labels = {g.name: g.label for g in found.groups}
    for (group, workload), by_metric in cells.items():
        row = []
        for name in KEY_METRICS:
            row.append(_cell(by_metric.get(name)))
        rows.append({"group": labels[group], "workload": workload, "cells": row})
    return {"columns": [DEFINITIONS[n].label for n in KEY_METRICS], "rows": rows}


def distinct(values: Sequence[str]) -> str:
    distinct = list(dict.fromkeys(values))
    return "; ".join(distinct[:5]) + (f"; {len(distinct) - 5} more" if len(distinct) > 5 else "")
