"""Archived runs: find them, read them, and verify one: every byte as it was written, and the verdict that its evidence gives."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch import manifest as manifests
from pdlaunch.errors import ArchiveError
from pdlaunch.manifest import MANIFEST
from pdlaunch.node.contracts import Evidence, Verdict
from pdlaunch.node.spec import Spec, SpecError, load_spec


@dataclass(frozen=True)
class ArchivedRun:
    path: Path
    recipe: str
    verdict: str
    """VALID, INVALID, INCOMPLETE, or UNFINISHED when the folder has no verdict."""
    line: str

    @property
    def name(self) -> str:
        return f"{self.recipe}/{self.path.name}"


def runs(results: Path) -> list[ArchivedRun]:
    """Every run below results/<recipe>/, oldest first; a folder without spec.json is not a run."""
    found = [read(spec.parent) for spec in results.glob("*/*/spec.json")]
    return sorted(found, key=lambda r: (r.path.name, r.recipe))


def read(path: Path) -> ArchivedRun:
    """ArchiveError when verdict.json is there and cannot be read."""
    try:
        verdict = Verdict.read(path / "verdict.json")
    except FileNotFoundError:
        return ArchivedRun(path, path.parent.name, "UNFINISHED", "the run has no verdict")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
        raise ArchiveError(f"{path / 'verdict.json'}: {e}", rule="written by this project") from None
    return ArchivedRun(path, path.parent.name, verdict.verdict, verdict.line)


def find(name: str, results: Path) -> Path:
    """A run by its folder, by <recipe>/<folder name>, by folder name alone, or `last`; ArchiveError when none or several fit."""
    direct = Path(name)
    for candidate in (direct, results / name):
        if (candidate / "spec.json").is_file():
            return candidate
    if direct.is_dir() and name not in (".", ".."):
        raise ArchiveError(f"{name} is no run", rule="a folder with spec.json, events.jsonl, evidence.json, verdict.json and manifest.json")
    known = runs(results)
    fits = known[-1:] if name == "last" else [r for r in known if r.path.name == name]
    if len(fits) != 1:
        recent = ", ".join(r.name for r in known[-5:]) or "none"
        raise ArchiveError(f"{len(fits)} runs are called {name!r}", rule=f"runs of {results}: {recent}", hint="launch.py runs")
    return fits[0].path


@dataclass(frozen=True)
class Verification:
    changed: tuple[str, ...]
    missing: tuple[str, ...]
    foreign: tuple[str, ...]
    judged: tuple[str, ...]
    """Differences between the stored evidence, verdict or manifest and what the files of the run give now."""
    verdict: str
    files: int

    @property
    def intact(self) -> bool:
        return not (self.changed or self.missing or self.foreign or self.judged)

    def lines(self) -> list[str]:
        out = [
            f"{what}: {name}"
            for what, names in (("changed", self.changed), ("missing", self.missing), ("not in the manifest", self.foreign))
            for name in names
        ]
        return out + list(self.judged)

    def table(self, run: Path) -> dict[str, Any]:
        """verdict is the run's only while the folder is intact: what was changed afterwards proves nothing."""
        found: dict[str, Any] = {"run": str(run), "intact": self.intact, "files": self.files}
        if self.intact:
            return found | {"verdict": self.verdict}
        return found | {"verdict": "NOT VERIFIED", "stored_verdict": self.verdict or "not read", "differences": self.lines()}


def verify(run: Path) -> Verification:
    """Check every file against manifest.json; when all fit, judge again offline. ArchiveError when the folder is not a finished run."""
    manifest = manifests.read(run)
    named: dict[str, str] = manifest["files"]
    found = manifests.differences(run, named)
    if found.changed or found.missing:
        return Verification(found.changed, found.missing, found.foreign, (), "", len(named))
    try:
        judged = tuple(_judge_again(run, manifest, foreign=bool(found.foreign)))
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError) as e:
        raise ArchiveError(
            f"{run} cannot be judged again: {e!r}", rule="files as this version of the project writes them", hint="launch.py status RUN"
        ) from None
    return Verification((), (), found.foreign, judged, read(run).verdict, len(named))


def _judge_again(run: Path, manifest: dict[str, Any], *, foreign: bool) -> list[str]:
    """Evidence, verdict and manifest as the files of the run give them now, against what is stored.

    foreign: files lie there that the manifest does not name, so its text must differ and says nothing more.
    """
    from pdlaunch.node import evidence, finish, verdict

    try:
        spec: Spec = load_spec(run / "spec.json")
    except SpecError as e:
        raise ArchiveError(f"{run / 'spec.json'}: {e}", rule="written by this version of the project") from None
    ended = str(manifest.get("ended", ""))
    now, stored = evidence.collect(spec, run), Evidence.read(run / "evidence.json")
    out = [
        f"evidence {name}: stored {stored.get(name)!r}, the files give {now.get(name)!r}"
        for name in sorted(set(now.values) | set(stored.values))
        if now.values.get(name) != stored.values.get(name)
    ]
    judged, kept = verdict.judge(spec, now, ended), Verdict.read(run / "verdict.json")
    if (judged.verdict, judged.line, judged.reasons, judged.checks) != (kept.verdict, kept.line, kept.reasons, kept.checks):
        out.append(f"verdict: stored {kept.line!r}, judged again {judged.line!r}")
    if not foreign and _text(finish.manifest(spec, run, ended)) != (run / MANIFEST).read_text(encoding="utf-8"):
        out.append(f"{MANIFEST}: its text is not what the files of the run give")
    return out


def _text(value: Any) -> str:
    """As node.contracts.write_json writes it."""
    return json.dumps(value, indent=1, ensure_ascii=False, sort_keys=False) + "\n"
