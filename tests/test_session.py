"""The steps behind the verbs: what a path on the command line may be, and how paths are shown."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pdlaunch import local, session
from pdlaunch.node.output import as_typed
from tests.golden_cases import ROOT
from tests.test_local import make_bundle


def test_a_bundle_may_be_named_from_the_current_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    made, run = make_bundle(tmp_path), tmp_path / "run"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(local, "new_run_dir", lambda bundle: run)
    monkeypatch.setattr("pdlaunch.bundle.require_whole", lambda folder: None)
    assert session.submit_folder(Path(made.name), say=print, live=False) == 0
    assert f"--spec {made}/spec.json" in capfd.readouterr().out


def test_paths_below_the_current_folder_are_shown_relative(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert session.shown(tmp_path / "results" / "x") == Path("results/x")
    assert session.shown(ROOT / "results") == ROOT / "results"


def test_the_supervisor_names_its_archive_as_seen_from_the_launcher(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert as_typed(f"{tmp_path}/results/x", os.getpid()) == "results/x"
    assert as_typed(f"{tmp_path}/results/x", 0) == f"{tmp_path}/results/x"
    assert as_typed("none; the run was interrupted", os.getpid()) == "none; the run was interrupted"
    assert as_typed(f"{tmp_path}-other/x", os.getpid()) == f"{tmp_path}-other/x"
