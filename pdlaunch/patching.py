"""The patches of patches/series.yaml on an installed environment: status, apply, revert, verify, all by sha256.

Nothing of the environment is imported or run: versions come from the *.dist-info folders. The state of a file is the
set of patches in it, found by its hash: a later patch may stack on an earlier one that it requires. A file with any
other hash stops everything, with the hashes in the message.
"""

from __future__ import annotations

import argparse
import contextlib
import fcntl
import hashlib
import importlib.metadata
import json
import os
import sys
import tempfile
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from pdlaunch import unidiff
from pdlaunch.errors import EXIT_OK, EXIT_VERDICT, LaunchError, PatchError
from pdlaunch.patchseries import ABSENT, Patch, PatchFile, Series, expected_hashes, load_series

__all__ = [
    "FileState",
    "PatchState",
    "Series",
    "apply",
    "expected_hashes",
    "load_series",
    "revert",
    "site_packages_of",
    "status",
    "verify",
]

STORE = ".pdlaunch-patches"
State = Literal["applied", "not applied", "unknown", "other version", "not installed"]


@dataclass(frozen=True)
class FileState:
    path: str
    observed: str
    before: str
    after: str


@dataclass(frozen=True)
class PatchState:
    name: str
    state: State
    installed: str
    """`distribution version` pairs found, or an empty text."""
    files: tuple[FileState, ...]


def status(site_packages: Path, series: Series) -> list[PatchState]:
    """The state of every patch, in series order; never raises for a state, writes nothing, takes no lock.

    unknown: a file has a hash that no legal set of patches gives, or the files of one patch disagree (half applied).
    """
    survey = _Survey(site_packages, series)
    return [survey.state(patch) for patch in series.patches]


class _Survey:
    """What is installed: versions and hashes, read once."""

    def __init__(self, site_packages: Path, series: Series) -> None:
        _require_folder(site_packages)
        self.root, self.series = site_packages, series
        wanted = {_normal(d) for patch in series.patches for d in patch.distributions}
        self.versions = {
            _normal(d.name): d.version for d in importlib.metadata.distributions(path=[str(site_packages)]) if _normal(d.name) in wanted
        }
        self.observed = {f.path: _hash_of(site_packages / f.path) for patch in series.patches for f in patch.files}
        self.interrupted = (site_packages / STORE / "journal.json").exists()

    def installed(self, patch: Patch) -> dict[str, str]:
        return {d: self.versions[_normal(d)] for d in patch.distributions if _normal(d) in self.versions}

    def fits(self, patch: Patch) -> bool:
        found = self.installed(patch)
        return bool(found) and all(version.split("+")[0] == patch.version for version in found.values())

    def files(self, patch: Patch) -> list[PatchFile]:
        """The files of the patch that this environment has or must have."""
        present = [f for f in patch.files if not f.either or self.observed[f.path] != ABSENT]
        return present or list(patch.files)

    def chain(self, path: str) -> list[tuple[Patch, PatchFile]]:
        """The patches of the installed release that change this file, bottom first."""
        return [(p, f) for p in self.series.patches if self.fits(p) for f in p.files if f.path == path]

    def position(self, path: str) -> int | None:
        """How many patches of the chain are in the file; None for a foreign hash."""
        hashes = [f.before for _, f in self.chain(path)[:1]] + [f.after for _, f in self.chain(path)]
        return hashes.index(self.observed[path]) if self.observed[path] in hashes else None

    def state(self, patch: Patch) -> PatchState:
        files = tuple(FileState(f.path, self.observed[f.path], f.before, f.after) for f in self.files(patch))
        installed = ", ".join(f"{name} {version}" for name, version in self.installed(patch).items())
        return PatchState(patch.name, self._judge(patch), installed, files)

    def _judge(self, patch: Patch) -> State:
        if not self.installed(patch):
            return "not installed"
        if not self.fits(patch):
            return "other version"
        inside = set()
        for f in self.files(patch):
            at = self.position(f.path)
            names = [p.name for p, _ in self.chain(f.path)]
            inside.add(None if at is None else at > names.index(patch.name))
        return "unknown" if len(inside) != 1 or None in inside else "applied" if inside == {True} else "not applied"

    def applied(self) -> set[str]:
        return {patch.name for patch in self.series.patches if self._judge(patch) == "applied"}

    def require_known(self, patches: Collection[Patch]) -> None:
        """PatchError unless every given patch, and every patch that shares a file with one, is in a legal state."""
        paths = {f.path for patch in patches for f in patch.files}
        for patch in self.series.patches:
            if patch not in patches and (not self.fits(patch) or not paths & {f.path for f in patch.files}):
                continue
            found = self.state(patch)
            if found.state in ("applied", "not applied"):
                continue
            rule = f"{' or '.join(patch.distributions)} {patch.version} with files that are stock or of this series"
            if found.state != "unknown":
                raise PatchError(
                    f"{patch.name}: {found.installed or 'not installed'} in {self.root}",
                    rule=rule,
                    hint="use the patch for this version, or install that version",
                )
            detail = "".join(
                f"\n    {f.path}\n      observed {f.observed}\n      before   {f.before}\n      after    {f.after}" for f in found.files
            )
            hint = (
                "an apply was interrupted here: run apply or revert again"
                if self.interrupted
                else f"reinstall {patch.distributions[0]}=={patch.version}"
            )
            raise PatchError(f"{patch.name} is half applied or its files are foreign in {self.root}:{detail}", rule=rule, hint=hint)


