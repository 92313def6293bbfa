"""One self-contained HTML page over one or many runs: no network, light and dark, every number with the file that it comes from.

Up to DETAILED runs are shown in full; of more, verdicts, comparison, frontier and the table of attempts, so that a page over hundreds of
runs stays small.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import jinja2
from markupsafe import Markup

from pdlaunch.compare import Comparison, Group, grouped
from pdlaunch.errors import ArchiveError
from pdlaunch.metrics_defs import DEFINITIONS
from pdlaunch.report.detail import detail_of
from pdlaunch.report.findings import compact, distinct, findings
from pdlaunch.report.series import (
    concurrency_chart,
    distribution_chart,
    pareto_chart,
)
from pdlaunch.runread import Run
from pdlaunch.runs import attempt, layout_of

HERE = Path(__file__).parent
VENDOR = ("hammerjs-2.0.8.min.js", "chart.js-4.6.1.min.js", "chartjs-plugin-zoom-2.2.0.min.js")
DETAILED = 12
CARDS = 6
WIDE_GROUPS = 6


class Sources:
    """Numbers the sources of values, so that a text that a thousand numbers share is in the page once."""

    def __init__(self) -> None:
        self.index: dict[str, int] = {}

    def value(self, text: object, source: str) -> Markup:
        number = self.index.setdefault(source, len(self.index))
        return Markup('<span class="v" data-s="{}">{}</span>').format(number, text)


def _verdict(run: Run, name: str) -> dict[str, Any]:
    per = run.denominators
    manifest = "every file matches manifest.json" if run.verified else run.doubt
    both = f", {per.shared} of them in two roles" if per.shared else ""
    versions = run.spec["proof"]["versions"]
    facts = [
        ("layout", layout_of(run.spec), f"{run.id}/spec.json engines"),
        ("model", run.spec["model"]["id"], f"{run.id}/spec.json model.id"),
        (f"{per.kind}s given to engines", f"{per.total} (prefill {per.prefill}, decode {per.decode}{both})", f"{run.id}/{per.source}"),
        ("versions", ", ".join(f"{k} {v}" for k, v in versions.items()) or "-", f"{run.id}/spec.json proof.versions"),
        ("patches", ", ".join(run.spec["proof"]["patches"]) or "none", f"{run.id}/spec.json proof.patches"),
        ("archive", manifest, f"{run.id}/manifest.json"),
    ]
    if not run.verdict.get("text_checked", True):
        facts.append(("text", "NOT CHECKED", f"{run.id}/verdict.json text_checked"))
    line, reasons = run.verdict["line"], list(run.verdict["reasons"])
    if not run.verified:
        line, reasons = f"as stored, not proven: {line}", [run.doubt, *reasons]
    return {"word": run.word, "name": name, "id": run.id, "line": line, "reasons": reasons, "facts": facts, "shared": run.sharing.text}


def _denominators(runs: Sequence[Run]) -> list[str]:
    kinds = sorted({r.denominators.kind for r in runs})
    said = [
        "Throughput per device divides by the distinct devices given to prefill, decode and aggregated engines, never by whole nodes; a "
        "GPU that engines share counts once. Per-role figures divide input by prefill devices and output by decode devices."
    ]
    if "rank" in kinds:
        said.append(
            "At least one run had no GPU: there one CPU rank stands for one device and units say rank. Such figures compare shapes, "
            "not hardware."
        )
    said.append("Total tokens count prompt tokens; the factor (ISL+OSL)/OSL beside them turns a total into output tokens.")
    return said


@functools.cache
def _template() -> jinja2.Template:
    loader = jinja2.FileSystemLoader(HERE)
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    return environment.get_template("page.html.j2")


@functools.cache
def _scripts() -> tuple[Markup, ...]:
    """The vendored libraries and page.js. Links to source maps are cut: a browser would look for them."""
    found = []
    for path in [*(HERE / "vendor" / name for name in VENDOR), HERE / "page.js"]:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if not line.startswith("//# sourceMappingURL=")]
        found.append(Markup("\n".join(lines).replace("</script", "<\\/script")))
    return tuple(found)


def _json(value: Any) -> Markup:
    """JSON that is safe inside <script>: no < > & as characters, no NaN."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return Markup(text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e"))


