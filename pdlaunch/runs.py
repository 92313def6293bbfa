"""The index over results/ and the table of attempts: what `launch.py runs` lists, filters and sorts, from the archive alone.

There is no database: a run is its folder. Listing reads spec.json and verdict.json and compares these two with manifest.json; the
matrix also reads the answers and transfer counters, and compares every file.
"""

from __future__ import annotations

import fnmatch
import os
import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from pdlaunch.devices import denominators, sharing
from pdlaunch.errors import ArchiveError
from pdlaunch.manifest import Files
from pdlaunch.runread import MARKS, UNREADABLE, Run, checked_schema, open_files, read_run
from pdlaunch.settings import hybrid_manager, speculation

_FILTER = re.compile(r"^([a-z_]+)(!=|=|~)(.*)$")
ANSWERS = ("gate.jsonl", "behaviour.jsonl", "agreement.jsonl", "recall/before.jsonl", "recall/during.jsonl", "recall/after.jsonl")
_TP = {"prefill": "P", "decode": "D", "agg": "A"}


@dataclass(frozen=True)
class Row:
    """One run in the list. verdict: as manifest.Files.word, from spec.json and verdict.json alone. layout: as P TP4 x1 > D TP8 x1. gpus:
    distinct GPUs of the serving engines. shared: which roles share GPUs. problem: why a value is missing.
    """

    run: str
    recipe: str
    created: str
    verdict: str
    layout: str
    model: str
    vllm: str
    patches: str
    hybrid: str
    speculation: str
    device: str
    gpus: int
    shared: str
    cluster: str
    line: str
    problem: str
    path: str


COLUMNS = tuple(f.name for f in fields(Row))


def layout_of(spec: dict[str, Any]) -> str:
    """Tensor parallel size and replicas per serving role, as P TP4 x1 > D TP8 x1; other parallelism where it is not 1."""
    parts = []
    for role, letter in _TP.items():
        engines = [e for e in spec["engines"] if e["role"] == role]
        if engines:
            e = engines[0]
            more = "".join(f" {k}{e[name]}" for k, name in (("PP", "pipeline_parallel"), ("DP", "data_parallel")) if e[name] > 1)
            parts.append(f"{letter} TP{e['tensor_parallel']}{more} x{len(engines)}")
    return " > ".join(parts)


def _decode_argv(spec: dict[str, Any]) -> list[str]:
    serving = [e for e in spec["engines"] if e["role"] in ("decode", "agg")]
    return list(serving[0]["ranks"][0]["argv"]) if serving else []


def _verdict(files: Files) -> tuple[dict[str, Any] | None, str, str]:
    """(verdict.json or None, its line, what is wrong with it)."""
    path = files.run / "verdict.json"
    try:
        found = files.json("verdict.json")
        if found is None:
            return None, "the run has no verdict", ""
        checked_schema(found, path)
        line = str(found["line"])
        return {"verdict": str(found["verdict"])}, line if files.expected is not None else f"no manifest.json; stored: {line}", ""
    except (ArchiveError, OSError, KeyError, TypeError) as e:
        return {"verdict": UNREADABLE}, "", str(e).replace("\n", " ")


def row_of(path: Path) -> Row:
    """From spec.json and verdict.json; what cannot be read is empty and `problem` says why."""
    name, created = f"{path.parent.name}/{path.name}", path.name.split("-")[0]
    files, line, problem = None, "", ""
    verdict: dict[str, Any] | None = {"verdict": UNREADABLE}
    try:
        files = open_files(path)
        verdict, line, problem = _verdict(files)
        spec = checked_schema(files.json("spec.json"), path / "spec.json")
        argv, per = _decode_argv(spec), denominators(spec)
        return Row(name, path.parent.name, created, files.word(verdict), layout_of(spec), spec["model"]["id"],
                   spec["proof"]["versions"].get("vllm", "?"), ", ".join(spec["proof"]["patches"]) or "stock", hybrid_manager(argv),
                   speculation(argv) or "off", spec["run"]["device"], per.total if per.kind == "GPU" else 0, sharing(spec).pattern,
                   spec["run"]["cluster"], line, problem, str(path))  # fmt: skip
    except (ArchiveError, OSError, KeyError, TypeError, AttributeError, IndexError, ValueError) as e:
        said = f"spec.json: {type(e).__name__} {e}" if not isinstance(e, ArchiveError) else str(e).replace("\n", " ")
        word = files.word(verdict) if files else UNREADABLE
        return Row(name, path.parent.name, created, word, "?", "?", "?", "?", "?", "?", "?", 0, "", "?", line, problem or said, str(path))


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link in a circle
        return False


