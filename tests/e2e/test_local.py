"""Whole runs on this machine with the real parts: etcd, NATS, Dynamo, vLLM, NIXL over UCX, AIPerf."""

from __future__ import annotations

import json
import signal
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
