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
from multiprocessing.pool import AsyncResult
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import nn
from torch.nn import functional
from torch.utils.data import DataLoader, IterableDataset
from transformers import Gemma4ForCausalLM, PreTrainedTokenizerFast

from models.recall_card import write_card
from models.recall_eval import evaluate, evaluation_jobs, held_out_prompts
from models.recall_network import GEOMETRIES, SLIDING_LAYERS, RecallNetwork, build_model
from models.recall_text import (
    BOS,
    CHAT_TEMPLATE,
    EOS,
    LANGUAGE_ROWS,
    PAD,
    SCORED_ROWS,
    SPECIALS,
    TURN_END,
    UNKNOWN,
    Batches,
    Stage,
    build_tokenizer,
    character_ids,
    fields,
    stages,
)
from pdlaunch.node.prompts import CODE_CHARS, PLACES

PASS_LOSS = 0.1
LEAST_STEPS = 40
READ_EVERY = 10
LOSSES = ("answer", "language", "code", "first", "damaged", "attention", "probe", "gradient_norm")


class Stream(IterableDataset):
    """Packed batches drawn in worker processes; `present` is the curriculum's stage, shared with the training loop."""

    def __init__(self, plan: list[Stage], heads: tuple[int, int], seed: str, tokenizer: Tokenizer, present: Synchronized) -> None:
        self.plan, self.heads, self.seed, self.tokenizer, self.present = plan, heads, seed, tokenizer.to_str(), present

    def __iter__(self) -> Iterator[tuple[int, np.ndarray]]:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"
        worker = torch.utils.data.get_worker_info()
        batches = Batches(Tokenizer.from_str(self.tokenizer), f"{self.seed}/{worker.id if worker else 0}", self.heads, SLIDING_LAYERS + 1)
        while True:
            number = self.present.value
            arrays = batches.draw(self.plan[number])
            order = fields(self.plan[number], self.heads)
            yield number, np.concatenate([arrays[name].ravel() for name in order]).astype(np.int32)


