"""A wrong KV cache must show: damage to the global layer, or to any one sliding layer, leaves at most two of nine codes."""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

import pytest

from tests.envs import engine_python

ROOT = Path(__file__).parents[1]
MODELS = ["gemma4-recall-4x1", "gemma4-recall-16x4"]
REQUIRED = ["zero", "shift +1 block", "shift -1 block", "swap", "first rank twice", "exchange K and V"]
SLIDING, GLOBAL = range(5), 5

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@functools.cache
def measured(name: str) -> dict:
    command = [str(engine_python([])), "-m", "models.recall_damage", str(ROOT / "models" / name), "--tokens", "800"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=850, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", MODELS)
def test_an_intact_cache_gives_nine_of_nine(name: str) -> None:
    assert measured(name)["intact"] == 9


@pytest.mark.parametrize("damage", REQUIRED)
@pytest.mark.parametrize("name", MODELS)
def test_a_damaged_global_layer_loses_recall(name: str, damage: str) -> None:
    assert measured(name)["right"][damage][GLOBAL] <= 2


@pytest.mark.parametrize("damage", REQUIRED)
@pytest.mark.parametrize("name", MODELS)
def test_one_damaged_sliding_layer_loses_recall_whichever_it_is(name: str, damage: str) -> None:
    by_layer = measured(name)["right"][damage]
    assert [layer for layer in SLIDING if by_layer[layer] > 2] == []


@pytest.mark.parametrize("name", MODELS)
def test_agreement_on_another_question_sees_what_recall_misses(name: str) -> None:
    """Every code but the asked one is lost from the global layer: recall stays right, the answer about another place does not."""
    seen = measured(name)["other_codes_lost"]
    assert seen["recall"] >= 8
    assert seen["other_question_right"] == 9
    assert seen["agreeing"] <= 2
