"""vLLM 0.31.0's own functions against the planner, on random configurations of every family: equal exactly, or the test fails.

A disagreement is printed with the smallest configuration that hypothesis finds. See tests/planner/oracle_server.py for what is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.planner.oracle import Oracle, difference, planned
from tests.planner.strategies import FAMILIES, cases

pytestmark = pytest.mark.engine

EXAMPLES = 130  # for each family: 16 x 130 = 2,080 configurations


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    process = Oracle()
    yield process
    process.close()


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_planner_equals_vllm(oracle: Oracle, family: str) -> None:
    counts = {"accepted": 0, "refused": 0}

    @settings(
        max_examples=EXAMPLES,
        deadline=None,
        derandomize=True,
        database=None,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
    )
    @given(st.data())
    def compare(data: st.DataObject) -> None:
        config, shape, available = data.draw(cases(family))
        mine, theirs = planned(config, shape, available), oracle.ask(config, shape, available)
        counts["refused" if "refused" in theirs else "accepted"] += 1
        differs = difference(mine, theirs)
        assert not differs, f"vLLM {oracle.version} disagrees:\n{differs}"

    compare()
    assert sum(counts.values()) >= EXAMPLES
    assert counts["accepted"] >= EXAMPLES // 3, f"too few accepted configurations to mean anything: {counts}"
