"""The hand-off of a run: where its layer geometry comes from, whether the engines' logs agree, and predicted against moved KV bytes."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from pdlaunch.errors import ArchiveError, LaunchError
from pdlaunch.geometry import LayerKind, heads_per_rank, layer_kinds
from pdlaunch.node.spec import SpecError, TransferPrediction, from_json
from pdlaunch.planner.config import load_config
from pdlaunch.runread import Run
from pdlaunch.runs import answers, counter

_ACTIVE = re.compile(r"per-region KV heads active: rank=(\d+)/(\d+) regions=(\d+) heads=(\S+)")


def per_rank_heads(run: Run, role: str) -> tuple[dict[int, int], str] | None:
    """({KV heads per rank: regions}, source) from the line that the per-region patch logs once per rank; None when there is none."""
    for engine in run.engines(role):
        path = run.path / "logs" / f"{engine['name']}.log"
        try:
            data = run.files.read(path)
        except (FileNotFoundError, ArchiveError):
            continue
        for number, line in enumerate(data.decode("utf-8", "replace").splitlines(), 1):
            match = _ACTIVE.search(line)
            if match:
                pairs = [part.split("x") for part in match.group(4).split(",")]
                found = {int(heads): int(n) for heads, n in pairs if heads.isdigit()}
                return found, f"logs/{path.name}:{number}"
    return None


def kinds_of(run: Run, root: Path) -> tuple[list[LayerKind], str]:
    """(kinds, source): the model configuration of the run where it can be found, else ([], why not).

    Looked for: model_config.json of the run, config.json in the model folder of spec.json, and models/configs/<name>.json of this
    repository.
    """
    model = run.spec["model"]
    short = model["id"].rsplit("/", 1)[-1].lower()
    places = (run.path / "model_config.json", Path(model["path"]) / "config.json", root / model["id"] / "config.json",
              root / "models" / "configs" / f"{short}.json")  # fmt: skip
    for path in places:
        if not path.is_file():
            continue
        try:
            if path.is_relative_to(run.path):
                run.files.read(path)
            kinds = layer_kinds(load_config(path))
        except (LaunchError, OSError, ValueError, TypeError) as e:
            return [], f"{path}: {e}"
        inside = next((base for base in (run.path, root) if path.is_relative_to(base)), None)
        shown = path if inside is None else path.relative_to(inside)
        return kinds, f"{shown}" + ("" if inside == run.path else " (outside the archive)")
    return [], "no model configuration: neither in the run, nor in the model's folder, nor in models/configs"


def log_agrees(run: Run, role: str, kinds: list[LayerKind], tp: int) -> str:
    """What the engine's own log says of its regions against the configuration: agrees, differs, or nothing was logged. With source."""
    logged = per_rank_heads(run, role)
    if logged is None:
        return f"{role}: no per-region line in the log (stock connector, or nothing was handed over)"
    found, source = logged
    expected: Counter[int] = Counter()
    for kind in kinds:
        expected[heads_per_rank(kind.kv_heads, tp)] += len(kind.layers)
    # one region per layer, or K and V apart
    scaled = {h: n * 2 for h, n in expected.items()}
    same = found == dict(expected) or found == scaled
    said = ", ".join(f"{n} regions of {h}" for h, n in sorted(found.items(), reverse=True))
    return f"{role}: the log {'agrees' if same else 'DIFFERS'}: {said} KV heads per rank ({source})"


@dataclass(frozen=True)
class Moved:
    """KV bytes between two snapshots. predicted None: no prediction, or answers without token counts (why says so)."""

    name: str
    prompts: int
    predicted: int | None
    moved: float | None
    why: str
    source: str


def prediction_of(run: Run) -> TransferPrediction | None:
    """The prediction in spec.json; None when there is none or it is unreadable."""
    raw = run.spec["proof"].get("prediction")
    if raw is None:
        return None
    try:
        return from_json(TransferPrediction, raw, "proof.prediction")
    except SpecError:
        return None


def transfers(run: Run) -> list[Moved]:
    """Bytes per interval between the snapshots of the decode engines: ready, before_load, after_load, end.

    evidence.json's own windows (node/transfer.py) where they are; else predicted from the prompt tokens of every answered request of the
    interval (gate, recall, behaviour, agreement, load with its warm-up); moved from vllm:nixl_bytes_transferred_sum. A prefix-cache hit
    moves less, a retry more: equal is the proof, unequal needs a reason.
    """
    judged = _from_evidence(run)
    if judged:
        return judged
    rows = answers(run)
    before = ("gate.jsonl", "recall/before.jsonl", "behaviour.jsonl", "agreement.jsonl")
    intervals = (
        ("before load", "ready", "before_load", before, False),
        ("during load", "before_load", "after_load", ("recall/during.jsonl",), True),
        ("after load", "after_load", "end", ("recall/after.jsonl",), False),
    )
    prediction, found = prediction_of(run), []
    for name, first, last, files, with_load in intervals:
        asked = [r for f in files for r in rows.get(f, []) if not r.get("error") and r.get("status") == 200]
        tokens: Counter[int] = Counter(int(r["prompt_tokens"]) for r in asked if r.get("prompt_tokens") is not None)
        unknown = sum(r.get("prompt_tokens") is None for r in asked)
        if with_load:
            for phase in run.phases:
                tokens.update(dict(phase.prompt_tokens))
        moved = _moved(run, first, last)
        if moved is None and not tokens:
            continue
        predicted, why = None, ""
        if prediction is None:
            why = "spec.json holds no prediction"
        elif unknown:
            why = f"{unknown} answers without a token count"
        else:
            predicted = sum(prediction.bytes_of_prompt(t) * n for t, n in tokens.items())
        if moved is None:
            why = f"no {first} or {last} snapshot of a decode engine"
        found.append(Moved(name, sum(tokens.values()) + unknown, predicted, moved, why, f"metrics/decode-*.{first}.prom to .{last}.prom"))
    return found


_WINDOW = re.compile(r"^transfer\.decode\.([a-z_]+)-([a-z_]+)\.bytes$")
_NAMES = {"ready-before_load": "before load", "before_load-after_load": "during load", "after_load-end": "after load"}


def _from_evidence(run: Run) -> list[Moved]:
    """The windows that the run's own evidence holds, in the order of the run; empty when it holds none."""
    found = []
    for key, moved in run.evidence.items():
        match = _WINDOW.match(key)
        if match is None:
            continue
        window, prefix = f"{match.group(1)}-{match.group(2)}", key.removesuffix(".bytes")
        predicted, doubt = run.evidence.get(f"{prefix}.predicted_bytes"), run.evidence.get(f"{prefix}.not_exact")
        prompts = (run.evidence.get(f"{prefix}.requests_counted") or {}).get("value") or 0
        why = str(doubt["value"]) if doubt else "" if predicted else "no prediction in evidence.json"
        name = _NAMES.get(window, window.replace("-", " to ").replace("_", " "))
        source = f"evidence.json {key} ({moved['source']})"
        found.append(Moved(name, int(prompts), int(predicted["value"]) if predicted else None, float(moved["value"]), why, source))
    order = list(_NAMES.values())
    return sorted(found, key=lambda m: order.index(m.name) if m.name in order else len(order))


def _moved(run: Run, first: str, last: str) -> float | None:
    total = 0.0
    engines = run.engines("decode")
    for engine in engines:
        pair = [counter(run, engine["name"], when, "vllm:nixl_bytes_transferred_sum") for when in (first, last)]
        if pair[0] is None or pair[1] is None:
            return None
        total += pair[1] - pair[0]
    return total if engines else None
