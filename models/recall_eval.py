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
    tokenizer: Tokenizer,
    texts: list[str],
    batch_tokens: int,
    per_item: list | None = None,
    new_tokens: int = CODE_CHARS + 1,
) -> list[list[int]]:
    """Greedy answers (token ids up to and including the end of the turn) to user messages; per_item: one damage for each text."""
    device = network.characters.device
    ids = [prompt_ids(tokenizer, text) for text in texts]
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


@torch.no_grad()
def evaluate(network: RecallNetwork, tokenizer: Tokenizer, seed: int, held_out: int, batch_tokens: int) -> dict:
    """Tables of the card. Prompts come from seeds that training does not use."""
    began = time.monotonic()
    result: dict = {"prompts_per_length": held_out, "recall": [], "damage": []}
    print("evaluating", flush=True)
    for length in LENGTHS:
        prompts = [p for run in range(held_out // DEPTHS) for p in recall_prompts(f"held-out/{seed}/{run}/{length}", DEPTHS, length)]
        answers = answers_of(network, tokenizer, [p.text for p in prompts], batch_tokens)
        hits = np.asarray([right(tokenizer, p, a) for p, a in zip(prompts, answers, strict=True)]).reshape(-1, DEPTHS)
        tokens = len(prompt_ids(tokenizer, prompts[0].text))
        result["recall"].append({"target": length, "tokens": tokens, "right": int(hits.sum()), "by_depth": hits.sum(0).tolist()})
        print(result["recall"][-1], flush=True)
    result |= _damaged(network, tokenizer, seed, min(held_out, DAMAGED_PROMPTS), batch_tokens)
    result |= _others(network, tokenizer, seed, held_out, batch_tokens)
    result["seconds"] = round(time.monotonic() - began, 1)
    return result


def _damaged(network: RecallNetwork, tokenizer: Tokenizer, seed: int, asked: int, batch_tokens: int) -> dict:
    prompts = [p for run in range(asked // DEPTHS) for p in recall_prompts(f"damaged/{seed}/{run}", DEPTHS, DAMAGED_TOKENS)]
    cases = [(kind, 0) for kind in TRAINED_DAMAGE if kind != "shift"] + [("shift", step) for step in (16, 64, 128, -16, -64, -128)]
    rows = []
    for kind, shift in cases:
        right_by_layer = []
        for layer in range(SLIDING_LAYERS + 1):
            per_item = [(layer, kind, shift, at) for at in range(len(prompts))]
            answers = answers_of(network, tokenizer, [p.text for p in prompts], batch_tokens, per_item)
            right_by_layer.append(sum(right(tokenizer, p, a) for p, a in zip(prompts, answers, strict=True)))
        rows.append({"kind": f"{kind} {shift:+d}" if shift else kind, "right_by_layer": right_by_layer})
    return {"damaged_prompts": len(prompts), "damage": rows}


def _others(network: RecallNetwork, tokenizer: Tokenizer, seed: int, held_out: int, batch_tokens: int) -> dict:
    rng = random.Random(f"others/{seed}")
    texts = [other_conversation(rng, rng.choice((60, 250, 1000))).turns[0][0] for _ in range(min(held_out, 504))]
    answers = answers_of(network, tokenizer, texts, batch_tokens, new_tokens=24)
    return {"other_texts": len(texts), "other_neutral": sum(tokenizer.decode(answer[:-1]) == NEUTRAL_ANSWER for answer in answers)}
