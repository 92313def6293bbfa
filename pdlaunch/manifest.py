"""manifest.json of an archived run: the sha256 of every other file, and how a folder differs from it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch.errors import ArchiveError
from pdlaunch.node.contracts import SCHEMA_VERSION

MANIFEST = "manifest.json"


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