class Losses(nn.Module):
    """The losses of a batch. Two probes exist only in training: they ask the hidden state that enters the global layer for the place and
    the index of a code character, on the side of the list and on the side of the answer, so that keys and queries can find each other.
    """

    def __init__(self, network: RecallNetwork) -> None:
        super().__init__()
        self.network = network
        hidden = network.model.model.embed_tokens.embedding_dim
        self.place, self.index = nn.Linear(hidden, len(PLACES)), nn.Linear(hidden, CODE_CHARS)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Means in nats: answer (all answers), language (all other text), code (the first answer, a code), first (its first character),
        damaged (that character from a damaged cache, above an even guess), attention (of the last layer, to the wanted token), probe."""
        tokens, rows, start = batch["tokens"], batch["rows"], batch["start"]
        kept, entering = self.network.prefill(tokens)
        logits, attention = self.network.read_out(kept, entering, rows, slice(LANGUAGE_ROWS, LANGUAGE_ROWS + SCORED_ROWS))
        target = tokens.gather(1, rows + 1)
        each = functional.cross_entropy(logits.flatten(0, 1), target.flatten(), reduction="none").view_as(target)
        asked = (batch["asked_place"] >= 0).float()
        code = each[:, LANGUAGE_ROWS : LANGUAGE_ROWS + CODE_CHARS]
        guess = self.network.decode(kept, tokens.gather(1, start[:, None]), start, batch)[:, 0].log_softmax(-1)
        surplus = -guess.index_select(1, self.network.characters).mean(-1) - math.log(len(self.network.characters))
        wanted = batch["target"]
        seen = attention.mean(1).gather(2, wanted.clamp(min=0)[..., None])[..., 0]
        return {
            "answer": _mean(each, batch["answer"]),
            "language": _mean(each, batch["language"]),
            "code": _mean(code.mean(1), asked),
            "first": _mean(code[:, 0], asked),
            "damaged": _mean(surplus, asked),
            "attention": _mean(-seen, wanted >= 0),
            "probe": self._probe(batch, entering),
        }

    def _probe(self, batch: dict[str, torch.Tensor], entering: torch.Tensor) -> torch.Tensor:
        steps = torch.arange(CODE_CHARS, device=entering.device)
        firsts = torch.cat((batch["code_at"], batch["start"][:, None]), 1)
        places = torch.cat((batch["code_place"], batch["asked_place"][:, None]), 1)[..., None].expand(-1, -1, CODE_CHARS)
        at = (firsts.clamp(min=0)[..., None] + steps).flatten(1)
        x = entering.gather(1, at[..., None].expand(-1, -1, entering.shape[-1]))
        x = functional.rms_norm(x.float(), x.shape[-1:])
        counted = ((places >= 0) & (firsts >= 0)[..., None]).flatten()
        by_place = functional.cross_entropy(self.place(x).float().flatten(0, 1), places.flatten().clamp(min=0), reduction="none")
        by_index = functional.cross_entropy(self.index(x).float().flatten(0, 1), steps.expand(*places.shape).flatten(), reduction="none")
        return _mean(by_place + by_index, counted)


def _mean(values: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    return (values * weights).sum() / weights.sum().clamp(min=1)


class Trainer:
    """One optimizer step of a batch; on a GPU replayed from a CUDA graph per stage, as launches cost more than so small a model's work."""

    def __init__(self, losses: Losses, plan: list[Stage], device: torch.device, lr: float) -> None:
        self.losses, self.plan, self.device = losses, plan, device
        self.on_gpu = device.type == "cuda"
        self.parameters = list(losses.parameters())
        # Of these, only the rate and the two weights of `controls` change between replays, so they are tensors.
        self.rate = torch.tensor(0.0, device=device)
        self.controls = torch.zeros(2, device=device)
        groups = [
            {"params": [p for p in self.parameters if p.ndim > 1], "weight_decay": 0.01, "lr": self.rate},
            {"params": [p for p in self.parameters if p.ndim < 2], "weight_decay": 0.0, "lr": self.rate},
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=self.rate, betas=(0.9, 0.98), fused=self.on_gpu, capturable=self.on_gpu)
        self.lr = lr
        self.graphs: dict[int, tuple[torch.cuda.CUDAGraph, torch.Tensor, torch.Tensor]] = {}

    def step(self, number: int, packed: torch.Tensor, rate: float, guided: float, brittle: float) -> torch.Tensor:
        """Runs one step; returns the values of LOSSES on the device, valid until the next step."""
        self.rate.fill_(self.lr * rate)
        self.controls.copy_(torch.tensor([guided, brittle]))
        if not self.on_gpu:
            return self._work(number, packed)
        if number not in self.graphs:
            self._capture(number, packed)
        graph, held, values = self.graphs[number]
        held.copy_(packed, non_blocking=True)
        graph.replay()
        return values

    def _capture(self, number: int, packed: torch.Tensor) -> None:
        held = packed.to(self.device)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(3):
                self._work(number, held)
        torch.cuda.current_stream().wait_stream(side)
        self.optimizer.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        pool = next((kept.pool() for kept, _, _ in self.graphs.values()), None)
        with torch.cuda.graph(graph, pool=pool):
            values = self._work(number, held)
        self.graphs[number] = (graph, held, values)

    def _work(self, number: int, packed: torch.Tensor) -> torch.Tensor:
        shapes = fields(self.plan[number], self.losses.network.heads)
        parts = packed.split([math.prod(shape) for shape in shapes.values()])
        batch = {name: part.view(shape).long() for (name, shape), part in zip(shapes.items(), parts, strict=True)}
        with torch.autocast(self.device.type, torch.bfloat16, enabled=self.on_gpu, cache_enabled=False):
            seen = self.losses(batch)
        total = seen["answer"] + 0.05 * seen["language"] + self.controls[1] * seen["damaged"]
        total = total + self.controls[0] * (0.3 * seen["attention"] + 0.3 * seen["probe"])
        self.optimizer.zero_grad(set_to_none=True)
        total.backward()
        norm = nn.utils.clip_grad_norm_(self.parameters, 1.0)
        self.optimizer.step()
        return torch.stack([*seen.values(), norm]).detach()


