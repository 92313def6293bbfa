"""manifest.json of an archived run: the sha256 of every other file, how a folder differs from it, and reading that compares."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlaunch.errors import ArchiveError, Where
from pdlaunch.node.contracts import SCHEMA_VERSION

MANIFEST = "manifest.json"
NAMED = 5
"""Changed files that a message names; of more it gives the number."""


@dataclass(frozen=True)
class Differences:
    changed: tuple[str, ...]
    """Files whose bytes are not those of the manifest; a link is never a file of the run."""
    missing: tuple[str, ...]
    foreign: tuple[str, ...]
    """Files that the manifest does not name."""


def read(run: Path) -> dict[str, Any]:
    """ArchiveError when it is absent, damaged or not one of this project."""
    path = run / MANIFEST
    try:
        manifest = json.loads(path.read_bytes())
    except FileNotFoundError:
        raise ArchiveError(
            f"{run} has no {MANIFEST}",
            rule="a run that was archived: the manifest is written last",
            hint="the run was cut off, or the folder is not one of a run",
        ) from None
    except (ValueError, RecursionError) as e:
        raise ArchiveError(f"{path} is damaged: {e}", rule="JSON") from None
    if not isinstance(manifest, dict) or manifest.get("schema") != SCHEMA_VERSION:
        raise ArchiveError(f"{path} is not a manifest of this project", rule=f"schema {SCHEMA_VERSION} with files")
    files = manifest.get("files")
    if not isinstance(files, dict) or not all(isinstance(digest, str) for digest in files.values()):
        raise ArchiveError(f"{path} is not a manifest of this project", rule="files: {relative path: sha256}")
    return manifest


def _files(folder: str, prefix: str = "") -> Iterator[tuple[str, bool]]:
    """(path relative to the run, whether it is a link) of everything that is no folder."""
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_dir(follow_symlinks=False):
                yield from _files(entry.path, f"{prefix}{entry.name}/")
            elif entry.is_symlink() or entry.is_file():
                yield f"{prefix}{entry.name}", entry.is_symlink()


def differences(run: Path, named: dict[str, str], known: Collection[str] = ()) -> Differences:
    """Every file of the folder against the manifest's hashes. known: files whose bytes were compared before."""
    here = dict(_files(str(run)))
    here.pop(MANIFEST, None)
    both = here.keys() & named.keys() - set(known)
    changed = (name for name in both if here[name] or _sha256(run / name) != named[name])
    return Differences(tuple(sorted(changed)), tuple(sorted(named.keys() - here.keys())), tuple(sorted(here.keys() - named.keys())))


def _sha256(path: Path) -> str:
    with path.open("rb") as f:
        return hashlib.file_digest(f, "sha256").hexdigest()


@dataclass
class Files:
    """Reads files of one run and compares each with its hash in manifest.json."""

    run: Path
    expected: dict[str, str] | None
    """None: there is no manifest, so nothing can be checked."""
    differs: dict[str, str] = field(default_factory=dict)
    """File -> how it differs from the manifest: changed, missing, or not in manifest.json."""
    used: set[str] = field(default_factory=set)

    @property
    def changed(self) -> str:
        """The files that differ, in words; empty when none was found."""
        named = [name if how == "changed" else f"{name} ({how})" for name, how in sorted(self.differs.items())]
        return ", ".join(named[:NAMED]) + (f" and {len(named) - NAMED} more" if len(named) > NAMED else "")

    def word(self, verdict: dict[str, Any] | None) -> str:
        """The one word for the run in every list, table and page. CHANGED: a file is not as it was archived. UNFINISHED: no verdict.json
        or no manifest.json, which is written last. verdict: what verdict.json holds, None without one.
        """
        if self.differs:
            return "CHANGED"
        return "UNFINISHED" if self.expected is None or verdict is None else str(verdict["verdict"])

    def check_rest(self) -> None:
        """Compare what was not read with the manifest."""
        if self.expected is None:
            return
        found = differences(self.run, self.expected, self.used - self.differs.keys())
        for how, names in (("changed", found.changed), ("missing", found.missing), ("not in manifest.json", found.foreign)):
            self.differs |= dict.fromkeys(names, how)

    def read(self, path: Path) -> bytes:
        """The bytes; ArchiveError when they are not those of the manifest."""
        data = path.read_bytes()
        name = path.relative_to(self.run).as_posix()
        self.used.add(name)
        if self.expected is None:
            return data
        wanted = self.expected.get(name)
        found = hashlib.sha256(data).hexdigest()
        if found != wanted:
            self.differs[name] = "changed" if wanted else "not in manifest.json"
            said = f"sha256 {found[:12]}..., manifest.json says {wanted[:12]}..." if wanted else "is not in manifest.json"
            rule = "an archived run does not change: `launch.py verify` lists every difference"
            raise ArchiveError(f"changed since the run was archived: {said}", where=Where(path), rule=rule)
        return data

    def json(self, name: str) -> Any:
        """A JSON file of the run; None when it is absent; ArchiveError when it is not JSON or has changed."""
        path = self.run / name
        try:
            data = self.read(path)
        except FileNotFoundError:
            return None
        try:
            return json.loads(data)
        except (ValueError, RecursionError) as e:
            raise ArchiveError(f"not JSON ({e})", where=Where(path), rule="a whole file as the run wrote it") from None

    def lines(self, path: Path) -> list[dict[str, Any]]:
        """Rows of a JSON-lines file; ArchiveError names the first line that is no object."""
        rows = []
        for number, line in enumerate(self.read(path).splitlines(), 1):
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as e:
                raise ArchiveError(f"not JSON ({e})", where=Where(path, number), rule="one object per line") from None
            if not isinstance(row, dict):
                raise ArchiveError(f"{type(row).__name__}", where=Where(path, number), rule="one object per line")
            rows.append(row)
        return rows
