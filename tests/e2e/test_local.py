"""Whole runs on this machine with the real parts: etcd, NATS, Dynamo, vLLM, NIXL over UCX, AIPerf."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = pytest.mark.stack


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> object:
    before = runs.shared_memory()
    yield None
    assert runs.processes_with(str(tmp_path)) == []
    assert runs.shared_memory() - before == set()


def test_mixed_heads_with_the_patch_arrive_intact(tmp_path: Path) -> None:
    run = runs.run_here("tiny-p1d2", tmp_path)
    assert run.exit_code == 0, run.explain()
    assert run.verdict()["verdict"] == "VALID", run.explain()
    for when in ("before", "during", "after"):
        assert run.evidence(f"recall.{when}.correct") == 9, run.explain()
    moved, predicted = run.evidence("transfer.decode.total.bytes"), run.evidence("transfer.decode.total.predicted_bytes")
    assert moved == predicted and moved > 0, run.explain()
    verified = runs.launch("verify", str(run.folder), "--format", "json")
    assert verified.returncode == 0, verified.stdout + verified.stderr

    evidence = run.folder / "evidence.json"
    evidence.write_text(evidence.read_text().replace('"value": 9', '"value": 8', 1))
    changed = runs.launch("verify", str(run.folder))
    assert changed.returncode == 1
    assert "evidence.json" in changed.stdout


def test_mixed_heads_on_stock_are_invalid_and_the_assertion_is_quoted(tmp_path: Path) -> None:
    run = runs.run_here("tiny-p1d2-stock", tmp_path)
    assert run.exit_code == 1, run.explain()
    verdict = run.verdict()
    assert verdict["verdict"] == "INVALID", run.explain()
    assert run.evidence("recall.before.correct") == 0, run.explain()
    assert any("SPLIT region" in reason for reason in verdict["reasons"]), run.explain()
    assert "0 of 9" in verdict["reasons"][0], run.explain()


def test_decode_below_prefill_with_the_patch(tmp_path: Path) -> None:
    run = runs.run_here("tiny-p2d1", tmp_path)
    assert run.verdict()["verdict"] == "VALID", run.explain()
    assert run.evidence("transfer.decode.total.bytes") == run.evidence("transfer.decode.total.predicted_bytes") > 0, run.explain()


def test_aggregated(tmp_path: Path) -> None:
    run = runs.run_here("tiny-agg", tmp_path)
    assert run.verdict()["verdict"] == "VALID", run.explain()


def test_a_run_whose_text_was_not_checked_says_so(tmp_path: Path) -> None:
    run = runs.run_here("mocker-p1d1", tmp_path)
    verdict = run.verdict()
    assert verdict["text_checked"] is False
    assert "not checked" in verdict["line"].lower(), run.explain()
    assert "recall 9" not in verdict["line"]


@pytest.mark.parametrize("stage", ["control_plane", "engines_started", "first_token", "load"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupted_run_is_archived_as_incomplete(tmp_path: Path, stage: str, signum: int) -> None:
    run, took_s = runs.interrupt_at("mocker-p1d1", tmp_path, stage, signum)
    assert run.exit_code == 130, run.explain()
    assert run.verdict()["verdict"] == "INCOMPLETE", run.explain()
    assert took_s < 60
    assert json.loads((run.folder / "manifest.json").read_text())["files"]


ENDLESS = ("load.0.requests=100000",)


def assert_stopped(run: runs.Run, reason: str) -> None:
    """Archived as INCOMPLETE with this reason, its page beside it, its temporary folder gone."""
    assert run.verdict()["verdict"] == "INCOMPLETE", run.explain()
    assert run.verdict()["reasons"][0].startswith(f"the run did not reach its end: interrupted by {reason} "), run.explain()
    assert runs.launch("verify", str(run.folder)).returncode == 0, run.explain()
    assert run.folder.with_name(f"{run.folder.name}.html").is_file(), run.explain()
    assert not run.tmp_dir().exists()


def test_a_reader_that_leaves_after_four_lines_changes_nothing(tmp_path: Path) -> None:
    started = runs.Started("mocker-p1d1", tmp_path, output=subprocess.PIPE)
    assert started.child.stdout is not None
    said = [started.child.stdout.readline() for _ in range(4)]
    assert said[3].startswith(b"["), said
    started.child.stdout.close()
    run = started.end(240)
    assert (run.exit_code, run.verdict()["verdict"]) == (0, "VALID"), run.explain()
    assert not run.tmp_dir().exists()


@pytest.mark.parametrize("stage", ["engines_started", "load"])
def test_an_interrupt_for_the_command_and_its_reader_at_once(tmp_path: Path, stage: str) -> None:
    """Ctrl-C behind `| tee`: the reader dies of it, then the run has nobody to tell that it stops."""
    started = runs.Started("mocker-p1d1", tmp_path, *ENDLESS, output=subprocess.PIPE)
    assert started.child.stdout is not None
    started.wait_for(stage)
    started.child.stdout.close()
    os.killpg(started.child.pid, signal.SIGINT)
    run = started.end(60)
    assert run.exit_code == 130
    assert_stopped(run, "SIGINT")


@pytest.mark.parametrize("stage", ["engines_started", "load"])
def test_a_launcher_that_is_killed_stops_the_run(tmp_path: Path, stage: str) -> None:
    started = runs.Started("mocker-p1d1", tmp_path, *ENDLESS)
    started.wait_for(stage)
    started.child.kill()
    run = started.end(10)
    assert run.exit_code == -signal.SIGKILL
    deadline = time.monotonic() + 30
    while runs.processes_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert_stopped(run, "the end of launch.py")


def test_what_a_killed_runner_and_launcher_leave_is_removed_by_the_next_run(tmp_path: Path) -> None:
    (tmp_path / "first").mkdir()
    (tmp_path / "second").mkdir()
    started = runs.Started("mocker-p1d1", tmp_path / "first", *ENDLESS)
    started.wait_for("load")
    runner = started.event("job_started")["pid"]
    os.kill(started.child.pid, signal.SIGSTOP)  # else it may hear of its runner's death before its own
    os.kill(runner, signal.SIGKILL)
    started.child.kill()
    left = started.end(10)
    deadline = time.monotonic() + 30
    while runs.processes_with(str(tmp_path)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert left.tmp_dir().is_dir()
    run = runs.run_here("mocker-p1d1", tmp_path / "second")
    assert run.exit_code == 0, run.explain()
    assert f"removed {left.tmp_dir()}, which a run that was killed had left" in run.output
    assert not left.tmp_dir().exists()
