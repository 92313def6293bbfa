"""Recall: does the model find the code that each prompt hides? Asked before, during and after load.

Judged by the text alone: vllm#37333 and vllm#50765 answer 200 with noise, vllm#52234 answers with another request's text while the failure
counter stays 0, vllm#52627 corrupts only under load, and nixl#2047 never answers. Each prompt has codes of its own, no prompt of a run is
sent twice, and every raw answer is kept.
"""

from __future__ import annotations

import hashlib
import json
import re
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

from .chat import Chat, answer_row
from .completion import Completion
from .contracts import utc_now
from .prompts import RecallPrompt, foreign_codes, judge, recall_prompts
from .spec import RecallSpec, RecallTime

MAX_HANGS = 2
"""After so many hangs the remaining prompts are not sent: a transfer that is stuck stays stuck, and each costs a whole request timeout."""


@dataclass(frozen=True)
class RecallResult:
    """asked: prompts that were to be sent. rows: what was written to `path`, one per prompt that was sent or given up."""

    when: str
    asked: int
    correct: int
    hangs: int
    leaked: int
    """Answers that hold the code of another prompt."""
    stopped: bool
    rows: tuple[dict[str, Any], ...]
    path: Path

    @property
    def passed(self) -> bool:
        return self.correct == self.asked and not self.leaked


def run_recall(
    base_url: str,
    model: str,
    spec: RecallSpec,
    when: RecallTime,
    run_seed: str,
    out: Path,
    request_timeout_s: float,
    stop: threading.Event,
    *,
    headers: dict[str, str] | None = None,
    on_row: Callable[[dict[str, Any]], None] | None = None,
) -> RecallResult:
    """Ask spec.prompts questions, spec.concurrency at a time, and append one row per answer to out/<when>.jsonl as it arrives.

    run_seed must be new for every run: it makes the codes. A bad answer never raises; a URL of the wrong form is a ValueError, and so is a
    prompt length that no prompt can have.
    """
    url = urlsplit(base_url)
    if url.scheme not in ("http", "https") or not url.hostname:
        raise ValueError(f"{base_url!r} is not an http:// or https:// URL")
    prompts = _prompts(spec, run_seed, when)
    others = _other_times(spec, run_seed, when)
    chat = Chat(base_url, model, request_timeout_s, stop, headers)
    out.mkdir(parents=True, exist_ok=True)
    path = out / f"{when}.jsonl"
    lock = threading.Lock()
    rows: list[dict[str, Any]] = []
    with path.open("w", encoding="utf-8") as file, ThreadPoolExecutor(max_workers=max(1, spec.concurrency)) as pool:

        def one(prompt: RecallPrompt) -> None:
            if stop.is_set():
                return
            hung = sum(row["hang"] for row in rows)
            if hung >= MAX_HANGS:
                answer = answer_row(utc_now(), Completion(error=f"not sent: {hung} requests before it hung"))
            else:
                _, answer = chat.ask(prompt.text, spec.max_tokens)
            row = _row(prompt, prompts, others, answer)
            with lock:
                rows.append(row)
                file.write(json.dumps(row, ensure_ascii=False) + "\n")
                file.flush()
            if on_row is not None:
                on_row(row)

        try:
            list(pool.map(one, prompts))
        except KeyboardInterrupt:
            stop.set()  # or the pool would ask the rest first
            raise
    rows.sort(key=lambda row: row["prompt"])
    return RecallResult(when, len(prompts), sum(r["correct"] for r in rows), sum(r["hang"] for r in rows),
                        sum(bool(r["leaked_from"]) for r in rows), stop.is_set(), tuple(rows), path)


def _prompts(spec: RecallSpec, run_seed: str, when: str) -> list[RecallPrompt]:
    return recall_prompts(f"{run_seed}/{when}", spec.prompts, spec.prompt_tokens)


def _other_times(spec: RecallSpec, run_seed: str, when: str) -> dict[str, str]:
    """Code -> where it belongs, for the prompts of the other times of the same run."""
    names = [name for name in get_args(RecallTime) if name in spec.when and name != when]
    return {code: f"prompt {p.index} of recall {name}" for name in names for p in _prompts(spec, run_seed, name) for _, code in p.answers}


def _row(prompt: RecallPrompt, prompts: list[RecallPrompt], others: dict[str, str], answer: dict[str, Any]) -> dict[str, Any]:
    foreign = foreign_codes(prompts, prompt) | set(others)
    owners = others | {code: f"prompt {p.index}" for p in prompts if p is not prompt for _, code in p.answers}
    said = set(re.findall(r"[A-Za-z0-9]+", f"{answer['content']} {answer['reasoning']}"))
    leaked = sorted({owners[code] for code in said & foreign})
    correct = not answer["error"] and judge(prompt.code, answer["content"], answer["reasoning"], foreign, prompt.decoys)
    return {
        "prompt": prompt.index, "depth": round(prompt.depth_fraction, 4), "code": prompt.code,
        "prompt_sha256": hashlib.sha256(prompt.text.encode()).hexdigest(), **answer,
        "correct": correct, "leaked_from": leaked, "why": "" if correct else _why(prompt, answer, leaked, said),
    }


def _why(prompt: RecallPrompt, answer: dict[str, Any], leaked: list[str], said: set[str]) -> str:
    if leaked:
        return f"answered with the code of {', '.join(leaked)}" + (f" ({answer['error']})" if answer["error"] else "")
    if answer["error"]:
        return str(answer["error"])
    text = answer["content"] or answer["reasoning"]
    if not text:
        return "empty answer"
    wrong = sorted(said & set(prompt.decoys))
    if wrong:
        return f"answered with another code of the same prompt: {', '.join(wrong)}"
    return f"the code {prompt.code} is not in the answer {text[:120]!r}"
