"""vLLM 0.31.0's own functions against the planner, on random configurations of every family: equal exactly, or the test fails.

A disagreement is printed with the smallest configuration that hypothesis finds. See tests/planner/oracle_server.py for what is vLLM's.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pdlaunch.planner.config import load_config
from pdlaunch.planner.shape import RoleShape
from tests.planner.models import CONFIGS, GEMMA4, model
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


def _askable(name: str) -> dict[str, Any]:
    """A committed config as the CPU build can construct it; nothing that decides the cache is changed."""
    config = load_config(GEMMA4 if name == "gemma-4-31b-it" else CONFIGS / f"{name}.json")
    for key in ("_source", "quantization_config"):
        config.pop(key, None)
    if name == "gemma-3-27b":  # without its vision tower, whose default width does not divide by 8
        return {**config["text_config"], "architectures": ["Gemma3ForCausalLM"], "dtype": "bfloat16"}
    if name == "gpt-oss-120b":  # experts that the CPU kernels accept at TP8
        return {**config, "intermediate_size": 4096}
    return config


PUBLIC = ["gemma-4-31b-it", *sorted(path.stem for path in CONFIGS.glob("*.json"))]


@pytest.mark.parametrize("tp", [1, 4, 8])
@pytest.mark.parametrize("name", PUBLIC)
def test_published_models_equal_vllm_at_full_size(oracle: Oracle, name: str, tp: int) -> None:
    """The committed configs, with an MTP head where there is one, 200 GiB for KV per rank."""
    public = model(name)
    shape = RoleShape(
        tensor_parallel=tp,
        dtype="bfloat16",
        backend="TRITON_MLA" if public.uses_mla else "FLASH_ATTN",
        speculative_tokens=len(public.drafter),
    )
    config, available = _askable(name), (200 << 30,)
    theirs = oracle.ask(config, shape, available)
    assert "refused" not in theirs
    assert not difference(planned(config, shape, available), theirs)
