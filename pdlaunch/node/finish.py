"""The end of a run folder: what was seen becomes evidence.json, evidence becomes verdict.json, and manifest.json names every file."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from .contracts import SCHEMA_VERSION, Verdict, write_json
from .node_facts import sha256
from .redact import Redactor
from .spec import Spec, load_spec, to_json

COPIED = ("spec.json", "recipe.yaml", "cluster.yaml", "job.sbatch", "submit.sh", "receipt.json")
BUNDLE_MANIFEST = "manifest.json"
_MAX_COPIED_BYTES = 4 << 20


def copy_bundle(bundle: Path, spec_path: Path, run_dir: Path, redactor: Redactor) -> None:
    """Copy the bundle's small files into the run folder; secrets in them are redacted."""
    sources = {name: bundle / name for name in COPIED} | {"spec.json": spec_path, "bundle_manifest.json": bundle / BUNDLE_MANIFEST}
    for name, source in sources.items():
        if source.is_file() and source.stat().st_size <= _MAX_COPIED_BYTES:
            text = source.read_text(encoding="utf-8")
            cleaned = redactor.text(text)
            if cleaned == text:
                shutil.copyfile(source, run_dir / name)
            else:
                (run_dir / name).write_text(cleaned, encoding="utf-8")


def judge(run_dir: Path, ended: str, write: bool = True) -> Verdict:
    """The verdict that the files of a run give; write: keep it and its evidence there. ended: '' for a run that reached its end."""
    from . import evidence, verdict

    spec = load_spec(run_dir / "spec.json")
    found = evidence.collect(spec, run_dir)
    judged = verdict.judge(spec, found, ended)
    if write:
        found.write(run_dir / "evidence.json")
        judged.write(run_dir / "verdict.json")
    return judged


def manifest(spec: Spec, run_dir: Path, ended: str) -> dict[str, Any]:
    """Content of manifest.json as the files of the run give it: sha256 of every other file, what served, what repeats the run."""
    files = {str(p.relative_to(run_dir)): sha256(p) for p in sorted(run_dir.rglob("*"))
             if p.is_file() and not p.is_symlink() and p != run_dir / "manifest.json"}
    path = run_dir / "bundle_manifest.json"
    bundle = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return {"schema": SCHEMA_VERSION, "ended": ended, "run": to_json(spec.run), "patches": list(spec.proof.patches),
            "engines": _engine_facts(run_dir), "bundle": bundle, "files": files}


def write_manifest(spec: Spec, run_dir: Path, ended: str) -> None:
    """The last file of a run; whoever finds it knows that the run was archived whole."""
    write_json(run_dir / "manifest.json", manifest(spec, run_dir, ended))


def _engine_facts(run_dir: Path) -> dict[str, Any]:
    found = {}
    for path in sorted((run_dir / "nodes").glob("*.json")):
        facts = json.loads(path.read_text(encoding="utf-8"))
        if "versions" in facts:
            found[path.stem] = {k: facts[k] for k in ("host", "python", "versions", "file_sha256", "environment") if k in facts}
    return found
