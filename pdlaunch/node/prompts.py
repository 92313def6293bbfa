"""Recall prompts: long numbered lists of notes in which a few notes hold access codes, and a question about one of them.

One source for the check (recall before, during and after load) and for the training of the recall models. Three properties make a wrong KV
cache visible:

- the code cannot be guessed and is unique in the run, so an answer that belongs to another request is recognised (vllm#52234);
- other notes hold codes for other places, so the answer needs both the far list (global layers) and the question, which lies within the
  last tokens (sliding-window layers);
- every prompt starts with its own label and has its own notes, so no block of one prompt can be served from another's prefix cache.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass

ALPHABET = "ABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789"
CODE_CHARS = 8
LABEL_CHARS = 4
MAX_DECOYS = 7
MIN_LINES = 4
MIN_PROMPT_TOKENS = 150
"""The shortest list, of MIN_LINES notes, has up to about 120 tokens; a recipe may not ask for less than this."""

# fmt: off
ADJECTIVES = (
    "bright", "broken", "brown", "cold", "curved", "dusty", "empty", "faded", "folded", "green", "heavy", "hollow",
    "loose", "lower", "narrow", "old", "painted", "plain", "polished", "quiet", "round", "second", "silver",
    "small", "spare", "striped", "tall", "third", "wooden", "yellow",
)
NOUNS = (
    "anchor", "barrel", "basket", "blanket", "bottle", "bucket", "button", "candle", "carpet", "compass", "drawer",
    "engine", "hammer", "helmet", "jacket", "kettle", "ladder", "lantern", "magnet", "mirror", "napkin", "needle",
    "parcel", "pencil", "pillow", "ribbon", "saddle", "shovel", "teapot", "whistle",
)
# fmt: on
VERBS = ("belongs", "is kept", "is stored", "leans", "stands", "was left", "was moved", "was seen")
PREPOSITIONS = ("against", "behind", "beside", "in front of", "near", "past", "to the left of", "under")
# fmt: off
PLACES = (
    "attic", "bakery", "balcony", "bridge", "cellar", "chapel", "courtyard", "garden", "hallway", "harbor",
    "kitchen", "library", "lighthouse", "market", "orchard", "stable", "station", "theater", "tower", "tunnel",
    "vineyard", "warehouse", "windmill", "workshop",
)
# fmt: on

_ESTIMATE = re.compile(r"[A-Z](?![a-z])|[A-Za-z][a-z]*|[0-9]|[^\sA-Za-z0-9]|\n")


@dataclass(frozen=True)
class RecallPrompt:
    """One request of the recall check.

    text is the whole user message; question is its last line; code is the only right answer. depth_fraction is 0.0 when the asked note is
    the first of the list and 1.0 when it is the last. answers holds (place, code) of every code note in list order, the asked one included.
    """

    index: int
    depth_fraction: float
    lines: int
    text: str
    code: str
    question: str
    answers: tuple[tuple[str, str], ...]

    @property
    def decoys(self) -> tuple[str, ...]:
        """The codes of the other code notes of this list."""
        return tuple(code for _, code in self.answers if code != self.code)


def question_for(place: str) -> str:
    """The question about one place: it must be the end of the user message, so that sliding-window layers hold it."""
    return f"Reply with the code only. What is the access code for the {place}?"


def estimate_tokens(text: str) -> int:
    """Tokens of a recall text for a tokenizer with whole words and single digits, as Gemma's: one a word, digit, sign or line end."""
    return len(_ESTIMATE.findall(text))


def recall_prompts(
    seed: str, count: int, target_tokens: int, tokens_per_line: float | Callable[[str], int] | None = None
) -> list[RecallPrompt]:
    """`count` prompts of about `target_tokens` tokens each; the same arguments give the same prompts.

    The asked notes lie at depths evenly spread from the first to the last note. tokens_per_line is a number of tokens per line, or a
    function that counts the tokens of a text, or None for `estimate_tokens`; the true length is the server's `usage.prompt_tokens`.
    Use another seed for every run and phase: codes are unique only among the prompts of one call. Raises ValueError when no prompt fits.
    """
    if count < 1:
        raise ValueError(f"count of recall prompts is {count}; it must be at least 1")
    rng = random.Random(f"recall/{seed}")
    taken: set[str] = set()
    prompts = []
    for index in range(count):
        depth = 0.5 if count == 1 else index / (count - 1)
        prompts.append(_sized_prompt(rng, index, depth, target_tokens, tokens_per_line, taken))
    return prompts