def _require_folder(site_packages: Path) -> None:
    if not site_packages.is_dir():
        raise PatchError(f"{site_packages} is not a folder", rule="the folder of installed packages", hint="pass --site-packages DIR")


def _normal(name: str) -> str:
    return name.lower().replace("_", "-").replace(".", "-")


def _hash_of(path: Path) -> str:
    try:
        return hashlib.sha256(path.read_bytes()).hexdigest()
    except FileNotFoundError:
        return ABSENT


def apply(site_packages: Path, series: Series, names: Collection[str], *, dry_run: bool = False) -> list[str]:
    """Add these patches to whatever is applied; all or nothing. The changed relative paths, none if all are in already.

    PatchError: wrong version, unknown state, missing requirement, an unwritable folder, a lock held for 60 s.
    """
    return _move(site_packages, series, names, add=True, dry_run=dry_run)


def revert(site_packages: Path, series: Series, names: Collection[str], *, dry_run: bool = False) -> list[str]:
    """Take these patches out again; a patch that an applied one requires cannot go alone. Otherwise like apply."""
    return _move(site_packages, series, names, add=False, dry_run=dry_run)


def verify(site_packages: Path, series: Series, names: Collection[str]) -> dict[str, str]:
    """Prove that exactly these patches are applied: relative path -> observed hash; PatchError names what differs."""
    survey = _Survey(site_packages, series)
    wanted = series.closed(names)
    survey.require_known(wanted)
    extra = {p.name for p in series.patches if p.evidence and survey.state(p).state in ("applied", "unknown")} - set(names)
    missing = set(names) - survey.applied()
    if extra or missing:
        raise PatchError(
            f"{site_packages}: not applied: {', '.join(sorted(missing)) or 'none'}; applied or foreign, but not listed: "
            f"{', '.join(sorted(extra)) or 'none'}",
            rule=f"exactly {', '.join(sorted(names)) or 'no patch'}",
            hint="launch.py patch apply or revert",
        )
    return {f.path: survey.observed[f.path] for patch in wanted for f in survey.files(patch)}


