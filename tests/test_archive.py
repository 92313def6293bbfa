"""Archived runs: found by name, and any changed, missing or added byte is seen; the verdict is judged again from the files."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest

import launch
from pdlaunch import archive
from pdlaunch.bundle import sha256_of
from pdlaunch.console import shown
from pdlaunch.errors import ArchiveError
from pdlaunch.node import finish
from pdlaunch.node.spec import load_spec
from tests.golden_cases import ROOT
from tests.runfactory import write_run


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run whose evidence, verdict and manifest were made by the node's own code."""
    folder = write_run(tmp_path / "results")
    finish.judge(folder, "")
    finish.write_manifest(load_spec(folder / "spec.json"), folder, "")
    return folder


def test_an_untouched_run_is_intact(run: Path) -> None:
    found = archive.verify(run)
    assert found.intact, found.lines()
    assert found.files == len([p for p in run.rglob("*") if p.is_file()]) - 1
    assert found.verdict in ("VALID", "INVALID")


REFERENCE = sorted(spec.parent for spec in (ROOT / "results" / "reference").glob("*/*/spec.json"))


@pytest.mark.parametrize("folder", REFERENCE, ids=lambda r: r.parent.name)
def test_the_committed_runs_are_intact(folder: Path) -> None:
    """After a change of words in the verdict: judge them again with benchmarks/gpu/reduce_run.py."""
    found = archive.verify(folder)
    assert found.intact, found.lines()


def test_a_changed_byte_of_any_file_is_found(run: Path) -> None:
    files = [p for p in sorted(run.rglob("*")) if p.is_file()]
    assert {"spec.json", "manifest.json", "events.jsonl", "verdict.json", "evidence.json"} <= {p.name for p in files}
    for path in files:
        before = path.read_bytes()
        for at in sorted({0, len(before) // 2, len(before) - 1} - {-1}):
            path.write_bytes(before[:at] + bytes([before[at] ^ 1]) + before[at + 1 :])
            try:
                intact = archive.verify(run).intact
            except ArchiveError:
                intact = False
            assert not intact, f"{path.name} at {at}"
        path.write_bytes(before)
    assert archive.verify(run).intact


def test_missing_added_and_linked_files_are_found(run: Path) -> None:
    (run / "more.txt").write_text("x", encoding="utf-8")
    (run / "logs").mkdir(exist_ok=True)
    events = run / "events.jsonl"
    kept = events.read_bytes()
    events.unlink()
    found = archive.verify(run)
    assert found.foreign == ("more.txt",)
    assert found.missing == ("events.jsonl",)
    assert {"not in the manifest: more.txt", "missing: events.jsonl"} <= set(found.lines())
    outside = run.parent / "elsewhere"
    outside.write_bytes(kept)
    events.symlink_to(outside)
    assert archive.verify(run).changed == ("events.jsonl",)


def test_an_extra_file_is_named_and_the_verdict_is_not_shown_as_proven(run: Path) -> None:
    stored = archive.read(run).verdict
    assert archive.verify(run).table(run)["verdict"] == stored
    (run / "notes.txt").write_text("x", encoding="utf-8")
    table = archive.verify(run).table(run)
    assert (table["intact"], table["verdict"], table["stored_verdict"]) == (False, "NOT VERIFIED", stored)
    assert table["differences"] == ["not in the manifest: notes.txt"]
    lines = shown(table, "table").splitlines()
    assert not any("VALID" in line for line in lines if line.startswith("verdict"))
    assert lines[-1].split(None, 1) == ["differences", "not in the manifest: notes.txt"]


def test_a_run_that_cannot_be_judged_is_a_message(run: Path) -> None:
    for text in ("[]", "{", '{"schema": 1}'):
        for name in ("evidence.json", "verdict.json"):
            kept = {path: path.read_bytes() for path in (run / name, run / "manifest.json")}
            (run / name).write_text(text, encoding="utf-8")
            manifest = json.loads(kept[run / "manifest.json"])
            manifest["files"][name] = sha256_of(run / name)
            (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
            with pytest.raises(ArchiveError):
                archive.verify(run)
            for path, data in kept.items():
                path.write_bytes(data)


def test_a_verdict_that_was_written_by_hand_is_found(run: Path) -> None:
    """Verdict and manifest changed together, so that every hash fits: judging again tells."""
    path = run / "verdict.json"
    verdict = json.loads(path.read_text(encoding="utf-8"))
    word = "INVALID" if verdict["verdict"] == "VALID" else "VALID"
    path.write_text(json.dumps({**verdict, "verdict": word, "line": f"{word}  by hand"}, indent=1) + "\n", encoding="utf-8")
    finish.write_manifest(load_spec(run / "spec.json"), run, "")
    found = archive.verify(run)
    assert not found.changed
    assert any("judged again" in line for line in found.lines())


def test_evidence_that_was_written_by_hand_is_found(run: Path) -> None:
    path = run / "evidence.json"
    evidence = json.loads(path.read_text(encoding="utf-8"))
    name = next(n for n, v in evidence["values"].items() if isinstance(v["value"], int) and not isinstance(v["value"], bool))
    evidence["values"][name]["value"] += 1
    path.write_text(json.dumps(evidence, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    finish.write_manifest(load_spec(run / "spec.json"), run, "")
    assert any(line.startswith(f"evidence {name}:") for line in archive.verify(run).lines())


def test_a_run_that_was_cut_off_is_no_archive(run: Path) -> None:
    (run / "manifest.json").unlink()
    with pytest.raises(ArchiveError, match="the manifest is written last"):
        archive.verify(run)
    (run / "manifest.json").write_text('{"schema": 1, "fi', encoding="utf-8")
    with pytest.raises(ArchiveError, match="is damaged"):
        archive.verify(run)
    (run / "manifest.json").write_text('{"schema": 9}', encoding="utf-8")
    with pytest.raises(ArchiveError, match="not a manifest of this project"):
        archive.verify(run)


def test_runs_are_found_by_name_folder_and_last(tmp_path: Path) -> None:
    results = tmp_path / "results"
    old = write_run(results, job="20261019T120000Z-1")
    new = write_run(results, job="20261020T120000Z-2")
    assert [r.path for r in archive.runs(results)] == [old, new]
    assert archive.find("last", results) == new
    assert archive.find(old.name, results) == old
    assert archive.find(f"{old.parent.name}/{old.name}", results) == old
    assert archive.find(str(old), Path("/none")) == old
    with pytest.raises(ArchiveError, match="0 runs are called 'x'"):
        archive.find("x", results)
    with pytest.raises(ArchiveError, match="is no run"):
        archive.find(str(results), results)
    (new / "verdict.json").unlink()
    assert archive.read(new).verdict == "UNFINISHED"


def test_a_changed_run_is_not_planned_against(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    run = tmp_path / REFERENCE[0].parent.name / REFERENCE[0].name
    shutil.copytree(REFERENCE[0], run)
    monkeypatch.setattr(sys, "argv", ["launch.py", "plan", "--run", str(run)])
    assert launch.main() == 0
    log = run / "recall" / "more.jsonl"
    log.parent.mkdir(exist_ok=True)
    log.write_text("{}\n", encoding="utf-8")
    assert launch.main() == 2
    (run / "manifest.json").unlink()
    assert launch.main() == 0