def build_prompt(rng: random.Random, index: int, depth: float, lines: int, taken: set[str]) -> RecallPrompt:
    """One prompt of exactly `lines` notes, drawn from rng; its label and codes are added to `taken` and differ from all in it."""
    if lines < MIN_LINES:
        raise ValueError(f"a recall prompt of {lines} lines is too short; at least {MIN_LINES} are needed")
    needle = round(depth * (lines - 1))
    others = [line for line in range(lines) if line != needle]
    code_lines = sorted([needle, *rng.sample(others, min(MAX_DECOYS, lines // 3))])
    places = rng.sample(PLACES, len(code_lines))
    answers = tuple((place, _fresh(rng, CODE_CHARS, taken)) for place in places)
    holds = dict(zip(code_lines, answers, strict=True))
    notes = [_code_note(*holds[line]) if line in holds else _plain_note(rng) for line in range(lines)]
    place, code = holds[needle]
    question = question_for(place)
    head = f"{_fresh(rng, LABEL_CHARS, taken)} is the name of this numbered list of notes. Some notes hold an access code."
    body = "\n".join(f"{number}. {note}" for number, note in enumerate(notes, start=1))
    return RecallPrompt(index, depth, lines, f"{head}\n\n{body}\n\n{question}", code, question, answers)


def judge(code: str, content: str, reasoning: str = "", foreign: Iterable[str] = (), decoys: Iterable[str] = ()) -> bool:
    """True when `code` stands as a whole word in content or reasoning and no wrong code does.

    foreign: codes of other prompts of the run (asked and decoy); one of them anywhere is a leak, whatever else was said. decoys: the
    other codes of the same prompt; a model may weigh them in its reasoning, but the content must not name one.
    """
    said = _words(content)
    thought = _words(reasoning)
    if code not in said and (code not in thought or said & set(decoys)):
        return False
    return not (said | thought) & (set(foreign) - {code}) and not said & (set(decoys) - {code})


def foreign_codes(prompts: Iterable[RecallPrompt], prompt: RecallPrompt) -> frozenset[str]:
    """Every code of the run that does not stand in `prompt`: what `judge` takes as foreign."""
    everything = {code for other in prompts for _, code in other.answers}
    return frozenset(everything - {code for _, code in prompt.answers})


def _sized_prompt(
    rng: random.Random,
    index: int,
    depth: float,
    target_tokens: int,
    tokens_per_line: float | Callable[[str], int] | None,
    taken: set[str],
) -> RecallPrompt:
    """The prompt whose length is nearest below or at the target: the line count is corrected until it no longer changes."""
    draw = rng.getrandbits(64)
    if isinstance(tokens_per_line, int | float):
        if tokens_per_line <= 0:
            raise ValueError(f"tokens per line is {tokens_per_line}; it must be above 0")
        return build_prompt(random.Random(draw), index, depth, int(target_tokens / tokens_per_line), taken)
    count_tokens = tokens_per_line or estimate_tokens
    lines = max(MIN_LINES, target_tokens // 14)
    for _ in range(6):
        measured = count_tokens(build_prompt(random.Random(draw), index, depth, lines, set(taken)).text)
        step = math.floor((target_tokens - measured) / (measured / lines))
        if step == 0:
            break
        lines += step
        if lines < MIN_LINES:
            raise ValueError(f"a recall prompt of {target_tokens} tokens is too short; {MIN_LINES} notes already need {measured}")
    return build_prompt(random.Random(draw), index, depth, lines, taken)


def _fresh(rng: random.Random, length: int, taken: set[str]) -> str:
    while True:
        code = "".join(rng.choices(ALPHABET, k=length))
        if code not in taken:
            taken.add(code)
            return code


def _code_note(place: str, code: str) -> str:
    return f"The access code for the {place} is {code}."


def _plain_note(rng: random.Random) -> str:
    choice = rng.choice
    return f"The {choice(ADJECTIVES)} {choice(NOUNS)} {choice(VERBS)} {choice(PREPOSITIONS)} the {choice(PLACES)}."


def _words(text: str) -> set[str]:
    return set(re.findall(r"[A-Za-z0-9]+", text or ""))
