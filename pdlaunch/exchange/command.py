"""What `launch.py export` and `launch.py import` do.

export RUN...  --to aiperf|inferencex|llmd, --out FOLDER, --include-invalid
import FILE    --from aiperf|inferencex|llmd, --to aiperf|inferencex|llmd|points, --out FILE
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from pdlaunch.errors import EXIT_OK, EXIT_VERDICT, ArchiveError, Where
from pdlaunch.exchange import aiperf, inferencex, llmd, points
from pdlaunch.exchange.points import Point
from pdlaunch.node.contracts import write_json
from pdlaunch.report.command import Answer, Choice
from pdlaunch.runs import read_all

WRITERS: dict[str, Callable[[Point], dict[str, Any]]] = {
    "aiperf": aiperf.write,
    "inferencex": inferencex.write,
    "llmd": llmd.write,
    "points": points.to_json,
}
READERS: dict[str, Callable[[dict[str, Any]], Point]] = {
    "aiperf": aiperf.read,
    "inferencex": inferencex.read,
    "llmd": llmd.read,
    "points": points.from_json,
}


def _fresh(path: Path) -> Path:
    if path.exists():
        raise ArchiveError(f"{path} exists", rule="an export never overwrites", hint="another --out")
    return path


def export(choice: Choice, results: Path, to: str, out: Path, *, include_invalid: bool = False) -> Answer:
    """inferencex: one file with an array; the others: one file per run and phase, <recipe>.<run>.<phase>.json. Only VALID runs unless
    asked."""
    if to not in WRITERS:
        raise ArchiveError(f"--to {to!r}", rule=", ".join(WRITERS))
    runs, refused = read_all(choice.paths(results))
    rows: list[tuple[str, dict[str, Any]]] = []
    for run in runs:
        if run.files.differs or not (run.valid or include_invalid):
            refused.append((run.id, run.doubt))
            continue
        for point in points.points_of(run):
            try:
                rows.append((f"{run.id.replace('/', '.')}.{point.phase}.json", WRITERS[to](point)))
            except ArchiveError as e:
                # the writer names run and phase itself; here they stand in front already
                said = e.what.removeprefix(f"{point.run} {point.phase}: ")
                refused.append((f"{run.id} {point.phase}", f"{said} ({e.rule})" if e.rule else said))
    lines = [f"left out  {who}: {why}" for who, why in refused]
    if not rows:
        raise ArchiveError("nothing to export" + "".join(f"\n  {x}" for x in lines), rule=f"a VALID run with a phase that {to} can hold")
    if to == "inferencex":
        write_json(_fresh(out / "agg_bmk.json"), [row for _, row in rows])
        written = [str(out / "agg_bmk.json")]
    else:
        paths = [_fresh(out / name) for name, _ in rows]
        for path, (_, row) in zip(paths, rows, strict=True):
            write_json(path, row)
        written = list(map(str, paths))
    notes = [f"note  {run.id}: {run.sharing.text}" for run in runs if run.sharing.pattern and not run.doubt]
    return Answer("\n".join([*lines, *notes, *written]), EXIT_VERDICT if refused else EXIT_OK)


def load(path: Path, source: str) -> list[Point]:
    """Points of a file; an array holds several. ArchiveError names the file."""
    if source not in READERS:
        raise ArchiveError(f"--from {source!r}", rule=", ".join(READERS))
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise ArchiveError("does not exist", where=Where(path), rule="a file in the format of --from") from None
    except (ValueError, RecursionError) as e:
        raise ArchiveError(f"not JSON ({e})", where=Where(path), rule=f"a file in the format {source}") from None
    found = []
    for i, row in enumerate(data if isinstance(data, list) else [data]):
        try:
            if not isinstance(row, dict):
                raise TypeError(f"{type(row).__name__} where an object is expected")
            found.append(points.checked(READERS[source](row)))
        except ArchiveError as e:
            raise ArchiveError(e.what, where=Where(path, key=f"[{i}]"), rule=e.rule) from None
        except (KeyError, TypeError, ValueError, AttributeError, IndexError, OverflowError, RecursionError) as e:
            raise ArchiveError(f"{type(e).__name__}: {e}", where=Where(path, key=f"[{i}]"), rule=f"a file in the format {source}") from None
    return found


def convert(path: Path, source: str, to: str, out: Path) -> Answer:
    """From one format to another through the neutral point; what the target cannot hold is left out, and the table of docs/comparing.md
    says what."""
    if to not in WRITERS:
        raise ArchiveError(f"--to {to!r}", rule=", ".join(WRITERS))
    rows = [WRITERS[to](p) for p in load(path, source)]
    write_json(_fresh(out), rows if to == "inferencex" or len(rows) != 1 else rows[0])
    return Answer(str(out))
