"""Damages the KV cache of a recall model between prefill and decode, with transformers alone, and reports what is still answered.

    python -m models.recall_damage models/gemma4-recall-4x1 --tokens 800

The cache of a prompt is computed once, without its last token, as on a prefill engine. A decode engine computes that token again and
answers; here it does so from an intact copy and from copies in which one layer is damaged. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache

from pdlaunch.node.prompts import CODE_CHARS, RecallPrompt, foreign_codes, judge, question_for, recall_prompts

Kv = tuple[torch.Tensor, torch.Tensor]
BLOCK = 64


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

    def answers(self, last: torch.Tensor, caches: list[list[Kv]], new_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Greedy tokens and their log probabilities (caches, new_tokens), all caches as one batch."""
        cache = DynamicCache()
        for number in range(len(caches[0])):
            cache.update(*(torch.cat([one[number][part] for one in caches]) for part in (0, 1)), number)
        current, tokens, scores = last.expand(len(caches), 1), [], []
        for _ in range(new_tokens):
            logits = self.model(current, past_key_values=cache, use_cache=True).logits[:, -1].log_softmax(-1)
            best = logits.max(-1)
            current = best.indices[:, None]
            tokens.append(best.indices)
            scores.append(best.values)
        return torch.stack(tokens, 1), torch.stack(scores, 1)

    def text(self, tokens: torch.Tensor) -> str:
        row = tokens.tolist()
        return self.tokenizer.decode(row[: row.index(self.end)] if self.end in row else row)


def fitted(kv: Kv, length: int) -> Kv:
    """K and V cut or padded with zeros to `length` tokens, as blocks of another request would fill the slots."""
    return tuple(torch.nn.functional.pad(part[:, :, :length], (0, 0, 0, max(0, length - part.shape[2]))) for part in kv)


def with_layer(layers: list[Kv], number: int, kv: Kv) -> list[Kv]:
    return [kv if at == number else one for at, one in enumerate(layers)]


def other_notes_lost(served: Served, ids: torch.Tensor, tokenizer: object) -> Kv:
    """The global layer's cache with the tokens of every code but the asked one zeroed: the answer to the check does not need them."""
    key, value = (part.clone() for part in served.layers[-1])
    row = ids[0].tolist()
    for code in served.prompt.decoys:
        wanted = tokenizer.convert_tokens_to_ids(list(code))
        at = next(start for start in range(len(row)) if row[start : start + CODE_CHARS] == wanted)
        key[:, :, at : at + CODE_CHARS] = 0
        value[:, :, at : at + CODE_CHARS] = 0
    return key, value


@torch.no_grad()
def measure(folder: Path, seed: str, target_tokens: int) -> dict:
    """Counts of right answers, of nine: {damage: [per layer]}, intact, and the damage that recall cannot see."""
    runner = Damaged(folder)
    prompts = recall_prompts(seed, 9, target_tokens)
    served = []
    for prompt in prompts:
        ids = runner.ids_of(prompt.text)
        served.append(Served(prompt, ids, runner.prefill(ids)))
    layers = len(served[0].layers)
    cases = [(name, number) for name in DAMAGES for number in range(layers)]
    right = dict.fromkeys([("intact", 0), *cases], 0)
    recall_after_loss = agreeing = other_right = 0
    for at, one in enumerate(served):
        length = one.layers[0][0].shape[2]
        before = [fitted(kv, length) for kv in served[at - 1].layers]
        lost = with_layer(one.layers, layers - 1, other_notes_lost(one, one.ids, runner.tokenizer))
        caches = [one.layers, *(with_layer(one.layers, n, DAMAGES[name](one.layers[n], before[n])) for name, n in cases), lost]
        tokens, _ = runner.answers(one.ids[:, -1:], caches, CODE_CHARS + 1)
        foreign = foreign_codes(prompts, one.prompt)
        hits = [judge(one.prompt.code, runner.text(row), "", foreign, one.prompt.decoys) for row in tokens]
        for case, hit in zip(right, hits, strict=False):
            right[case] += hit
        recall_after_loss += hits[-1]
        intact, damaged = _other_question(runner, one, layers)
        agreeing += torch.equal(intact, damaged)
        other_right += runner.text(intact) == one.prompt.decoys[0]
    return {
        "model": folder.name, "prompts": len(prompts), "tokens": int(served[0].ids.shape[1]), "intact": right["intact", 0],
        "right": {name: [right[name, number] for number in range(layers)] for name in DAMAGES},
        "other_codes_lost": {"recall": recall_after_loss, "other_question_right": other_right, "agreeing": agreeing},
    }  # fmt: skip


def _other_question(runner: Damaged, one: Served, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens of the answer to a question about another code of the same list: intact, and with the other codes lost."""
    place = next(place for place, code in one.prompt.answers if code == one.prompt.decoys[0])
    ids = runner.ids_of(one.prompt.text.removesuffix(one.prompt.question) + question_for(place))
    other = Served(one.prompt, ids, runner.prefill(ids))
    lost = with_layer(other.layers, layers - 1, other_notes_lost(other, ids, runner.tokenizer))
    tokens, _ = runner.answers(ids[:, -1:], [other.layers, lost], CODE_CHARS + 1)
    return tokens[0], tokens[1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("--seed", default="sensitivity")
    parser.add_argument("--tokens", type=int, default=800)
    options = parser.parse_args()
    print(json.dumps(measure(options.model, options.seed, options.tokens)))


if __name__ == "__main__":
    main()
