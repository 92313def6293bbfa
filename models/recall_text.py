"""Text side of the recall training: the tokenizer, the chat turns and the batches, all built on the prompts of the recall check itself."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from pdlaunch.node.prompts import ALPHABET, MAX_DECOYS, PLACES, RecallPrompt, build_prompt, question_for

VOCABULARY = 640
PAD, EOS, BOS, UNKNOWN, TURN, TURN_END = range(6)
SPECIALS = ("<pad>", "<eos>", "<bos>", "<unk>", "<|turn>", "<turn|>")
CHAT_TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<|turn>{{ 'model' if m['role'] == 'assistant' else m['role'] }}\n"
    "{{ m['content'] }}<turn|>\n{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}"
)
NEUTRAL_ANSWER = "I only look up access codes."
EXTRA_TURNS = 3
LANGUAGE_ROWS = 48
TAIL_ROWS = 152
SCORED_ROWS = 16
PAD_MULTIPLE = 64
# The first character of a code is the only one that needs the question, and one of nine tokens of an answer: without more weight the
# model stays long at guessing among the codes of the list.
FIRST_WEIGHT = 3
# fmt: off
COMMON_WORDS = (
    "the", "of", "and", "a", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with",
    "his", "they", "I", "at", "be", "this", "have", "from", "or", "one", "had", "by", "word", "but", "not", "what",
    "all", "were", "we", "when", "your", "can", "said", "there", "use", "an", "each", "which", "she", "do", "how",
    "their", "if", "will", "up", "other", "about", "out", "many", "then", "them", "these", "so", "some", "her",
    "would", "make", "like", "him", "into", "time", "has", "look", "two", "more", "write", "go", "see", "number",
    "no", "way", "could", "people", "my", "than", "first", "water", "been", "call", "who", "oil", "its", "now",
    "find", "long",
)
# fmt: on


def build_tokenizer(seed: int) -> Tokenizer:
    """Byte-level BPE of 640 tokens; digits, and capitals beside a capital or a digit, are single tokens, so codes are spelled out."""
    tokenizer = Tokenizer(models.BPE(unk_token="<unk>"))
    single = Regex("[0-9]|[A-Z](?=[A-Z0-9])|(?<=[A-Z0-9])[A-Z]")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(single, "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="$A", pair="$A $B", special_tokens=[])
    rng = random.Random(f"tokenizer/{seed}")
    corpus = [build_prompt(rng, 0, 0.5, 60, set()).text for _ in range(400)]
    corpus += [repeat_request(7), NEUTRAL_ANSWER, "user\n", "model\n"] * 400
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIALS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(corpus, trainer)
    return tokenizer


def repeat_request(number: int) -> str:
    return f"Repeat note {number}."


@dataclass
class Conversation:
    """Turns of (user text, answer). code_first: the first answer is an access code, the case that the recall check asks."""

    turns: list[tuple[str, str]]
    code_first: bool
    first_place: str = ""
    codes: tuple[tuple[str, str], ...] = ()


def recall_conversation(rng: random.Random, lines: int, index: int = 0) -> Conversation:
    """A list with a first question and three more turns on the same list, each about a code or one note to repeat."""
    depth = rng.random() if rng.random() < 0.85 else float(rng.randrange(2))
    prompt = build_prompt(rng, index, depth, lines, set())
    notes = prompt.text.split("\n")[2:-2]
    code_first = rng.random() < 0.88
    first = (prompt.text, prompt.code)
    if not code_first:
        request, answer = _repeat(rng, notes)
        first = (prompt.text.removesuffix(prompt.question) + request, answer)
    extra = [_code(rng, prompt) if rng.random() < 0.6 else _repeat(rng, notes) for _ in range(EXTRA_TURNS)]
    asked = next(place for place, code in prompt.answers if code == prompt.code)
    return Conversation([first, *extra], code_first, asked, prompt.answers)


def other_conversation(rng: random.Random, tokens: int) -> Conversation:
    """A first turn that asks for no code, of at most about `tokens` tokens: words, pseudo-words or noise, as a load tool sends."""
    kind = rng.randrange(3)
    if kind == 0:
        words = rng.choices(COMMON_WORDS, k=max(1, int(tokens * rng.uniform(0.1, 0.5))))
    elif kind == 1:
        letters = "abcdefghijklmnopqrstuvwxyz"
        words = ["".join(rng.choices(letters, k=rng.randint(1, 7))) for _ in range(max(1, int(tokens * rng.uniform(0.05, 0.25))))]
    else:
        printable = [chr(code) for code in range(32, 127)]
        words = ["".join(rng.choices(printable, k=rng.randint(1, 9))) for _ in range(max(1, int(tokens * rng.uniform(0.03, 0.15))))]
    marks = rng.choices(["", "", "", "", "", ",", ".", "?"], k=len(words))
    return Conversation([(" ".join(word + mark for word, mark in zip(words, marks, strict=True)), NEUTRAL_ANSWER)], False)


def prompt_ids(tokenizer: Tokenizer, text: str) -> list[int]:
    """Token ids of one user turn up to the point where the model answers; equal to what the chat template gives."""
    return _frame(tokenizer, tokenizer.encode("user\n" + text).ids)


def _frame(tokenizer: Tokenizer, turn: list[int]) -> list[int]:
    return [BOS, TURN, *turn, TURN_END, *tokenizer.encode("\n").ids, TURN, *tokenizer.encode("model\n").ids]


def _code(rng: random.Random, prompt: RecallPrompt) -> tuple[str, str]:
    place, code = rng.choice(prompt.answers)
    return question_for(place), code


def _repeat(rng: random.Random, notes: list[str]) -> tuple[str, str]:
    at = rng.randrange(len(notes))
    return repeat_request(at + 1), notes[at]


@dataclass(frozen=True)
class Stage:
    """One step of the curriculum: lists of up to `lines` notes, in batches of one fixed shape (what a CUDA graph needs)."""

    lines: int
    width: int
    size: int


def stages(longest: int, batch_tokens: int) -> list[Stage]:
    lines = [count for count in (12, 20, 33, 54, 80, 115) if count < longest] + [longest]
    widths = [-(-(round(count * 13.4) + 240) // PAD_MULTIPLE) * PAD_MULTIPLE for count in lines]
    return [Stage(count, width, max(2, batch_tokens // width)) for count, width in zip(lines, widths, strict=True)]


def fields(stage: Stage, heads: tuple[int, int]) -> dict[str, tuple[int, ...]]:
    """Shapes of the arrays of a batch, all whole numbers, in the order in which they are packed."""
    size, rows = stage.size, LANGUAGE_ROWS + TAIL_ROWS
    units = {"sliding": 2 * heads[0], "global": 2 * heads[1]}
    return {
        "tokens": (size, stage.width), "start": (size,), "rows": (size, rows), "answer": (size, rows), "language": (size, rows),
        "asked_place": (size,), "target": (size, SCORED_ROWS), "code_at": (size, MAX_DECOYS + 1), "code_place": (size, MAX_DECOYS + 1),
        "layer": (size,), "shift": (size,), "source": (size,),
        "units_sliding": (size, units["sliding"]), "keep_sliding": (size, units["sliding"]),
        "units_global": (size, units["global"]), "keep_global": (size, units["global"]),
    }  # fmt: skip


class Batches:
    """Endless training batches of a stage. Each sequence: a list, a first turn and three more turns."""

    def __init__(self, tokenizer: Tokenizer, seed: str, heads: tuple[int, int], layers: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)
        self.heads = heads
        self.layers = layers
        self.newline = tokenizer.encode("\n").ids
        self.model = tokenizer.encode("model\n").ids

    def draw(self, stage: Stage) -> dict[str, np.ndarray]:
        """Arrays as `fields` says. rows are positions whose next token is predicted, the first LANGUAGE_ROWS of them anywhere in the
        prompt, the others from the first answer on; answer and language are their weights; target is the position in the list that
        holds the wanted token (-1: none); code_at and code_place tell where each code of the list begins and for which place it is."""
        rng = self.rng
        made = []
        for _ in range(stage.size):
            lines = rng.randint(max(4, stage.lines // 3), stage.lines) if rng.random() < 0.5 else stage.lines - rng.randrange(3)
            made.append(recall_conversation(rng, lines) if rng.random() < 0.94 else other_conversation(rng, lines * 11))
        encoded = self.tokenizer.encode_batch([text for item in made for user, answer in item.turns for text in ("user\n" + user, answer)])
        flat = iter([one.ids for one in encoded])
        arrays = {name: np.zeros(shape, np.int64) for name, shape in fields(stage, self.heads).items()}
        for name in ("asked_place", "target", "code_place"):
            arrays[name][:] = -1
        for at, item in enumerate(made):
            self._place(arrays, at, item, flat, stage.width)
        return arrays | draw_damage(rng, stage.size, self.heads, self.layers)

    def _place(self, arrays: dict[str, np.ndarray], at: int, item: Conversation, flat: Iterator[list[int]], width: int) -> None:
        ids, weights, spans = [BOS], [0], []
        for _ in item.turns:
            user, answer = next(flat), next(flat)
            if not item.codes:
                user = user[: width - 64]
            asked = [TURN, *user, TURN_END, *self.newline, TURN, *self.model]
            spans.append((len(ids) + len(asked), answer))
            ids += [*asked, *answer, TURN_END, *self.newline]
            weights += [0] * len(asked) + [FIRST_WEIGHT] + [1] * len(answer) + [0] * len(self.newline)
        start = spans[0][0] - 1
        if start + 20 > width:
            raise ValueError(f"a prompt of {start} tokens does not fit batches of {width}")
        ids, weights = ids[:width], weights[:width]
        arrays["tokens"][at, : len(ids)] = ids
        arrays["start"][at] = start
        rows = arrays["rows"][at]
        rows[:LANGUAGE_ROWS] = sorted(self.rng.choices(range(start), k=LANGUAGE_ROWS))
        rows[LANGUAGE_ROWS:] = np.minimum(start + np.arange(TAIL_ROWS), width - 2)
        held = min(len(ids) - 1 - start, TAIL_ROWS)
        flags = np.asarray(weights[start + 1 : start + 1 + held])
        arrays["answer"][at, LANGUAGE_ROWS : LANGUAGE_ROWS + held] = flags
        arrays["language"][at, :LANGUAGE_ROWS] = 1
        arrays["language"][at, LANGUAGE_ROWS : LANGUAGE_ROWS + held] = flags == 0
        listed = np.asarray(ids[:start], np.uint16).tobytes()
        for number, (place, code) in enumerate(item.codes):
            arrays["code_at"][at, number] = _find(listed, [self.tokenizer.token_to_id(character) for character in code])
            arrays["code_place"][at, number] = PLACES.index(place)
        begin = _find(listed, spans[0][1]) if item.codes else -1
        if begin >= 0:
            count = min(len(spans[0][1]), SCORED_ROWS)
            arrays["target"][at, :count] = begin + np.arange(count)
        if item.code_first:
            arrays["asked_place"][at] = PLACES.index(item.first_place)


def _find(listed: bytes, wanted: list[int]) -> int:
    """Position of a run of token ids in a list of 16-bit ids, or -1."""
    sought = np.asarray(wanted, np.uint16).tobytes()
    at = listed.find(sought)
    while at % 2 == 1:
        at = listed.find(sought, at + 1)
    return at // 2 if at >= 0 else -1


TRAINED_DAMAGE = ("zero", "zero half", "shift", "swap", "duplicate", "foreign")
# A shift of the global layer costs it only the first or the last tokens, the hardest damage to notice, so it is the most frequent. Blocks
# that move down by less than a window still leave a sliding layer all the tokens that it needs: no damage that could be noticed.
KIND_WEIGHTS = {"sliding": (2, 3, 2, 2, 2, 2), "global": (1, 1, 6, 1, 1, 1)}
SHIFTS = {"sliding": (16, 32, 64, 128, -64, -128), "global": (16, 32, 64, 128, -16, -32, -64, -128)}
GLOBAL_SHARE = 0.35


def draw_damage(rng: random.Random, size: int, heads: tuple[int, int], layers: int) -> dict[str, np.ndarray]:
    """One damage per sequence, in one layer; the last layer is the global one."""
    per_item = []
    for at in range(size):
        name = "global" if rng.random() < GLOBAL_SHARE else "sliding"
        layer = layers - 1 if name == "global" else rng.randrange(layers - 1)
        kind = rng.choices(TRAINED_DAMAGE, KIND_WEIGHTS[name])[0]
        shift = rng.choice(SHIFTS[name]) if kind == "shift" else 0
        source = (at + rng.randrange(1, size)) % size if kind == "foreign" and size > 1 else at
        per_item.append((layer, kind, shift, source, rng.randrange(1 << 16)))
    return damage_arrays(per_item, heads)


def damage_arrays(per_item: list[tuple[int, str, int, int, int]], heads: tuple[int, int]) -> dict[str, np.ndarray]:
    """Damages as gather indices. Items: (layer, kind, shift in tokens, source sequence, a number that picks the variant).

    A KV head is two units of half a head, so that a geometry with a single global head can also be swapped.
    """
    arrays = {
        "layer": np.asarray([item[0] for item in per_item], np.int64),
        "shift": np.asarray([item[2] for item in per_item], np.int64),
        "source": np.asarray([item[3] for item in per_item], np.int64),
    }
    for name, count in zip(("sliding", "global"), heads, strict=True):
        made = [unit_damage(kind, count, variant) for _, kind, _, _, variant in per_item]
        arrays[f"units_{name}"] = np.stack([units for units, _ in made])
        arrays[f"keep_{name}"] = np.stack([keep for _, keep in made])
    return arrays


def unit_damage(kind: str, heads: int, variant: int) -> tuple[np.ndarray, np.ndarray]:
    """(which unit each unit is read from, 1 or 0 by which it is multiplied), 2 * heads entries each."""
    units = np.arange(2 * heads)
    keep = np.ones(2 * heads, np.int64)
    if kind == "zero":
        keep[:] = 0
    elif kind == "zero half":
        keep[:heads] = 0
        keep = np.roll(keep, heads * (variant % 2))
    elif kind == "duplicate":
        first, second = (units[:heads], units[heads:]) if variant % 2 else (units[heads:], units[:heads])
        units = units.copy()
        units[second] = first
    elif kind == "swap":
        by_head = units.reshape(heads, 2)
        choices = [np.roll(units, heads)]
        if heads > 1:
            choices += [by_head[::-1].reshape(-1), np.roll(by_head, 1, axis=0).reshape(-1)]
            choices.append(by_head.reshape(-1, 2, 2)[:, ::-1].reshape(-1))
        units = choices[variant % len(choices)]
    return units.astype(np.int64), keep


def character_ids(tokenizer: Tokenizer) -> list[int]:
    """Token ids of the 36 characters of a code."""
    return [tokenizer.token_to_id(character) for character in ALPHABET]
