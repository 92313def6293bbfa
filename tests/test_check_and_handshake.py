"""`check` and the handshake of vLLM with both patches are asked about the same pairs: none may pass the first and be refused by the
second, which would be seen only after minutes of a booked job."""

from __future__ import annotations

import json
import subprocess
from functools import cache
from typing import Any

import pytest

from pdlaunch.planner.compat import check_roles
from pdlaunch.planner.families import read_model
from pdlaunch.planner.pair import PER_GROUP_PATCH, PER_REGION_PATCH
from pdlaunch.planner.shape import RoleShape
from tests.envs import PER_GROUP, PER_REGION, engine_python
from tests.test_patch_matrix import LIMIT_S, TESTS

pytestmark = [pytest.mark.engine, pytest.mark.timeout(LIMIT_S + 60)]
BOTH = frozenset({PER_REGION_PATCH, PER_GROUP_PATCH})
Pair = tuple[str, bool, int, int, int, int]


@cache
def handshakes() -> list[dict[str, Any]]:
    command = [str(engine_python([PER_REGION, PER_GROUP])), "dump_refusals.py"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return list(json.loads(done.stdout))


@cache
def asked() -> dict[Pair, tuple[str, dict[str, str]]]:
    """(model, manager, prefill block, decode block, P, D) -> the handshake's refusal or '', and the errors of check by code."""
    found: dict[Pair, tuple[str, dict[str, str]]] = {}
    for case in handshakes():
        model = read_model(case["config"])
        for p, d, refusal in case["pairs"]:
            shape = RoleShape(max_model_len=case["tokens"], backend="FLASH_ATTN", dtype="bfloat16", hybrid_manager=case["manager"])
            sides = [shape.with_changes(block_size=size, tensor_parallel=tp) for size, tp in zip(case["blocks"], (p, d), strict=True)]
            errors = {f.code: f.message for f in check_roles(model, *sides, BOTH) if f.severity == "error"}
            found[case["model"], case["manager"], *case["blocks"], p, d] = refusal, errors
    return found


def of(heads: tuple[int, int], p: int, d: int) -> tuple[str, dict[str, Any]]:
    (found,) = [
        said
        for (model, manager, prefill, decode, *tp), said in asked().items()
        if model.startswith(f"Geometry(sliding_heads={heads[0]}, global_heads={heads[1]},")
        and "global_head_dim=64" in model
        and (manager, prefill, decode, tp) == (True, 64, 64, [p, d])
    ]
    return found


def test_what_the_handshake_refuses_check_refuses() -> None:
    refused = [pair for pair, (refusal, _) in asked().items() if refusal]
    assert len(refused) > 200
    assert [pair for pair in refused if not asked()[pair][1]] == []


def test_what_the_handshake_takes_check_takes() -> None:
    """Two rules of check are stricter than the handshake: block sizes that differ by recipe, and, with the hybrid manager on, copies of
    heads above decode's TP, of which one pair has groups that happen to be alike."""
    stricter = [set(errors) for refusal, errors in asked().values() if errors and not refusal]
    assert len(asked()) - len(stricter) > 500
    assert [codes for codes in stricter if not codes <= {"block-size", "prefill-replicates"}] == []
    copies = [pair for pair, (refusal, errors) in asked().items() if not refusal and "prefill-replicates" in errors]
    assert [manager for _, manager, *_ in copies] == [True]


@pytest.mark.parametrize(
    ("heads", "p", "d"), [((16, 4), 8, 16), ((16, 4), 4, 16), ((16, 4), 4, 32), ((8, 2), 4, 8), ((4, 1), 1, 4)], ids=str
)
def test_larger_blocks_at_decode_are_named_by_both(heads: tuple[int, int], p: int, d: int) -> None:
    refusal, errors = of(heads, p, d)
    assert "local blocks of 128 tokens do not divide remote blocks of 64" in refusal
    assert list(errors) == ["page-layout"]
    assert "sliding layers have blocks of 64 tokens at prefill and 128 at decode" in errors["page-layout"]


def test_a_rule_that_is_left_out_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pdlaunch.planner.compat.CHECKS", ())
    asked.cache_clear()
    try:
        assert [pair for pair, (refusal, errors) in asked().items() if refusal and not errors]
    finally:
        asked.cache_clear()


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (4, 8)])
def test_padded_pages_between_tp_sizes(p: int, d: int) -> None:
    """24 x 32 and 8 x 64: no whole number of global pages fills a sliding one, so vLLM pads them. Stock then cuts heads out of the padded
    length: the handshake passes, every request ends as usual, and the global layers get wrong bytes. Equal TP is right."""
    config = json.loads(json.dumps(handshakes()[0]["config"]))
    config |= {"num_attention_heads": 48, "num_key_value_heads": 24}
    for layer in config["per_layer_config"].values():
        layer["num_key_value_heads"] = 8
    shape = RoleShape(max_model_len=1280, backend="FLASH_ATTN", dtype="bfloat16", hybrid_manager=True, block_size=64)
    found = check_roles(read_model(config), shape.with_changes(tensor_parallel=p), shape.with_changes(tensor_parallel=d), frozenset())
    assert [f.code for f in found if f.severity == "error"] == ["padded-pages"]