def render(
    runs: Sequence[Run],
    comparison: Comparison | None,
    refused: Sequence[tuple[str, str]],
    root: Path,
    now: Callable[[], datetime] = lambda: datetime.now(UTC),
    link: Callable[[Run], str] = lambda run: "",
) -> str:
    """The page as text. comparison: of the same runs, None for a single run or when nothing can be compared. root: the repository."""
    if not runs:
        said = "\n".join(f"  {who}: {why}" for who, why in refused)
        raise ArchiveError(f"no run can be shown{':' if said else ''}\n{said}".rstrip(), rule="at least one readable run")
    groups: list[Group] = list(comparison.groups) if comparison else grouped(runs)
    names = {run.id: f"{g.name} " if len(runs) > 1 else "" for g in groups for run in g.runs}
    sources = Sources()
    shown = list(runs)[:DETAILED]
    details = [detail_of(run, names.get(run.id, ""), root) for run in shown]
    kinds = sorted({r.denominators.kind for r in runs})
    device = " or ".join(kinds)
    drawn = [dataclasses.replace(g, runs=tuple(r for r in g.runs if r in shown)) for g in groups]
    charts = [pareto_chart(groups, device), concurrency_chart(groups, device), distribution_chart([g for g in drawn if g.runs])]
    charts_shown = [c for c in charts if c]
    every = [*charts_shown, *(c for d in details for c in d.charts)]
    many = comparison is not None and len(comparison.groups) > WIDE_GROUPS
    verdicts = [_verdict(run, names.get(run.id, "")) for run in runs]
    truncated = (
        f"In full: the first {DETAILED} of {len(runs)} runs. `launch.py report RUN` makes the page of one run."
        if len(runs) > DETAILED
        else ""
    )
    attempts = [{**dataclasses.asdict(attempt(run)), "link": link(run)} for run in runs] if len(runs) > 1 else []
    context = {
        "title": f"Run {runs[0].id}" if len(runs) == 1 else f"{len(runs)} runs compared",
        "comparison": comparison,
        "charts": charts_shown,
        "details": details,
        "attempts": attempts,
        "verdicts": verdicts[:CARDS],
        "more_verdicts": verdicts[CARDS:],
        "refused": refused,
        "wide_groups": [] if comparison is None or many else comparison.groups,
        "summary_of": distinct,
        "findings": [] if comparison is None or many else findings(comparison),
        "compact": compact(comparison) if many and comparison else None,
        "truncated": truncated,
        "denominators": _denominators(runs),
        "definitions": list(DEFINITIONS.values()),
        "val": sources.value,
        "made": now().strftime("%Y-%m-%d %H:%M UTC"),
        "count": "1 run" if len(runs) == 1 else f"{len(runs)} runs",
        "style": Markup((HERE / "page.css").read_text(encoding="utf-8")),
        "scripts": _scripts(),
    }
    body = _template().render(**context, data=Markup("@@DATA@@"))
    payload = {"charts": [dataclasses.asdict(c) for c in every], "sources": list(sources.index)}
    return body.replace("@@DATA@@", str(_json(payload)), 1)


def write(page: str, out: Path, *, overwrite: bool = False) -> Path:
    """Write to a temporary name and rename. An existing file is only replaced when asked for, and never one that this project did not
    make."""
    if out.exists():
        if not overwrite:
            raise ArchiveError(f"{out} exists", rule="a page never overwrites a file", hint="--force, or another --out")
        if not out.is_file() or b"<!doctype html>" not in out.read_bytes()[:64]:
            raise ArchiveError(f"{out} is no page of this project", rule="--force only replaces a page")
    out.parent.mkdir(parents=True, exist_ok=True)
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:  # replace: half a character in an answer, or in the name of a folder
        temporary.write_text(page, encoding="utf-8", errors="replace")
        temporary.replace(out)
    finally:
        temporary.unlink(missing_ok=True)
    return out
