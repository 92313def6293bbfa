"""The recall prompts: reproducible, unique, of the right length, without a prefix that a cache could share, and judged strictly."""

from __future__ import annotations

import itertools
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pdlaunch.node.prompts import (
    CODE_CHARS,
    MAX_DECOYS,
    estimate_tokens,
    foreign_codes,
    judge,
    question_for,
    recall_prompts,
)


def test_the_same_seed_gives_the_same_prompts_and_another_seed_shares_no_code() -> None:
    first, again, other = (recall_prompts(seed, 9, 800) for seed in ("run-1", "run-1", "run-2"))
    assert first == again
    codes = [{code for prompt in run for _, code in prompt.answers} for run in (first, other)]
    assert not codes[0] & codes[1]


@pytest.mark.parametrize("target", [200, 800, 1500, 2000, 12500])
def test_estimated_length_is_within_one_note_of_the_target(target: int) -> None:
    for prompt in recall_prompts("length", 9, target):
        assert target - 24 <= estimate_tokens(prompt.text) <= target
        assert prompt.text.count("\n") == prompt.lines + 3


def test_a_token_counter_or_a_number_of_tokens_per_line_sets_the_length() -> None:
    by_words = recall_prompts("words", 3, 500, lambda text: len(text.split()))
    assert all(480 <= len(prompt.text.split()) <= 502 for prompt in by_words)
    assert [prompt.lines for prompt in recall_prompts("number", 3, 500, 12.5)] == [40, 40, 40]


def test_depths_run_from_the_first_note_to_the_last() -> None:
    prompts = recall_prompts("depth", 9, 800)
    for prompt in prompts:
        notes = prompt.text.split("\n")[2:-2]
        (line,) = [number for number, note in enumerate(notes) if prompt.code in note]
        assert line == round(prompt.depth_fraction * (prompt.lines - 1))
    assert [prompt.depth_fraction for prompt in prompts] == [index / 8 for index in range(9)]


def test_each_prompt_asks_one_of_several_codes_and_the_question_comes_last() -> None:
    for prompt in recall_prompts("decoys", 9, 800):
        assert len(prompt.decoys) == MAX_DECOYS
        place = {code: place for place, code in prompt.answers}[prompt.code]
        assert prompt.text.endswith(prompt.question)
        assert prompt.question == question_for(place)
        assert len({place for place, _ in prompt.answers}) == len(prompt.answers)
        for other, code in prompt.answers:
            assert f"The access code for the {other} is {code}." in prompt.text


def test_no_two_prompts_share_a_prefix_longer_than_a_few_characters() -> None:
    texts = sorted(prompt.text for prompt in recall_prompts("prefix", 64, 400))
    for left, right in itertools.pairwise(texts):
        shared = next(at for at, pair in enumerate(zip(left, right, strict=False)) if pair[0] != pair[1])
        assert shared < 4


@given(st.text(max_size=12), st.integers(1, 20), st.integers(150, 3000))
@settings(max_examples=40, deadline=None)
def test_every_code_of_a_run_is_unique_and_well_formed(seed: str, count: int, target: int) -> None:
    prompts = recall_prompts(seed, count, target)
    codes = [code for prompt in prompts for _, code in prompt.answers]
    assert len(codes) == len(set(codes))
    assert all(re.fullmatch(f"[A-Z0-9]{{{CODE_CHARS}}}", code) for code in codes)
    for prompt in prompts:
        assert judge(prompt.code, prompt.code, "", foreign_codes(prompts, prompt), prompt.decoys)


@pytest.mark.parametrize(("count", "target", "per_line"), [(0, 800, None), (3, 20, None), (3, 800, 0), (3, 30, 13.0)])
def test_an_impossible_request_is_refused(count: int, target: int, per_line: float | None) -> None:
    with pytest.raises(ValueError, match=r"recall prompt|tokens per line"):
        recall_prompts("bad", count, target, per_line)


CASES = [
    ("AB12CD34", "", True),
    ("The code is AB12CD34.", "", True),
    ("", "the list says AB12CD34", True),
    ("", "harbor AB12CD34, tower ZZZZ9999; so AB12CD34", True),
    ("AB12CD345", "", False),
    ("xAB12CD34", "", False),
    ("ab12cd34", "", False),
    ("", "", False),
    ("AB12CD34 or ZZZZ9999", "", False),
    ("ZZZZ9999", "first AB12CD34, no, ZZZZ9999", False),
    ("AB12CD34 FFFF0000", "", False),
    ("AB12CD34", "before: FFFF0000", False),
]


@pytest.mark.parametrize(("content", "reasoning", "right"), CASES)
def test_judge(content: str, reasoning: str, right: bool) -> None:
    assert judge("AB12CD34", content, reasoning, foreign=["FFFF0000", "AB12CD34"], decoys=["ZZZZ9999"]) is right
