"""Runs that take long on two cores: `make test-slow`."""

from __future__ import annotations

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