def _move(site_packages: Path, series: Series, names: Collection[str], *, add: bool, dry_run: bool) -> list[str]:
    with contextlib.nullcontext() if dry_run else _locked(site_packages):
        if not dry_run:
            _recover(site_packages)
        survey = _Survey(site_packages, series)
        chosen = [series.patch(name) for name in names]
        survey.require_known(chosen)
        goal = survey.applied() | set(names) if add else survey.applied() - set(names)
        series.closed(goal)
        changes: dict[str, bytes | None] = {}
        for path in {f.path: None for patch in chosen for f in survey.files(patch)}:
            target = sum(patch.name in goal for patch, _ in survey.chain(path))
            if target != survey.position(path):
                changes[path] = _content(survey, path, target)
        if changes and not dry_run:
            _replace_all(site_packages, changes)
        return list(changes)


def _content(survey: _Survey, path: str, target: int) -> bytes | None:
    """The file with the first `target` patches of its chain, from the recorded original; None: no file."""
    chain, at = survey.chain(path), survey.position(path)
    assert at is not None
    stock = chain[0][1].before
    recorded = survey.root / STORE / "originals" / stock
    if stock == ABSENT or _hash_of(recorded) == stock:
        text = b"" if stock == ABSENT else recorded.read_bytes()
    else:
        text = (survey.root / path).read_bytes()
        for patch, f in reversed(chain[:at]):
            text = unidiff.patched(text, patch.hunks[f.text_of or f.path], reverse=True)
            _check_text(text, f.before, patch, path)
    for patch, f in chain[:target]:
        text = unidiff.patched(text, patch.hunks[f.text_of or f.path])
        _check_text(text, f.after, patch, path)
    return None if target == 0 and stock == ABSENT else text


def _check_text(text: bytes, wanted: str, patch: Patch, path: str) -> None:
    got = hashlib.sha256(text).hexdigest() if text or wanted != ABSENT else ABSENT
    if got != wanted:
        raise PatchError(
            f"{patch.name} gives {path} the hash {got}, series.yaml says {wanted}",
            rule="patch file and series.yaml agree",
            hint="restore both from git",
        )


@contextlib.contextmanager
def _locked(site_packages: Path, wait_s: float = 60.0) -> Iterator[None]:
    _require_folder(site_packages)
    try:
        (site_packages / STORE / "originals").mkdir(parents=True, exist_ok=True)
        handle = (site_packages / STORE / "lock").open("w")
    except OSError as e:
        raise PatchError(
            f"{site_packages} cannot be written: {e}",
            rule="apply and revert need write access",
            hint="patch when the image is built",
        ) from None
    with handle:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise PatchError(
                        f"{handle.name} is held by another process",
                        rule=f"free within {wait_s:g} s",
                        hint="wait for the other apply to end",
                    ) from None
                time.sleep(0.05)
        yield


def _replace_all(root: Path, changes: dict[str, bytes | None]) -> None:
    """Write new files beside the old ones and rename them over: a hard link in a package cache keeps the old bytes."""
    store = root / STORE
    journal = store / "journal.json"
    old = {path: (root / path).read_bytes() if (root / path).exists() else None for path in changes}
    done: list[str] = []
    try:
        for text in old.values():
            if text is not None:
                _write(store / "originals" / hashlib.sha256(text).hexdigest(), text)
        moves = {path: [_digest(old[path]), _digest(text)] for path, text in changes.items()}
        _write(journal, json.dumps(moves).encode())
        for path, text in changes.items():
            done.append(path)
            _put(root / path, text)
    except OSError as e:
        for path in done:
            _put(root / path, old[path])
        journal.unlink(missing_ok=True)
        raise PatchError(
            f"{root} cannot be written: {e}",
            rule="all files or none; the old ones are back",
            hint="free space, or get write access",
        ) from None
    journal.unlink()


