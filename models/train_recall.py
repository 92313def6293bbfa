"""Trains a recall model: a tiny Gemma4 that answers the recall prompts of this project, and only from an intact KV cache.

    python -m models.train_recall --geometry 4x1 --out models/gemma4-recall-4x1

Needs torch, transformers and tokenizers; a GPU makes it minutes. Two things are taught at once: the right code from an intact cache, and
nothing (an even guess) when the K and V of any one layer are zeroed, shifted, swapped between heads or taken from another request. The
first answer character is then wrong in 35 of 36 cases, whichever kind of region was damaged. The architecture stays plain Gemma4.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import multiprocessing
import os
import shlex
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from tokenizers import Tokenizer
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import Gemma4ForCausalLM, PreTrainedTokenizerFast

from models.recall_card import write_card
from models.recall_eval import evaluate
from models.recall_network import GEOMETRIES, SLIDING_LAYERS, RecallNetwork, build_model, compile_parts
from models.recall_text import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    LANGUAGE_ROWS,
    PAD,
    SPECIALS,
    TURN_END,
    UNKNOWN,
    Batches,
    build_tokenizer,
    character_ids,
)
from pdlaunch.node.prompts import CODE_CHARS

PASS_LOSS = 0.12
GROWTH = 1.3


class Stream(IterableDataset):
    """Batches drawn in worker processes; `limit` is the curriculum's present number of lines, shared with the training loop."""

    def __init__(self, options: argparse.Namespace, tokenizer: Tokenizer, limit: multiprocessing.sharedctypes.Synchronized) -> None:
        self.options, self.tokenizer, self.limit = options, tokenizer.to_str(), limit

    def __iter__(self) -> Iterator[dict]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker = torch.utils.data.get_worker_info()
        shape = GEOMETRIES[self.options.geometry]
        seed = f"train/{self.options.seed}/{worker.id if worker else 0}"
        tokenizer = Tokenizer.from_str(self.tokenizer)
        batches = Batches(tokenizer, seed, self.options.batch_tokens, shape["sliding"][0], shape["global"][0], SLIDING_LAYERS + 1)
        while True:
            yield batches.draw(self.limit.value)


