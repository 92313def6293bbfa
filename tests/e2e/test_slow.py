"""Runs that take long on two cores: `make test-slow`."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.e2e import runs

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2400)]


@pytest.mark.parametrize("recipe", ["tiny-p4d8", "tiny-p4d8-hybrid"])
def test_the_head_counts_of_gemma4_31b_from_tp4_to_tp8(tmp_path: Path, recipe: str) -> None:
    """Twelve engine processes and a control: recall, token-for-token agreement with aggregated serving, bytes as the geometry says."""
    run = runs.run_here(recipe, tmp_path)
    assert run.verdict()["verdict"] == "VALID", run.explain()
    assert run.evidence("agreement.equal") == run.evidence("agreement.compared") == 12, run.explain()
    assert run.evidence("transfer.decode.total.bytes") == run.evidence("transfer.decode.total.predicted_bytes") > 0, run.explain()
    assert runs.processes_with(str(tmp_path)) == []


def test_an_interrupted_engine_with_two_ranks_leaves_no_shared_memory(tmp_path: Path) -> None:
    """Workers that die together leave vLLM's vllm_dist_* files, which only the wrapper of the rank removes."""
    before = runs.shared_memory()
    run, _ = runs.interrupt_at("tiny-p1d2", tmp_path, "first_token")
    assert run.verdict()["verdict"] == "INCOMPLETE", run.explain()
    removed = json.loads((run.folder / "nodes" / "decode-0.json").read_text(encoding="utf-8"))["removed"]["shm"]
    assert any(name.startswith("vllm_dist_") for name in removed), removed
    assert runs.shared_memory() - before == set()
    assert runs.processes_with(str(tmp_path)) == []
