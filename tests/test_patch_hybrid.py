"""The per-group patch under vLLM's own connector and scheduler classes: patches/tests/test_hybrid_*.py in the engine environment."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.envs import PER_GROUP, PER_REGION, engine_python
from tests.test_patch_matrix import FILES as PER_REGION_FILES
from tests.test_patch_matrix import LIMIT_S, run_pytest

pytestmark = pytest.mark.engine
FILES = {"test_hybrid_bytes": 34, "test_hybrid_refusals": 46, "test_hybrid_mutations": 7}


@pytest.mark.timeout(LIMIT_S + 60)
def test_hybrid_manager_on(tmp_path: Path) -> None:
    suite = run_pytest(engine_python([PER_REGION, PER_GROUP]), [f"{name}.py" for name in FILES], tmp_path / "report.xml")
    ran = Counter(str(case.get("classname")).split(".")[-1] for case in suite.iter("testcase"))
    assert {name: ran[name] for name in FILES if ran[name] < FILES[name]} == {}


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_patch_below_keeps_its_matrix(tmp_path: Path) -> None:
    """All that the per-region patch does must hold with this one on top, except that it refuses the pairs with the manager on."""
    names = [f"{name}.py" for name in PER_REGION_FILES if name != "test_refusals"]
    run_pytest(engine_python([PER_REGION, PER_GROUP]), names, tmp_path / "report.xml")


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("patches", [[], [PER_REGION, PER_GROUP]], ids=["stock", "both patches"])
def test_padded_pages_between_tp_sizes(tmp_path: Path, patches: list[str]) -> None:
    """The measurement behind check's rule padded-pages: the request ends as usual and the bytes are wrong."""
    suite = run_pytest(engine_python(patches), ["test_padded_pages.py"], tmp_path / "report.xml")
    assert len(list(suite.iter("testcase"))) == 6