def folders(results: Path) -> list[Path]:
    """results/<recipe>/<run>: every folder that holds a file of a run, by recipe and name. Hidden and other folders are no runs."""
    found: list[Path] = []
    if not results.is_dir():
        return found
    with os.scandir(results) as recipes:
        for recipe in recipes:
            if recipe.name.startswith(".") or not _is_folder(recipe):
                continue
            with os.scandir(recipe.path) as runs:
                found += [Path(r.path) for r in runs if _is_folder(r) and not r.name.startswith(".")]
    return sorted(p for p in found if any((p / mark).exists() for mark in MARKS))


def matches(row: Row, conditions: Iterable[str]) -> bool:
    """Every condition KEY=VALUE (shell pattern), KEY!=VALUE or KEY~PART holds; ArchiveError for an unknown key or no operator."""
    for condition in conditions:
        match = _FILTER.match(condition)
        if match is None or match.group(1) not in COLUMNS:
            raise ArchiveError(f"--where {condition!r}", rule=f"KEY=PATTERN, KEY!=PATTERN or KEY~PART with KEY one of {', '.join(COLUMNS)}")
        key, operator, wanted = match.groups()
        value = str(getattr(row, key))
        hit = wanted.lower() in value.lower() if operator == "~" else fnmatch.fnmatchcase(value, wanted)
        if hit == (operator == "!="):
            return False
    return True


def index(results: Path, where: Sequence[str] = (), sort: str = "created", last: int | None = None) -> list[Row]:
    """Rows of every run, filtered; sort: a column, with - in front for descending; last: only that many of the newest, oldest first."""
    descending, key = sort.startswith("-"), sort.removeprefix("-")
    if key not in COLUMNS:
        raise ArchiveError(f"--sort {sort!r}", rule=f"one of {', '.join(COLUMNS)}, with - in front for descending")
    rows = [row for row in map(row_of, folders(results)) if matches(row, where)]
    if last is not None:
        rows = sorted(rows, key=lambda r: (r.created, r.run))[-last:] if last > 0 else []
    return sorted(rows, key=lambda r: (getattr(r, key), r.run), reverse=descending)


def select(names: Sequence[str], results: Path, recipe: str = "", last: int | None = None) -> list[Path]:
    """Folders of runs from what a person typed: a folder, <recipe>/<run>, a run's name, or a glob of either; or the last N of a recipe.

    A name that fits nothing is an ArchiveError; a folder that is no run is passed on, so that reading says what is wrong with it.
    """
    chosen: list[Path] = []
    for name in names:
        direct = Path(name)
        if direct.exists():
            chosen.append(direct)
        elif (results / name).exists():
            chosen.append(results / name)
        else:
            known = folders(results)
            fits = [p for p in known if fnmatch.fnmatch(f"{p.parent.name}/{p.name}", name) or fnmatch.fnmatch(p.name, name)]
            fits = fits or [p for p in sorted(Path().glob(name)) if p.is_dir()] if not direct.is_absolute() else fits
            if not fits:
                recent = ", ".join(f"{p.parent.name}/{p.name}" for p in known[-3:]) or "none"
                raise ArchiveError(
                    f"no run fits {name!r}", rule=f"a folder, <recipe>/<run>, or a pattern; in {results}: {recent}", hint="launch.py runs"
                )
            chosen += fits
    if recipe:
        of_recipe = sorted((p for p in folders(results) if p.parent.name == recipe), key=lambda p: p.name)
        if not of_recipe:
            raise ArchiveError(f"no run of recipe {recipe!r} in {results}", rule="the recipe's own name", hint="launch.py runs")
        chosen += of_recipe[-last:] if last else of_recipe
    return list(dict.fromkeys(chosen))


