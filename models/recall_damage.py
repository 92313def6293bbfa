"""Damages the KV cache of a recall model between prefill and decode, with transformers alone, and reports what is still answered.

    python -m models.recall_damage models/gemma4-recall-4x1 --tokens 800

The cache of a prompt is computed once, without its last token, as on a prefill engine. A decode engine computes that token again and
answers; here it does so from an intact copy and from copies in which one layer is damaged. Prints one JSON object.

A shift by one block of the global layer is measured apart. Keys carry their rotary position and a global layer reads every slot, so it does
not matter in which slot a key lies: such a shift takes from the model the one block that it pushes out, and nothing else.
"""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from models.recall_text import repeat_request
from pdlaunch.node.prompts import CODE_CHARS, RecallPrompt, build_prompt, foreign_codes, judge, question_for, recall_prompts

Kv = tuple[torch.Tensor, torch.Tensor]
BLOCK = 64
PROMPTS = 9
NOTE_TOKENS = 40


def zeroed(kv: Kv, _: Kv) -> Kv:
    return torch.zeros_like(kv[0]), torch.zeros_like(kv[1])


def shifted(kv: Kv, _: Kv) -> Kv:
    """Every block holds what belongs in the block before it; the first holds zeros."""
    return tuple(torch.cat((torch.zeros_like(part[:, :, :BLOCK]), part[:, :, :-BLOCK]), 2) for part in kv)


def shifted_back(kv: Kv, _: Kv) -> Kv:
    return tuple(torch.cat((part[:, :, BLOCK:], torch.zeros_like(part[:, :, :BLOCK])), 2) for part in kv)


