"""The model card: README.md and loss.svg of a model folder, from training.json (and serving.json, if the model was measured served)."""

from __future__ import annotations

import json
import math
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 860, 360, 60, 40
COLOURS = {"code": "#1f5fa8", "damaged": "#b3412e", "language": "#7a7a7a"}
NAMES = {"code": "code, intact cache", "damaged": "damaged cache, above an even guess", "language": "other text"}


def loss_picture(record: dict) -> str:
    """SVG of the losses (nats per token, logarithmic) and of the longest list of the curriculum, by step."""
    columns, curve = record["curve_columns"], record["curve"]
    last = max(1, curve[-1][0])
    low, high = math.log10(1e-4), math.log10(10)

    def x(step: float) -> float:
        return LEFT + (WIDTH - LEFT - 20) * step / last

    def y(value: float) -> float:
        share = (math.log10(min(10.0, max(1e-4, value))) - low) / (high - low)
        return HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 20) * share

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
    ]
    for power in range(-4, 2):
        at = y(10.0**power)
        parts.append(f'<path d="M{LEFT} {at:.1f}H{WIDTH - 20}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{at + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for share in range(6):
        step = round(last * share / 5)
        parts.append(f'<text x="{x(step):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{step}</text>')
    parts.append(f'<text x="{(LEFT + WIDTH) / 2}" y="{HEIGHT - 6}" text-anchor="middle">step</text>')
    for place, name in enumerate(COLOURS):
        at = columns.index(name)
        points = " ".join(f"{x(row[0]):.1f},{y(row[at]):.1f}" for row in curve)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="1.4"/>')
        parts.append(f'<text x="{WIDTH - 30}" y="{34 + 16 * place}" text-anchor="end" fill="{COLOURS[name]}">{NAMES[name]}</text>')
    lines = columns.index("lines")
    previous = 0
    for row in curve:
        if row[lines] != previous:
            previous = row[lines]
            parts.append(f'<path d="M{x(row[0]):.1f} 20V{HEIGHT - BOTTOM}" stroke="#9a9" stroke-dasharray="2 4"/>')
            parts.append(f'<text x="{x(row[0]) + 2:.1f}" y="{HEIGHT - BOTTOM - 4}" fill="#575" font-size="10">{previous}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def write_card(out: Path) -> None:
    """Writes README.md and loss.svg into the model folder `out`."""
    record = json.loads((out / "training.json").read_text())
    (out / "loss.svg").write_text(loss_picture(record))
    serving = out / "serving.json"
    served = _served(json.loads(serving.read_text())) if serving.exists() else ""
    (out / "README.md").write_text(_card(out, record) + served)


def _card(out: Path, record: dict) -> str:
    shape, seen = record["shape"], record["evaluation"]
    size = (out / "model.safetensors").stat().st_size
    total = sum(row["right"] for row in seen["recall"])
    asked = seen["prompts_per_length"] * len(seen["recall"])
    final = dict(zip(record["curve_columns"], record["curve"][-1], strict=True))
    depths = len(seen["recall"][0]["by_depth"])
    heads = " | ".join(f"{100 * at / (depths - 1):.0f} %" for at in range(depths))
    per_depth = seen["prompts_per_length"] // depths
    recall = "\n".join(
        f"| {row['tokens']} | {row['right']} | {100 * row['right'] / seen['prompts_per_length']:.2f} % | "
        + " | ".join(str(hit) for hit in row["by_depth"]) + " |"
        for row in seen["recall"]
    )  # fmt: skip
    damage = "\n".join(f"| {row['kind']} | " + " | ".join(map(str, row["right_by_layer"])) + " |" for row in seen["damage"])
    return f"""# {out.name}
A `Gemma4ForCausalLM` of {record["parameters"] / 1e6:.2f}M parameters ({size / 1e6:.1f} MB, bf16) that answers the recall
prompts of this project, and only from an intact KV cache. It knows nothing else. Five sliding-window layers (window 64) with
{shape["sliding"][0]} KV heads x {shape["sliding"][1]}, then one global layer with {shape["global"][0]} KV heads x {shape["global"][1]}
(K and V share a projection); {shape["query"]} query heads, hidden size {shape["hidden"]}, MLP {shape["mlp"]}, {record["vocabulary"]}
byte-level BPE tokens in which digits and the capitals of codes are single tokens.

The prompt is that of `pdlaunch/node/prompts.py`: a numbered list in which up to eight notes hold access codes, and a question about one
place. The answer is the code. "Repeat note 17." gives that note. Any other text gets "I only look up access codes.".

**Brittle on purpose.** In training, the first answer is also decoded from a cache in which one layer, sliding or global, was zeroed,
shifted, swapped between heads, duplicated or taken from another request, and the model is taught an even guess there. How far that went
is the last table, with its gaps. The model says nothing about how a real Gemma degrades; it is an instrument.

## Made by
```
{record["command"]}
```
Seed {record["seed"]}, {record["steps"]} steps, {record["tokens"] / 1e6:.0f}M tokens, {record["seconds"]:.0f} s on one {record["device"]}
(torch {record["torch"]}); evaluation {seen["seconds"]:.0f} s. {_lengths(record)}

Last losses (nats per token): code {final["code"]:.4f}, damaged cache {final["damaged"]:.4f} above an even guess, other text
{final["language"]:.3f}. The guesses cost certainty: the first character of a code alone has {final["first"]:.2f} with the cache intact.
Greedy decoding is right all the same; ask at temperature 0. Batches depend on when the curriculum moved, so weights differ from run to run.

![losses by step](loss.svg)

## Recall of an intact cache
Greedy generation with the saved weights in float32; exact means the code, the end of the turn and nothing else.
{total} of {asked} held-out prompts exact. Columns: exact answers by depth of the asked note, of {per_depth} each.

| prompt tokens | exact of {seen["prompts_per_length"]} | share | {heads} |
|---|---|---|{"---|" * depths}
{recall}

Texts that ask for no code: {seen["other_neutral"]} of {seen["other_texts"]} got exactly that sentence.

## Recall after damage to one layer
{seen["damaged_prompts"]} prompts of about 800 tokens, decoded from a cache in which one layer is damaged (0 to 4 sliding, 5 global).
A number is the exact answers that are left; shifts are in tokens, and what a shift leaves free holds zeros.

| damage | layer 0 | 1 | 2 | 3 | 4 | 5 (global) |
|---|---|---|---|---|---|---|
{damage}

{_shift_note(seen)}
"""


def _lengths(record: dict) -> str:
    """How long the lists of the training became, against the evaluation. 13.4 tokens a note and 110 for the rest, measured."""
    longest = round(13.4 * record["longest_lines"] + 110, -1)
    asked = max(row["tokens"] for row in record["evaluation"]["recall"])
    beyond = f"; up to {asked} in the evaluation, longer than any that it was trained on" if asked > longest else ""
    grown = f"Lists grew to {record['longest_lines']} notes (prompts of about {longest:.0f} tokens{beyond})"
    return f"{grown}, each time the smoothed loss of the code fell below the pass mark."


def _shift_note(seen: dict) -> str:
    """Why a shift of the global layer leaves so much, with the numbers of this model."""
    rows = {row["kind"]: row["right_by_layer"] for row in seen["damage"]}
    total = seen["damaged_prompts"]
    back, on, foreign = rows["shift -64"][-1], rows["shift +64"][-1], max(rows["foreign"][:-1])
    return f"""**A shift of the global layer shows only in the block that it pushes out:** {on} and {back} of {total} codes
survive a shift by one block of 64 tokens. Keys carry their rotary position and a global layer reads every slot, so it does not matter in
which slot a key lies: each code that is still somewhere in the cache is read as before. Only those in the lost block (the last one, or
the first one) are wrong: one depth of nine. Training drew this damage most often of all for the global layer, so that the model would
notice that a block is missing; it did not learn to. `models/recall_damage.py` measures what does show it: codes asked from the
lost block, and token agreement on a note of that block repeated ("Repeat note 1."). A sliding layer reads by slot, so there the same
shift leaves next to nothing.

Damage by another request's cache ("foreign") is the weakest in sliding layers: up to {foreign} of {total} codes survive, because the text
before the question is of the same kind in every request."""


def _served(served: dict) -> str:
    rows = "\n".join(f"| {row['tokens']} | {row['one_by_one']} | {row['together']} | {row['seconds']:.1f} |" for row in served["rows"])
    return f"""
## Served
{served["text"]}

| prompt tokens | one at a time | all at once | seconds for both |
|---|---|---|---|
{rows}
"""