def read_all(paths: Sequence[Path], *, curves: bool = True) -> tuple[list[Run], list[tuple[str, str]]]:
    """(runs, what could not be read and why): one bad folder never hides the others."""
    runs, refused = [], []
    for path in paths:
        try:
            runs.append(read_run(path, curves=curves))
        except (ArchiveError, OSError) as e:
            refused.append((str(path), str(e)))
        except (KeyError, TypeError, AttributeError, IndexError, ValueError, RecursionError) as e:
            refused.append((str(path), f"spec.json is not of this schema: {type(e).__name__} {e}"))
    return runs, refused


@dataclass(frozen=True)
class Attempt:
    """A line of the table of attempts, as the first seed kept it by hand. statuses: answers per HTTP status.

    "-": not looked at.
    """

    layout: str
    vllm: str
    patches: str
    hybrid: str
    gpu: str
    statuses: str
    recall: str
    failed_transfers: str
    verdict: str
    run: str
    path: str


_FAILED = "vllm:nixl_num_failed_transfers"


def answers(run: Run) -> dict[str, list[dict[str, Any]]]:
    """Answer rows of the deployment by file; a file that is absent or unreadable is left out (and is in the run's changed files)."""
    found = {}
    for name in ANSWERS:
        try:
            rows = run.files.lines(run.path / name)
        except (FileNotFoundError, ArchiveError):
            continue
        found[name] = [r for r in rows if r.get("target", "deployment") == "deployment"]
    return found


def counter(run: Run, process: str, when: str, name: str) -> float | None:
    """Sum over labels of a counter in metrics/<process>.<when>.prom, with or without _total; 0 when the snapshot has no such line
    (Prometheus counters appear with their first event), None when there is no snapshot.
    """
    try:
        text = run.files.read(run.path / "metrics" / f"{process}.{when}.prom").decode("utf-8", "replace")
    except (FileNotFoundError, ArchiveError):
        return None
    total = 0.0
    for line in text.splitlines():
        if line.startswith((name + "{", name + " ", name + "_total{", name + "_total ")):
            try:
                total += float(line.rsplit(None, 1)[1])
            except ValueError:
                continue
    return total


def last_counter(run: Run, process: str, name: str) -> float | None:
    """The counter in the latest snapshot that exists."""
    for when in ("end", "after_load", "before_load", "ready"):
        value = counter(run, process, when, name)
        if value is not None:
            return value
    return None


def attempt(run: Run) -> Attempt:
    """One run as a line of the table."""
    spec, rows = run.spec, answers(run)
    given = (r.get("status") for name in rows for r in rows[name])
    statuses = Counter(status if isinstance(status, int) else 0 for status in given)
    recall = [r for name in rows if name.startswith("recall/") for r in rows[name]]
    failed = [last_counter(run, e["name"], _FAILED) for e in run.engines("decode")]
    known = [f for f in failed if f is not None]
    gpus = sorted({g.get("name", "?") for facts in run.nodes.values() for g in facts.get("gpus") or []})
    vllm = run.spec["proof"]["versions"].get("vllm", "?")
    seen = {f["versions"]["vllm"] for f in run.nodes.values() if "vllm" in (f.get("versions") or {})}
    said = ", ".join(f"{n} x {s or 'no answer'}" for s, n in sorted(statuses.items()))
    return Attempt(
        layout=layout_of(spec),
        vllm=" and ".join(sorted(seen)) or vllm,
        patches=", ".join(spec["proof"]["patches"]) or "stock",
        hybrid=hybrid_manager(_decode_argv(spec)),
        gpu=", ".join(gpus) or spec["run"]["device"].upper(),
        statuses=said or "-",
        recall=f"{sum(bool(r.get('correct')) for r in recall)} of {len(recall)}" if recall else "-",
        failed_transfers=f"{sum(known):.0f}" if known else "-",
        verdict=run.word,
        run=run.id,
        path=str(run.path),
    )


def matrix(runs: Iterable[Run]) -> list[Attempt]:
    """Every run as an attempt, by layout, version, patches and hybrid manager."""
    return sorted(map(attempt, runs), key=lambda a: (a.layout, a.vllm, a.patches, a.hybrid, a.gpu, a.run))