def swapped(kv: Kv, _: Kv) -> Kv:
    """Heads in reverse order; of a single head, its two halves, as a wrong split among ranks would leave them."""
    if kv[0].shape[1] == 1:
        return tuple(part.roll(part.shape[3] // 2, 3) for part in kv)
    return tuple(part.flip(1) for part in kv)


def first_rank_twice(kv: Kv, _: Kv) -> Kv:
    """The second half of the heads (of a single head: of its width) holds a copy of the first half."""
    axis = 3 if kv[0].shape[1] == 1 else 1
    return tuple(torch.cat([part.chunk(2, axis)[0]] * 2, axis) for part in kv)


def exchanged(kv: Kv, _: Kv) -> Kv:
    """V where K belongs and K where V belongs."""
    return kv[1], kv[0]


def stale(_: Kv, other: Kv) -> Kv:
    """The cache of the request before this one."""
    return other


DAMAGES: dict[str, Callable[[Kv, Kv], Kv]] = {
    "zero": zeroed, "shift +1 block": shifted, "shift -1 block": shifted_back, "swap": swapped,
    "first rank twice": first_rank_twice, "exchange K and V": exchanged, "stale": stale,
}  # fmt: skip
# Which end of the cache a shift pushes out, as the depth of the note that goes with it.
PUSHED_OUT = {"shift +1 block": 1.0, "shift -1 block": 0.0}


@dataclass
class Served:
    """A prompt with its intact cache, one (K, V) per layer, each (1, heads, tokens - 1, head_dim)."""

    prompt: RecallPrompt
    ids: torch.Tensor
    layers: list[Kv]


class Damaged:
    """Runs a model from damaged caches."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.end = self.tokenizer.convert_tokens_to_ids("<turn|>")

    def ids_of(self, text: str) -> torch.Tensor:
        chat = [{"role": "user", "content": text}]
        said = self.tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False)
        return torch.tensor([self.tokenizer.encode(said, add_special_tokens=False)])

    def prefill(self, ids: torch.Tensor) -> list[Kv]:
        cache = DynamicCache()
        self.model(ids[:, :-1], past_key_values=cache, use_cache=True)
        return [(layer.keys, layer.values) for layer in cache.layers]

    def served(self, prompt: RecallPrompt, request: str | None = None) -> Served:
        """The prompt, or its list with another request in place of the question, with its intact cache."""
        ids = self.ids_of(prompt.text if request is None else prompt.text.removesuffix(prompt.question) + request)
        return Served(prompt, ids, self.prefill(ids))

    def answers(self, last: torch.Tensor, caches: list[list[Kv]], new_tokens: int) -> torch.Tensor:
        """Greedy tokens (caches, new_tokens), all caches as one batch."""
        # With the configuration, a sliding layer keeps its window only, as on an engine; that also makes this four times faster.
        cache = DynamicCache(config=self.model.config)
        for number in range(len(caches[0])):
            cache.update(*(torch.cat([one[number][part] for one in caches]) for part in (0, 1)), number)
        current, tokens = last.expand(len(caches), 1), []
        for _ in range(new_tokens):
            current = self.model(current, past_key_values=cache, use_cache=True).logits[:, -1].argmax(-1)[:, None]
            tokens.append(current)
        return torch.cat(tokens, 1)

    def text(self, tokens: torch.Tensor) -> str:
        row = tokens.tolist()
        return self.tokenizer.decode(row[: row.index(self.end)] if self.end in row else row)


def fitted(kv: Kv, length: int) -> Kv:
    """K and V cut or padded with zeros to `length` tokens, as blocks of another request would fill the slots."""
    return tuple(torch.nn.functional.pad(part[:, :, :length], (0, 0, 0, max(0, length - part.shape[2]))) for part in kv)


def with_layer(layers: list[Kv], number: int, kv: Kv) -> list[Kv]:
    return [kv if at == number else one for at, one in enumerate(layers)]


def position_of(code: str, ids: torch.Tensor, tokenizer: object) -> int:
    """Position of the first token of a code in the prompt: its one place in the list."""
    wanted, row = tokenizer.convert_tokens_to_ids(list(code)), ids[0].tolist()
    return next(start for start in range(len(row)) if row[start : start + CODE_CHARS] == wanted)


def in_pushed_out_block(served: Served, tokenizer: object, damage: str) -> bool:
    """True when at least one token of the asked code lies in the block that a shift pushes out of the cache."""
    begin, length = position_of(served.prompt.code, served.ids, tokenizer), served.layers[0][0].shape[2]
    return begin + CODE_CHARS > length - BLOCK if PUSHED_OUT[damage] else begin < BLOCK


def other_notes_lost(served: Served, tokenizer: object) -> Kv:
    """The global layer's cache with the tokens of every code but the asked one zeroed: the answer to the check does not need them."""
    key, value = (part.clone() for part in served.layers[-1])
    for code in served.prompt.decoys:
        at = position_of(code, served.ids, tokenizer)
        key[:, :, at : at + CODE_CHARS] = 0
        value[:, :, at : at + CODE_CHARS] = 0
    return key, value


@torch.no_grad()
def measure(folder: Path, seed: str, target_tokens: int) -> dict:
    """Counts, of nine: right answers with the cache intact and by {damage: [per layer]}, and what recall alone cannot see."""
    runner = Damaged(folder)
    prompts = recall_prompts(seed, PROMPTS, target_tokens)
    served = [runner.served(prompt) for prompt in prompts]
    layers = len(served[0].layers)
    cases = [(name, number) for name in DAMAGES for number in range(layers)]
    hits: dict[tuple[str, int], list[bool]] = {case: [] for case in [("intact", 0), *cases, ("other codes lost", 0)]}
    for at, one in enumerate(served):
        length = one.layers[0][0].shape[2]
        before = [fitted(kv, length) for kv in served[at - 1].layers]
        lost = with_layer(one.layers, layers - 1, other_notes_lost(one, runner.tokenizer))
        caches = [one.layers, *(with_layer(one.layers, n, DAMAGES[name](one.layers[n], before[n])) for name, n in cases), lost]
        tokens = runner.answers(one.ids[:, -1:], caches, CODE_CHARS + 1)
        foreign = foreign_codes(prompts, one.prompt)
        for case, row in zip(hits, tokens, strict=True):
            hits[case].append(judge(one.prompt.code, runner.text(row), "", foreign, one.prompt.decoys))
    lines = prompts[0].lines
    return {
        "model": folder.name, "prompts": len(prompts), "tokens": int(served[0].ids.shape[1]), "intact": sum(hits["intact", 0]),
        "first_probability": _first_probability(runner, served),
        "right": {name: [sum(hits[name, number]) for number in range(layers)] for name in DAMAGES},
        "other_codes_lost": {"recall": sum(hits["other codes lost", 0]), **_other_question(runner, prompts)},
        "global_shift": {
            name: {
                "wrong": [at for at, hit in enumerate(hits[name, layers - 1]) if not hit],
                "pushed_out": [at for at, one in enumerate(served) if in_pushed_out_block(one, runner.tokenizer, name)],
                **_asked_at_the_end(runner, name, random.Random(f"{seed}/{name}"), lines), **_repeated(runner, name, prompts),
            }
            for name in PUSHED_OUT
        },
    }  # fmt: skip


def _first_probability(runner: Damaged, served: list[Served]) -> float:
    """Mean probability of the right first character with the cache intact: how far greedy decoding is from a sampled answer."""
    total = 0.0
    for one in served:
        said = runner.model(one.ids, use_cache=False).logits[0, -1].softmax(-1)
        total += float(said[runner.tokenizer.convert_tokens_to_ids(one.prompt.code[0])])
    return round(total / len(served), 3)


def _other_question(runner: Damaged, prompts: list[RecallPrompt]) -> dict[str, int]:
    """Answers to a question about another code of the same list: right when intact, and equal, token for token, with those codes lost."""
    right = agreeing = 0
    for prompt in prompts:
        place = next(place for place, code in prompt.answers if code == prompt.decoys[0])
        one = runner.served(prompt, question_for(place))
        lost = with_layer(one.layers, len(one.layers) - 1, other_notes_lost(one, runner.tokenizer))
        intact, damaged = runner.answers(one.ids[:, -1:], [one.layers, lost], CODE_CHARS + 1)
        right += runner.text(intact) == prompt.decoys[0]
        agreeing += torch.equal(intact, damaged)
    return {"other_question_right": right, "agreeing": agreeing}


def _shifted_global(one: Served, damage: str) -> list[list[Kv]]:
    """Two caches: the intact one and the one whose global layer is shifted."""
    last = len(one.layers) - 1
    return [one.layers, with_layer(one.layers, last, DAMAGES[damage](one.layers[last], one.layers[last]))]


def _asked_at_the_end(runner: Damaged, damage: str, rng: random.Random, lines: int) -> dict[str, int]:
    """Prompts that all ask for the note at the end that the shift pushes out: right when intact and when shifted."""
    right = [0, 0]
    inside = 0
    for index in range(PROMPTS):
        one = runner.served(build_prompt(rng, index, PUSHED_OUT[damage], lines, set()))
        inside += in_pushed_out_block(one, runner.tokenizer, damage)
        for case, row in enumerate(runner.answers(one.ids[:, -1:], _shifted_global(one, damage), CODE_CHARS + 1)):
            right[case] += judge(one.prompt.code, runner.text(row), "", (), one.prompt.decoys)
    return {"asked_inside": inside, "asked_inside_intact": right[0], "asked_inside_shifted": right[1]}


def _repeated(runner: Damaged, damage: str, prompts: list[RecallPrompt]) -> dict[str, int]:
    """Requests to repeat the note at that end of the same lists: right when intact, and equal, token for token, when shifted."""
    right = agreeing = 0
    for prompt in prompts:
        number = prompt.lines if PUSHED_OUT[damage] else 1
        one = runner.served(prompt, repeat_request(number))
        intact, shifted_answer = runner.answers(one.ids[:, -1:], _shifted_global(one, damage), NOTE_TOKENS)
        right += f"\n{runner.text(intact)}\n" in prompt.text and runner.text(intact).startswith(f"{number}. ")
        agreeing += torch.equal(intact, shifted_answer)
    return {"repeated_right": right, "repeated_agreeing": agreeing}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", default="sensitivity")
    parser.add_argument("--tokens", type=int, default=800)
    parser.add_argument("--threads", type=int, default=1, help="of torch; on a busy machine more than one is slower")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print(json.dumps(measure(options.model, options.seed, options.tokens)))


if __name__ == "__main__":
    main()
