"""What the verbs compare, report, runs, utilisation, export and import do. launch.py only names their options and prints the answer.
The page's template engine is loaded by the verbs that write a page.

compare RUN...      --recipe NAME, --last N, --include-invalid, --all-metrics, --noise-pct FLOAT (5), --format table|json
report RUN...       --recipe NAME, --last N, --include-invalid, --out FILE.html, --force
runs                --where KEY=VALUE (repeatable), --sort KEY (created), --last N, --matrix, --format table|json
utilisation SOURCE  --load FILE, --role NAME, --bin SECONDS, --busy TOKENS_PER_S (5000), --format table|json
RUN: a folder, <recipe>/<run>, a run's name or a quoted pattern.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch import utilisation as load_fit
from pdlaunch.compare import ASSUMED_NOISE_PCT, Comparison, compare
from pdlaunch.devices import sharing
from pdlaunch.errors import EXIT_OK, EXIT_VERDICT, ArchiveError
from pdlaunch.report import text
from pdlaunch.runread import Run, spec_of, unchanged
from pdlaunch.runs import index, matrix, read_all, select
from pdlaunch.utilisation_sources import read as read_utilisation

LONGEST_BIN_S = 366 * 86400.0


@dataclass(frozen=True)
class Answer:
    """text goes to standard output. code: EXIT_VERDICT when something that was asked for was left out."""

    text: str
    code: int = EXIT_OK


def _at_least_one(last: int | None) -> None:
    if last is not None and last < 1:
        raise ArchiveError(f"--last {last}", rule="at least 1")


@dataclass(frozen=True)
class Choice:
    """Which runs: names as typed, or the last N of a recipe."""

    names: tuple[str, ...] = ()
    recipe: str = ""
    last: int | None = None

    def paths(self, results: Path) -> list[Path]:
        if not self.names and not self.recipe:
            raise ArchiveError("no run is named", rule="RUN..., or --recipe NAME with --last N", hint="launch.py runs")
        if self.last is not None and not self.recipe:
            raise ArchiveError("--last without --recipe", rule="--recipe NAME --last N")
        _at_least_one(self.last)
        return select(self.names, results, self.recipe, self.last)


def _json(value: Any) -> str:
    return json.dumps(value, indent=1, ensure_ascii=False, allow_nan=False)


def compare_runs(choice: Choice, results: Path, *, include_invalid: bool = False, every: bool = False,
                 noise_pct: float = ASSUMED_NOISE_PCT, form: str = "table") -> Answer:  # fmt: skip
    """ArchiveError when fewer than two runs can be compared."""
    if not 0 <= noise_pct < 100:
        raise ArchiveError(f"--noise-pct {noise_pct:g}", rule="0 to 100 per cent")
    runs, refused = read_all(choice.paths(results), curves=False)
    found = compare(runs, include_invalid=include_invalid, refused=refused, assumed_noise_pct=noise_pct)
    shown = _json(found.to_json()) if form == "json" else text.comparison(found, every=every)
    return Answer(shown, EXIT_VERDICT if found.refused or found.incomparable else EXIT_OK)


def _comparison(runs: Sequence[Run], include_invalid: bool) -> tuple[Comparison | None, list[tuple[str, str]]]:
    """The comparison for a page, and what it left out; None when there is nothing to compare."""
    if len(runs) < 2:
        return None, []
    fit = [r for r in runs if r.valid or (include_invalid and not r.files.differs)]
    if len({r.id for r in fit}) < 2:
        return None, [(r.id, f"is {r.word}, so it is not compared") for r in runs if not r.valid]
    found = compare(runs, include_invalid=include_invalid)
    return found, list(found.refused)


def page_of(runs: Sequence[Run], refused: Sequence[tuple[str, str]], root: Path, out: Path, *, include_invalid: bool = False) -> str:
    """The page over these runs; links of the table of attempts are relative to `out`."""
    from pdlaunch.report import page

    found, left = _comparison(runs, include_invalid)

    def link(run: Run) -> str:
        target, base = run.path.resolve(), out.parent.resolve()
        beside = target.parent / f"{target.name}.html"
        there = beside if beside.exists() else target
        return _relative(there, base)

    return page.render(runs, found, [*refused, *left], root, link=link)


def _relative(path: Path, base: Path) -> str:
    """path as seen from the folder `base`, with .. where needed."""
    shared = 0
    for a, b in zip(path.parts, base.parts, strict=False):
        if a != b:
            break
        shared += 1
    return "/".join([".."] * (len(base.parts) - shared) + list(path.parts[shared:]))


def report(
    choice: Choice, results: Path, root: Path, *, out: Path | None = None, include_invalid: bool = False, force: bool = False
) -> Answer:
    """Write the page. Without --out the page of one run lies beside its folder, results/<recipe>/<run>.html: a sealed run is not
    touched. A run whose files are not proven by its manifest is shown, marked and named, and the code is EXIT_VERDICT."""
    paths = choice.paths(results)
    from pdlaunch.report import page

    if out is None:
        if len(paths) != 1:
            raise ArchiveError(f"{len(paths)} runs and no --out", rule="--out FILE.html; only the page of one run has a place of its own")
        run = paths[0].resolve()
        out, force = run.parent / f"{run.name}.html", True
    if out.is_symlink() and not out.exists():
        raise ArchiveError(f"{out} is a link that leads nowhere", rule="--out FILE.html")
    if any(out.resolve().is_relative_to(p.resolve()) for p in paths):
        raise ArchiveError(
            f"{out} lies inside an archived run", rule="an archived run does not change: its manifest would not fit", hint="another --out"
        )
    runs, refused = read_all(paths)
    written = page.write(page_of(runs, refused, root, out, include_invalid=include_invalid), out, overwrite=force)
    lines = [f"left out  {who}: {why}" for who, why in refused] + _unproven(runs)
    return Answer("\n".join([*lines, str(written)]), EXIT_VERDICT if lines else EXIT_OK)


def _unproven(runs: Sequence[Run]) -> list[str]:
    return [f"not proven  {r.id}: {r.doubt}" for r in runs if not r.verified]


def write_page_of_run(run: Path, root: Path) -> Path:
    """The page of one finished run, beside its folder; for the end of a job. Replaces an earlier page of the same run."""
    from pdlaunch.report import page

    runs, refused = read_all([run])
    out = run.resolve().parent / f"{run.resolve().name}.html"
    return page.write(page_of(runs, refused, root, out), out, overwrite=True)


def list_runs(results: Path, *, where: Sequence[str] = (), sort: str = "created", last: int | None = None, as_matrix: bool = False,
              form: str = "table") -> Answer:  # fmt: skip
    """The index, or the table of attempts of the runs that fit. ArchiveError for a folder that does not exist."""
    _at_least_one(last)
    if not results.is_dir():
        raise ArchiveError(f"--results {results}: no such folder", rule="a folder of archived runs, <recipe>/<run>")
    found = index(results, where, sort, last)
    if not as_matrix:
        return Answer(_json([dataclasses.asdict(r) for r in found]) if form == "json" else text.rows(found))
    runs, refused = read_all([Path(r.path) for r in found], curves=False)
    table = matrix(runs)
    changed = [f"changed  {r.id}: {r.files.changed}" for r in runs if r.files.differs]
    code = EXIT_VERDICT if refused or changed else EXIT_OK
    if form == "json":
        return Answer(_json({"attempts": [dataclasses.asdict(a) for a in table], "refused": refused, "changed": changed}), code)
    return Answer("\n".join([text.attempts(table), *(f"left out  {who}: {why}" for who, why in refused), *changed]), code)


def utilisation(source: Path, *, load: Path | None = None, role: str | None = None, bin_s: float | None = None,
                busy_tokens_per_s: float = load_fit.BUSY_TOKENS_PER_S, form: str = "table") -> Answer:  # fmt: skip
    """GPU utilisation per role against load, from a table, a range query, scrapes or a run."""
    if bin_s is not None and not 1 <= bin_s <= LONGEST_BIN_S:
        raise ArchiveError(f"--bin {bin_s:g}", rule=f"1 to {LONGEST_BIN_S:,.0f} seconds")
    if not 0 < busy_tokens_per_s < math.inf:
        raise ArchiveError(f"--busy {busy_tokens_per_s:g}", rule="a positive number of prompt tokens per second")
    shared = sharing(spec_of(unchanged(source))).text if (source / "spec.json").exists() else ""
    found = load_fit.analyse(read_utilisation(source, load=load, role=role, bin_s=bin_s), busy_tokens_per_s)
    if form == "json":
        return Answer(_json(found.to_json() | {"shared_gpus": shared}))
    return Answer("\n".join([*([shared] if shared else []), load_fit.table(found)]))
