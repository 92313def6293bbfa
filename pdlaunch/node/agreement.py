"""Agreement: the deployment and an aggregated control engine must give the same greedy answer to the same prompt, token for token.

dynamo#1204: right with decode only, nonsense as soon as prefill joins. Recall sees one code; this sees every token.
"""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .chat import Chat
from .prompts import RecallPrompt, recall_prompts
from .spec import AgreementSpec

TOKEN_KEYS = {"logprobs": True, "return_tokens_as_token_ids": True}
"""Ask for the ids of the sampled tokens (vLLM and Dynamo 1.6.1 accept both keys); an endpoint that refuses them is compared by text."""


@dataclass(frozen=True)
class AgreementResult:
    """asked: pairs that were to be compared. rows: two per pair, deployment first; the control row carries the comparison."""

    asked: int
    equal: int
    stopped: bool
    rows: tuple[dict[str, Any], ...]
    path: Path

    @property
    def passed(self) -> bool:
        return self.equal == self.asked


def agreement_prompts(spec: AgreementSpec, run_seed: str) -> list[RecallPrompt]:
    """spec.prompts recall prompts whose lengths go round spec.prompt_tokens."""
    lengths = spec.prompt_tokens
    counts = [spec.prompts // len(lengths) + (i < spec.prompts % len(lengths)) for i in range(len(lengths))]
    by_length = [recall_prompts(f"{run_seed}/agreement/{n}", count, n) for n, count in zip(lengths, counts, strict=True) if count]
    return [by_length[i % len(lengths)][i // len(lengths)] for i in range(spec.prompts)]


def run_agreement(
    base_url: str, control_url: str, model: str, spec: AgreementSpec, run_seed: str, out: Path, timeout_s: float, stop: threading.Event
) -> AgreementResult:
    """Ask both, one prompt after the other, and write two rows per prompt to the file `out`. Never raises for a bad answer."""
    deployment, control = Chat(base_url, model, timeout_s, stop), Chat(control_url, model, timeout_s, stop)
    rows: list[dict[str, Any]] = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for number, prompt in enumerate(agreement_prompts(spec, run_seed)):
            if stop.is_set():
                break
            pair = []
            for target, chat in (("deployment", deployment), ("control", control)):
                answer, row = chat.ask(prompt.text, spec.max_tokens, **TOKEN_KEYS)
                pair.append({"prompt": number, "lines": prompt.lines, **row, "target": target, "tokens": answer.tokens})
            pair[1] |= compare(*pair)
            rows += pair
            for row in pair:
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    return AgreementResult(spec.prompts, sum(row.get("equal", False) for row in rows), stop.is_set(), tuple(rows), out)


def compare(deployment: dict[str, Any], control: dict[str, Any]) -> dict[str, Any]:
    """{equal, compared: "tokens"|"text"|"nothing", first_difference, why}; two answers of which one failed are never equal."""
    for row in (deployment, control):
        if row["error"]:
            return {"equal": False, "compared": "nothing", "first_difference": None, "why": f"{row['target']}: {row['error']}"}
    if deployment["tokens"] and control["tokens"]:
        unit, left, right = "tokens", list(deployment["tokens"]), list(control["tokens"])
    else:
        unit, left, right = "text", list(deployment["reasoning"] + deployment["content"]), list(control["reasoning"] + control["content"])
    if not left and not right:
        return {"equal": False, "compared": "nothing", "first_difference": None, "why": "both answers are empty"}
    first = next((i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b), min(len(left), len(right)))
    if left == right:
        return {"equal": True, "compared": unit, "first_difference": None, "why": ""}
    shown = f"{deployment['content'][:80]!r} against {control['content'][:80]!r}"
    return {"equal": False, "compared": unit, "first_difference": first, "why": f"first differing {unit.rstrip('s')} {first}: {shown}"}
