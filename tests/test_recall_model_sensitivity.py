"""A wrong KV cache must show: damage to the global layer, or to any one sliding layer, leaves at most two of nine codes.

One damage does not, a shift of the global layer by one block: keys carry their rotary position and a global layer reads every slot, so it
does not matter in which slot a key lies. What shows is the one block that the shift pushes out of the cache; it is tested as it is.
"""

from __future__ import annotations

import functools
import json
import subprocess
from pathlib import Path

import pytest

from tests.envs import engine_python

ROOT = Path(__file__).parents[1]
MODELS = ["gemma4-recall-4x1", "gemma4-recall-16x4"]
SHIFTS = ["shift +1 block", "shift -1 block"]
HEADS = ["zero", "swap", "first rank twice"]
SLIDING, GLOBAL = range(5), 5

pytestmark = [pytest.mark.engine, pytest.mark.timeout(900)]


@functools.cache
def everything() -> dict[str, dict]:
    """What models.recall_damage measures: both models at once, a process and a core each."""
    python = str(engine_python([]))
    started = [
        subprocess.Popen(
            [python, "-m", "models.recall_damage", f"models/{name}", "--tokens", "800"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for name in MODELS
    ]  # fmt: skip
    seen = {}
    try:
        for name, process in zip(MODELS, started, strict=True):
            out, err = process.communicate(timeout=800)
            assert process.returncode == 0, err[-2000:]
            seen[name] = json.loads(out.splitlines()[-1])
    finally:
        for process in started:
            process.kill()
            process.communicate()
    return seen


@pytest.fixture(params=MODELS)
def seen(request: pytest.FixtureRequest) -> dict:
    return everything()[request.param]


def test_an_intact_cache_gives_nine_of_nine(seen: dict) -> None:
    assert (seen["prompts"], seen["intact"]) == (9, 9)
    assert seen["tokens"] >= 800


@pytest.mark.parametrize("damage", HEADS)
def test_a_global_layer_zeroed_or_with_wrong_heads_leaves_at_most_two_codes(seen: dict, damage: str) -> None:
    assert seen["right"][damage][GLOBAL] <= 2


@pytest.mark.parametrize("damage", [*HEADS, *SHIFTS, "exchange K and V"])
def test_one_damaged_sliding_layer_leaves_at_most_two_codes_whichever_it_is(seen: dict, damage: str) -> None:
    by_layer = seen["right"][damage]
    assert [layer for layer in SLIDING if by_layer[layer] > 2] == []


@pytest.mark.parametrize("damage", ["exchange K and V", "stale"])
def test_no_layer_is_unneeded_under_weaker_damage(seen: dict, damage: str) -> None:
    """K and V of the global layer come from one projection, and another request has the same kind of text before its question: both
    damages leave some of what is read, so more than two codes may survive, but no layer may leave all nine."""
    assert max(seen["right"][damage]) < 9


@pytest.mark.parametrize("damage", SHIFTS)
def test_a_shifted_global_layer_loses_the_codes_of_the_block_pushed_out_and_no_other(seen: dict, damage: str) -> None:
    shifted = seen["global_shift"][damage]
    assert shifted["wrong"] == shifted["pushed_out"]
    assert seen["right"][damage][GLOBAL] == 9 - len(shifted["pushed_out"])
    assert 7 <= seen["right"][damage][GLOBAL] <= 8


@pytest.mark.parametrize("damage", SHIFTS)
def test_recall_of_the_block_that_a_shift_pushes_out_is_lost(seen: dict, damage: str) -> None:
    shifted = seen["global_shift"][damage]
    assert (shifted["asked_inside"], shifted["asked_inside_intact"]) == (9, 9)
    assert shifted["asked_inside_shifted"] <= 2


@pytest.mark.parametrize("damage", SHIFTS)
def test_agreement_on_a_repeated_note_sees_a_shift_that_recall_misses(seen: dict, damage: str) -> None:
    """The same nine lists, of which seven or eight codes are still right; the request is to repeat the note at that end."""
    shifted = seen["global_shift"][damage]
    assert shifted["repeated_right"] >= 8
    assert shifted["repeated_agreeing"] <= 2


def test_agreement_on_another_question_sees_what_recall_misses(seen: dict) -> None:
    """Every code but the asked one is lost from the global layer: recall stays right, the answer about another place does not."""
    lost = seen["other_codes_lost"]
    assert lost["recall"] >= 8
    assert lost["other_question_right"] == 9
    assert lost["agreeing"] <= 2