def _recover(root: Path) -> None:
    """Undo an apply that was killed half way, from its journal and the recorded originals."""
    journal = root / STORE / "journal.json"
    if not journal.exists():
        return
    for path, (before, after) in json.loads(journal.read_text()).items():
        observed = _hash_of(root / path)
        if observed not in (before, after):
            raise PatchError(
                f"{path} is {observed} after an interrupted apply",
                rule=f"{before} or {after}",
                hint=f"reinstall the package and remove {journal}",
            )
        if observed != before:
            _put(root / path, None if before == ABSENT else (root / STORE / "originals" / before).read_bytes())
    journal.unlink()


def _digest(text: bytes | None) -> str:
    return ABSENT if text is None else hashlib.sha256(text).hexdigest()


def _put(path: Path, text: bytes | None) -> None:
    """The file with this content, or no file; its byte-code caches go, for they may be of the unchecked kind."""
    if text is None:
        path.unlink(missing_ok=True)
    else:
        _write(path, text, path.stat().st_mode & 0o7777 if path.exists() else 0o644)
    for cached in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
        cached.unlink(missing_ok=True)


def _write(path: Path, text: bytes, mode: int = 0o644) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(mode)
        Path(temporary).replace(path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise


def site_packages_of(python: Path) -> Path:
    """The site-packages folder of the virtual environment of a Python; PatchError when it is none, or has not exactly one."""
    rule = "bin/python of a virtual environment, as in .envs/engine-stock/bin/python"
    if not python.is_file():
        what = "is a folder" if python.is_dir() else "does not exist"
        hint = "correct the path, or run `make setup`, which makes the environments of this machine"
        raise PatchError(f"{python} {what}", rule=rule, hint=hint)
    found = sorted(Path(os.path.abspath(python)).parent.parent.glob("lib/python3*/site-packages"))  # noqa: PTH100 - links are kept
    if len(found) != 1:
        raise PatchError(
            f"{python} is not the Python of a virtual environment: {len(found)} lib/python3*/site-packages beside its bin",
            rule=rule,
            hint="python -m pdlaunch.patching VERB --site-packages DIR takes any folder of installed packages",
        )
    return found[0]


def main(arguments: list[str] | None = None) -> int:
    """`python -m pdlaunch.patching`: the same verbs where launch.py's requirements are not installed (image builds)."""
    parser = argparse.ArgumentParser(prog="python -m pdlaunch.patching")
    parser.add_argument("verb", choices=["status", "apply", "revert", "verify"])
    parser.add_argument("names", nargs="*", help="patch names")
    parser.add_argument("--site-packages", type=Path, required=True)
    parser.add_argument("--series", type=Path, default=Path(__file__).parent.parent / "patches" / "series.yaml")
    parser.add_argument("--dry-run", action="store_true")
    options = parser.parse_args(arguments)
    try:
        series = load_series(options.series)
        if options.verb == "status":
            chosen = {series.patch(name).name for name in options.names}
            states = [found for found in status(options.site_packages, series) if not chosen or found.name in chosen]
            for found in states:
                print(f"{found.state:13} {found.name} ({found.installed or 'not installed'})")
            return EXIT_VERDICT if any(found.state == "unknown" for found in states) else EXIT_OK
        if options.verb == "verify":
            for path, observed in verify(options.site_packages, series, options.names).items():
                print(f"{observed}  {path}")
            return EXIT_OK
        if not options.names:
            raise PatchError(f"{options.verb}: no patch is named", rule=f"names behind {options.verb}", hint="status lists them")
        move = apply if options.verb == "apply" else revert
        changed = move(options.site_packages, series, options.names, dry_run=options.dry_run)
        for path in changed:
            print(f"{'would change' if options.dry_run else 'changed'} {path}")
        if not changed:
            is_not = "" if options.verb == "apply" else "not "
            print(f"nothing to change: {', '.join(options.names)} {'is' if len(options.names) == 1 else 'are'} {is_not}applied")
        return EXIT_OK
    except LaunchError as e:
        print(e, file=sys.stderr)
        return e.exit_code


if __name__ == "__main__":
    sys.exit(main())
