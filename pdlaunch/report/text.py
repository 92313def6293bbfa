"""Comparisons, run lists and attempts as text for a terminal."""

from __future__ import annotations

from collections.abc import Sequence

from pdlaunch.compare import Comparison
from pdlaunch.report.detail import figure
from pdlaunch.report.findings import KEY_METRICS, distinct, summary_of
from pdlaunch.report.series import turnover_lines
from pdlaunch.runs import Attempt, Row

NARROW = 34
STORED = "verdicts as stored: only spec.json and verdict.json were compared with manifest.json; `launch.py verify RUN` compares every file"


def columns(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Aligned columns, two blanks apart."""
    widths = [max(len(r[i]) for r in [header, *rows]) for i in range(len(header))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in [header, *rows]]


def short(text: str, width: int = NARROW) -> str:
    return text if len(text) <= width else text[: width - 3] + "..."


def comparison(found: Comparison, *, every: bool = False) -> str:
    """Refusals and differences first, then metrics with findings. every: all metrics instead of the key ones."""
    lines = []
    for group in found.groups:
        lines.append(f"{group.label}: " + ", ".join(r.id for r in group.runs))
    lines += [f"LEFT OUT  {who}: {why}" for who, why in found.refused]
    lines += [f"NOT VALID, shown because it was asked for  {run}" for run in found.marked]
    lines += [f"SHARED GPUS  {name}: {said}" for name, said in found.shared]
    lines += ["", "What differs" if found.differences else "Nothing differs: repetitions of one configuration."]
    if found.differences:
        few = len(found.groups) <= 6
        header = ["kind", "setting", *([g.name for g in found.groups] if few else ["values"])]
        lines += columns(header, [[d.kind, d.name, *(map(short, d.values) if few else [distinct(d.values)])] for d in found.differences])
    lines += [f"\n{name} IS NOT COMPARABLE with {found.groups[0].name}: {why}" for name, why in found.incomparable]
    for group in found.groups[1:]:
        for workload in dict.fromkeys(x.workload for x in found.lines if x.other_group == group.name):
            mine = [x for x in found.lines if x.other_group == group.name and x.workload == workload]
            shown = mine if every else [x for x in mine if x.metric in KEY_METRICS]
            lines += ["", f"{group.label} against {found.groups[0].label}: {workload}", summary_of(shown)]
            rows = []
            for x in shown:
                pair = [figure(s.mean if s.n else None) + (f" ± {s.sd:.2g}" if s.n > 1 else "") for s in (x.base, x.other)]
                rows.append([x.label, x.unit, *pair, "-" if x.delta_pct is None else f"{x.delta_pct:+.1f} %", x.finding, x.why])
            lines += columns(["metric", "unit", found.groups[0].name, group.name, "change", "finding", "why"], rows)
    lines += [f"not compared: {u}" for u in found.unmatched]
    lines += [f"speculation: {line}" for line in turnover_lines(found.groups)]
    lines += [f"problem: {p}" for p in found.problems]
    return "\n".join(lines)


def rows(found: Sequence[Row]) -> str:
    """The list of runs, and what its verdicts rest on."""
    if not found:
        return "no run fits"
    body = [[r.run, r.verdict, r.layout, r.vllm, short(r.patches), r.hybrid, r.speculation, _gpus(r), r.problem or r.line] for r in found]
    header = ["run", "verdict", "layout", "vllm", "patches", "hybrid", "speculation", "GPUs", "line"]
    return "\n".join([*columns(header, body), STORED])


def _gpus(row: Row) -> str:
    return (f"{row.gpus} shared" if row.shared else str(row.gpus)) if row.gpus else "-"


def attempts(found: Sequence[Attempt]) -> str:
    """The table of attempts."""
    header = ["layout", "vllm", "patches", "hybrid", "GPU", "HTTP", "recall", "failed transfers", "verdict", "run"]
    body = [
        [a.layout, a.vllm, short(a.patches), a.hybrid, a.gpu, a.statuses, a.recall, a.failed_transfers, a.verdict, a.run] for a in found
    ]
    return "\n".join(columns(header, body)) if found else "no run"