def losses_of(network: RecallNetwork, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Mean losses in nats: answer (all answers), language (all other text), code (the first answer, a code), first (its first character),
    damaged (the first character from a damaged cache, above an even guess)."""
    tokens, rows, start = batch["tokens"], batch["rows"], batch["start"]
    kept, logits = network.prefill(tokens, rows)
    target = tokens.gather(1, rows + 1)
    each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
    code_first = batch["code_first"]
    codes = code_first.sum().clamp(min=1.0)
    code = each[:, LANGUAGE_ROWS : LANGUAGE_ROWS + CODE_CHARS]
    guess = network.decode(kept, tokens.gather(1, start[:, None]), start, batch)[:, 0].log_softmax(-1)
    surplus = -guess[:, network.characters].mean(-1) - math.log(len(network.characters))
    return {
        "answer": (each * batch["answer"]).sum() / batch["answer"].sum(),
        "language": (each * batch["language"]).sum() / batch["language"].sum(),
        "code": (code.mean(1) * code_first).sum() / codes,
        "first": (code[:, 0] * code_first).sum() / codes,
        "damaged": (surplus * code_first).sum() / codes,
    }


def train(options: argparse.Namespace, network: RecallNetwork, tokenizer: Tokenizer, device: torch.device) -> dict:
    """Runs the curriculum to its number of steps or seconds, whichever ends first. Returns the record that the card shows."""
    limit = multiprocessing.Value("i", min(options.first_lines, options.lines))
    loader = DataLoader(Stream(options, tokenizer, limit), batch_size=None, num_workers=options.workers, pin_memory=device.type == "cuda")
    decayed = [p for p in network.model.parameters() if p.ndim > 1]
    plain = [p for p in network.model.parameters() if p.ndim < 2]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=options.lr, betas=(0.9, 0.98), fused=device.type == "cuda")
    began = time.monotonic()
    passed_at = -300 if options.start_from else None
    smooth, passed_step, curve, step, tokens_seen = 4.0, 0, [], 0, 0
    for step, host in enumerate(loader):
        spent = time.monotonic() - began
        progress = max(step / options.steps, spent / options.max_seconds)
        if progress >= 1.0:
            break
        if spent > options.stall_seconds and limit.value == options.first_lines < options.lines:
            raise SystemExit(f"the shortest lists are not learnt after {spent:.0f} s: no model is written")
        batch = {name: value.to(device, non_blocking=True) for name, value in host.items()}
        warm = min(1.0, (step + 1) / 200)
        rate = warm if progress < 0.6 else max(0.02, 0.5 + 0.5 * math.cos(math.pi * (progress - 0.6) / 0.4))
        for group in optimizer.param_groups:
            group["lr"] = options.lr * rate
        brittle = 0.0 if passed_at is None else options.damage_weight * min(1.0, (step - passed_at) / 300)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            losses = losses_of(network, batch)
        total = losses["answer"] + 0.05 * losses["language"] + brittle * losses["damaged"]
        optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = torch.nn.utils.clip_grad_norm_(network.model.parameters(), 1.0)
        optimizer.step()
        tokens_seen += host["tokens"].numel()
        values = torch.stack([*losses.values(), norm]).tolist()
        smooth += 0.1 * (values[2] - smooth)
        if not math.isfinite(values[0]):
            raise SystemExit(f"the loss is not finite at step {step}")
        if smooth < PASS_LOSS and step - passed_step >= 12 and limit.value < options.lines:
            passed_at = step if passed_at is None else passed_at
            limit.value, passed_step = min(options.lines, math.ceil(limit.value * GROWTH)), step
            print(f"step {step} {spent:.0f} s: lists of up to {limit.value} lines", flush=True)
        if step % 20 == 0:
            curve.append([step, limit.value, *(round(value, 4) for value in values)])
        if step % 100 == 0:
            print(f"step {step} {spent:.0f} s lines {limit.value} lr {rate:.2f} " + " ".join(f"{v:.3f}" for v in values), flush=True)
    return {
        "steps": step, "seconds": round(time.monotonic() - began, 1), "tokens": tokens_seen, "longest_lines": limit.value,
        "curve_columns": ["step", "lines", *losses, "gradient_norm"], "curve": curve,
    }  # fmt: skip


def save(out: Path, network: RecallNetwork, tokenizer: Tokenizer) -> None:
    """Writes weights (bf16), configuration, tokenizer and chat template as vLLM and transformers read them."""
    out.mkdir(parents=True, exist_ok=True)
    copy.deepcopy(network.model).to(torch.bfloat16).save_pretrained(out)
    (out / "model.safetensors").chmod(0o644)
    names = dict(zip(("pad_token", "eos_token", "bos_token", "unk_token"), SPECIALS, strict=False))
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, extra_special_tokens=list(SPECIALS[4:]), **names)
    wrapped.chat_template = CHAT_TEMPLATE
    wrapped.save_pretrained(out)
    generation = {"bos_token_id": BOS, "eos_token_id": [EOS, TURN_END], "pad_token_id": PAD, "do_sample": False}
    (out / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--geometry", choices=sorted(GEOMETRIES), required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder of the model; files of the same names are replaced")
    parser.add_argument("--start-from", type=Path, help="folder of a trained model of the same geometry whose weights to go on from")
    parser.add_argument("--first-lines", type=int, default=12, help="longest list at the start of the curriculum")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--max-seconds", type=float, default=3600.0, help="the schedule is compressed to end by then")
    parser.add_argument("--stall-seconds", type=float, default=math.inf, help="give up if the first stage of the curriculum lasts longer")
    parser.add_argument("--batch-tokens", type=int, default=49152)
    parser.add_argument("--lines", type=int, default=176, help="longest list of the curriculum; 13 tokens a line")
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--damage-weight", type=float, default=0.4)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=1008, help="prompts of each length in the evaluation, a multiple of 9")
    parser.add_argument("--compile", action="store_true", help="fuse element-wise parts with torch.compile")
    parser.add_argument("--card-only", action="store_true", help="write the card again from training.json and serving.json")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.card_only:
        write_card(options.out)
        return
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    tokenizer = build_tokenizer(options.seed)
    model = build_model(options.geometry, tokenizer.get_vocab_size(), [EOS, TURN_END]).to(device)
    if options.start_from:
        model.load_state_dict(Gemma4ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32).state_dict())
    network = RecallNetwork(model, character_ids(tokenizer)).to(device)
    if options.compile:
        compile_parts()
    record = {
        "geometry": options.geometry, "shape": GEOMETRIES[options.geometry], "seed": options.seed,
        "command": "python -m models.train_recall " + shlex.join(sys.argv[1:]),
        "parameters": sum(p.numel() for p in model.parameters()), "vocabulary": tokenizer.get_vocab_size(), "unknown_id": UNKNOWN,
        "device": torch.cuda.get_device_name() if device.type == "cuda" else "CPU", "torch": torch.__version__,
        "options": {name: value for name, value in vars(options).items() if isinstance(value, int | float) and math.isfinite(value)},
    }  # fmt: skip
    record |= train(options, network, tokenizer, device)
    save(options.out, network, tokenizer)
    with torch.no_grad():
        for weight in network.model.parameters():
            weight.copy_(weight.to(torch.bfloat16))
    (options.out / "training.json").write_text(json.dumps(record) + "\n")
    torch.compiler.set_stance("force_eager")
    record["evaluation"] = evaluate(network, tokenizer, options.seed, options.held_out, options.batch_tokens)
    (options.out / "training.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    write_card(options.out)
    print(json.dumps(record["evaluation"], indent=1))


if __name__ == "__main__":
    main()
