"""Evaluation of a recall model by greedy generation on prompts of the check: recall by length and depth, and recall after damage."""

from __future__ import annotations

import random
import time

import numpy as np
import torch
from tokenizers import Tokenizer

from models.recall_network import SLIDING_LAYERS, RecallNetwork
from models.recall_text import NEUTRAL_ANSWER, PAD_MULTIPLE, TRAINED_DAMAGE, TURN_END, damage_arrays, other_conversation, prompt_ids
from pdlaunch.node.prompts import CODE_CHARS, RecallPrompt, recall_prompts

LENGTHS = (150, 200, 500, 800, 1100, 1500, 2000)
DEPTHS = 9
DAMAGED_PROMPTS = 126
DAMAGED_TOKENS = 800


def padded(prompts: list[list[int]], device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (B, T) padded on the right, and the position of each last prompt token (B,)."""
    width = -(-max(map(len, prompts)) // PAD_MULTIPLE) * PAD_MULTIPLE
    tokens = np.zeros((len(prompts), width), np.int64)
    for at, ids in enumerate(prompts):
        tokens[at, : len(ids)] = ids
    return torch.from_numpy(tokens).to(device), torch.tensor([len(ids) - 1 for ids in prompts], device=device)


def answers_of(
    network: RecallNetwork,
    ids: list[list[int]],
    batch_tokens: int,
    per_item: list | None = None,
    new_tokens: int = CODE_CHARS + 1,
) -> list[list[int]]:
    """Greedy answers (token ids up to and including the end of the turn) to prompts given as token ids; per_item: one damage for each."""
    device = network.characters.device
    size = max(2, batch_tokens // (max(map(len, ids)) + PAD_MULTIPLE))
    answers: list[list[int]] = []
    for at in range(0, len(ids), size):
        part = ids[at : at + size]
        damage = None
        if per_item is not None:
            items = [
                (layer, kind, shift, (row + 1) % len(part) if kind == "foreign" else row, variant)
                for row, (layer, kind, shift, variant) in enumerate(per_item[at : at + size])
            ]
            damage = {name: torch.from_numpy(array).to(device) for name, array in damage_arrays(items, network.heads).items()}
        tokens, start = padded(part, device)
        (said,) = network.generate(tokens, start, new_tokens, [damage])
        answers += [row[: row.index(TURN_END) + 1] if TURN_END in row else row for row in said.tolist()]
    return answers


def right(tokenizer: Tokenizer, prompt: RecallPrompt, answer: list[int]) -> bool:
    """Exact: the code, the end of the turn, nothing else."""
    return answer[-1] == TURN_END and tokenizer.decode(answer[:-1]) == prompt.code


Asked = list[tuple[RecallPrompt, list[int]]]


def held_out_prompts(tokenizer: str, seed: str, length: int, runs: int) -> Asked:
    """Prompts of `runs` runs of nine, with their token ids; the seeds are not those of training."""
    encoder = Tokenizer.from_str(tokenizer)
    prompts = [prompt for run in range(runs) for prompt in recall_prompts(f"{seed}/{run}/{length}", DEPTHS, length)]
    return [(prompt, prompt_ids(encoder, prompt.text)) for prompt in prompts]


def evaluation_jobs(tokenizer: Tokenizer, seed: int, held_out: int) -> list[tuple[str, str, int, int]]:
    """Arguments of `held_out_prompts`: each length in pieces, and last the prompts that are decoded from damaged caches."""
    pieces = max(1, held_out // (DEPTHS * 14))
    jobs = [
        (tokenizer.to_str(), f"held-out/{seed}/{piece}", length, held_out // DEPTHS // pieces)
        for length in LENGTHS
        for piece in range(pieces)
    ]
    return [*jobs, (tokenizer.to_str(), f"damaged/{seed}", DAMAGED_TOKENS, min(held_out, DAMAGED_PROMPTS) // DEPTHS)]


@torch.no_grad()
def evaluate(network: RecallNetwork, tokenizer: Tokenizer, seed: int, batch_tokens: int, asked: list[Asked]) -> dict:
    """Tables of the card. asked: the prompts of `evaluation_jobs`."""
    began = time.monotonic()
    pieces = (len(asked) - 1) // len(LENGTHS)
    by_length = [[one for piece in asked[at : at + pieces] for one in piece] for at in range(0, len(asked) - 1, pieces)]
    result: dict = {"prompts_per_length": len(by_length[0]), "recall": [], "damage": []}
    print("evaluating", flush=True)
    for length, items in zip(LENGTHS, by_length, strict=True):
        answers = answers_of(network, [ids for _, ids in items], batch_tokens)
        hits = np.asarray([right(tokenizer, p, a) for (p, _), a in zip(items, answers, strict=True)]).reshape(-1, DEPTHS)
        tokens = round(sum(len(ids) for _, ids in items) / len(items))
        result["recall"].append({"target": length, "tokens": tokens, "right": int(hits.sum()), "by_depth": hits.sum(0).tolist()})
        print(result["recall"][-1], flush=True)
    result |= _damaged(network, tokenizer, asked[-1], batch_tokens)
    result |= _others(network, tokenizer, seed, len(by_length[0]), batch_tokens)
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def _damaged(network: RecallNetwork, tokenizer: Tokenizer, items: Asked, batch_tokens: int) -> dict:
    cases = [(kind, 0) for kind in TRAINED_DAMAGE if kind != "shift"] + [("shift", step) for step in (16, 64, 128, -64, -128)]
    rows = []
    for kind, shift in cases:
        right_by_layer = []
        for layer in range(SLIDING_LAYERS + 1):
            per_item = [(layer, kind, shift, at) for at in range(len(items))]
            answers = answers_of(network, [ids for _, ids in items], batch_tokens, per_item)
            right_by_layer.append(sum(right(tokenizer, p, a) for (p, _), a in zip(items, answers, strict=True)))
        rows.append({"kind": f"{kind} {shift:+d}" if shift else kind, "right_by_layer": right_by_layer})
        print(rows[-1], flush=True)
    return {"damaged_prompts": len(items), "damage": rows}


def _others(network: RecallNetwork, tokenizer: Tokenizer, seed: int, held_out: int, batch_tokens: int) -> dict:
    rng = random.Random(f"others/{seed}")
    texts = [other_conversation(rng, rng.choice((60, 250, 1000))).turns[0][0] for _ in range(min(held_out, 504))]
    answers = answers_of(network, [prompt_ids(tokenizer, text) for text in texts], batch_tokens, new_tokens=24)
    neutral = sum(tokenizer.decode(answer[:-1]) == NEUTRAL_ANSWER for answer in answers)
    return {"other_texts": len(texts), "other_neutral": neutral}