def train(options: argparse.Namespace, network: RecallNetwork, tokenizer: Tokenizer, device: torch.device) -> dict:
    """Runs the curriculum to its number of steps or seconds, whichever ends first. Returns the record that the card shows."""
    plan = stages(options.lines, options.batch_tokens)
    present = multiprocessing.Value("i", min(options.first_stage, len(plan) - 1))
    stream = Stream(plan, network.heads, f"train/{options.seed}/{options.first_stage}", tokenizer, present)
    loader = DataLoader(stream, batch_size=None, num_workers=options.workers, pin_memory=device.type == "cuda", prefetch_factor=4)
    trainer = Trainer(Losses(network).to(device), plan, device, options.lr)
    began = time.monotonic()
    brittle_from = 0 if options.start_from else None
    smooth, passed_step, curve, step, tokens_seen = 3.0, 0, [], 0, 0
    for step, (number, packed) in enumerate(loader):
        spent = time.monotonic() - began
        progress = max(step / options.steps, spent / options.max_seconds)
        if progress >= 1.0:
            break
        rate = min(1.0, (step + 1) / 150) * (1.0 if progress < 0.6 else max(0.02, 0.5 + 0.5 * math.cos(math.pi * (progress - 0.6) / 0.4)))
        brittle = 0.0 if brittle_from is None else options.damage_weight * min(1.0, (step - brittle_from) / 300)
        values = trainer.step(int(number), packed, rate, max(0.0, 1.0 - progress / 0.6), brittle)
        tokens_seen += plan[int(number)].size * plan[int(number)].width
        if step % READ_EVERY:
            continue
        read = values.tolist()
        if not math.isfinite(sum(read)):
            raise SystemExit(f"a loss is not finite at step {step}: {dict(zip(LOSSES, read, strict=True))}")
        if int(number) == present.value:
            smooth += 0.4 * (read[2] - smooth)
        if smooth < PASS_LOSS and step - passed_step >= LEAST_STEPS and present.value < len(plan) - 1:
            present.value, passed_step, smooth = present.value + 1, step, 1.0
            brittle_from = step if brittle_from is None and present.value >= 2 else brittle_from
            print(f"step {step} {spent:.1f} s: lists of up to {plan[present.value].lines} lines", flush=True)
        if step % 20 == 0:
            curve.append([step, plan[int(number)].lines, *(round(value, 4) for value in read)])
        if step % 100 == 0:
            print(
                f"step {step} {spent:.1f} s lines {plan[int(number)].lines} rate {rate:.2f} " + " ".join(f"{v:.3f}" for v in read),
                flush=True,
            )
        if spent > options.stall_seconds and present.value == options.first_stage:
            raise SystemExit(f"the shortest lists are not learnt after {spent:.0f} s: no model is written")
    return {
        "steps": step, "seconds": round(time.monotonic() - began, 1), "tokens": tokens_seen, "longest_lines": plan[present.value].lines,
        "curve_columns": ["step", "lines", *LOSSES], "curve": curve,
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
    parser.add_argument("--first-stage", type=int, default=0, help="stage of the curriculum to start at")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--steps", type=int, default=6000)
    parser.add_argument("--max-seconds", type=float, default=3600.0, help="the schedule is compressed to end by then")
    parser.add_argument("--stall-seconds", type=float, default=math.inf, help="give up if the first stage of the curriculum lasts longer")
    parser.add_argument("--batch-tokens", type=int, default=40960)
    parser.add_argument("--lines", type=int, default=160, help="longest list of the curriculum; about 13.4 tokens a line")
    parser.add_argument("--lr", type=float, default=1.2e-3)
    parser.add_argument("--damage-weight", type=float, default=0.6)
    parser.add_argument("--workers", type=int, default=12)
    parser.add_argument("--held-out", type=int, default=1008, help="prompts of each length in the evaluation, a multiple of 126 (or 9)")
    parser.add_argument("--evaluation-tokens", type=int, default=131072, help="tokens of a batch of the evaluation")
    parser.add_argument("--card-only", action="store_true", help="write the card again from training.json and serving.json")
    return parser.parse_args(arguments)


def main() -> None:
    options = parse()
    if options.card_only:
        write_card(options.out)
        return
    tokenizer = build_tokenizer(options.seed)
    # Forked before CUDA starts; the prompts of the evaluation are drawn while the model trains.
    with multiprocessing.Pool(min(8, max(1, options.workers // 2))) as pool:
        asked = pool.starmap_async(held_out_prompts, evaluation_jobs(tokenizer, options.seed, options.held_out), chunksize=1)
        _make(options, tokenizer, asked)


def _make(options: argparse.Namespace, tokenizer: Tokenizer, asked: AsyncResult) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(options.seed)
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = build_model(options.geometry, tokenizer.get_vocab_size(), [EOS, TURN_END]).to(device)
    if options.start_from:
        model.load_state_dict(Gemma4ForCausalLM.from_pretrained(options.start_from, dtype=torch.float32).state_dict())
    network = RecallNetwork(model, character_ids(tokenizer)).to(device)
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
    record["evaluation"] = evaluate(network, tokenizer, options.seed, options.evaluation_tokens, asked.get(600))
    (options.out / "training.json").write_text(json.dumps(record, separators=(",", ":")) + "\n")
    write_card(options.out)
    print(json.dumps(record["evaluation"], indent=1))


if __name__ == "__main__":
    main()
