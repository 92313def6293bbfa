"""The smallest client of a prefill/decode pair, without a router: one token from the producer, its transfer parameters to the consumer.

Prompts are token ids, so both engines see the same tokens, and answers are token ids as well as text.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from pdlaunch.node.http import Exchange, HttpError

ASK_FOR_TRANSFER = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}
COUNTERS = {
    "bytes": "vllm:nixl_bytes_transferred_sum",
    "transfers": "vllm:nixl_bytes_transferred_count",
    "descriptors": "vllm:nixl_num_descriptors_sum",
    "xfer_s": "vllm:nixl_xfer_time_seconds_sum",
    "post_s": "vllm:nixl_post_time_seconds_sum",
    "failed": "vllm:nixl_num_failed_transfers_total",
    "expired": "vllm:nixl_num_kv_expired_reqs_total",
    "external_tokens": 'vllm:prompt_tokens_by_source_total{source="external_kv_transfer"}',
}


@dataclass
class Answer:
    """One request. prefill_s: the producer's whole answer. first_token_s and total_s: from the start of the consumer's part."""

    tokens: list[int] = field(default_factory=list)
    text: str = ""
    status: int = 0
    error: str = ""
    prefill_s: float = 0.0
    first_token_s: float = 0.0
    total_s: float = 0.0
    finish_reason: str = ""

    @property
    def ok(self) -> bool:
        return not self.error


def post(url: str, body: dict[str, Any], timeout_s: float) -> tuple[int, Any]:
    with Exchange("POST", url, body=body, timeout_s=timeout_s) as exchange:
        content = exchange.read()
        return exchange.status, json.loads(content) if exchange.status == 200 else content.decode("utf-8", errors="replace")


def chat_tokens(url: str, text: str, timeout_s: float = 60.0) -> list[int]:
    """Token ids of one user message with the model's own chat template."""
    body = {"model": "m", "messages": [{"role": "user", "content": text}], "add_generation_prompt": True}
    status, answer = post(f"{url}/tokenize", body, timeout_s)
    if status != 200:
        raise HttpError(f"{url}/tokenize: HTTP {status}: {answer[:300]}")
    return list(answer["tokens"])


def ask(
    consumer: str, prompt: Sequence[int], max_tokens: int, *, producer: str = "", exact_length: bool = False, timeout_s: float = 120.0
) -> Answer:
    """The answer of `consumer`, after a prefill on `producer` unless that is empty. Never raises for what a server answers.

    exact_length: a measurement: no stop token counts, and no token ids are asked for, since vLLM would send the prompt's ids back as well.
    """
    answer = Answer()
    body: dict[str, Any] = {
        "model": "m",
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0.0,
        "ignore_eos": exact_length,
        "return_token_ids": not exact_length,
        "stream": True,
    }
    try:
        if producer:
            began = time.monotonic()
            first = body | {"stream": False, "max_tokens": 1, "return_token_ids": False, "kv_transfer_params": ASK_FOR_TRANSFER}
            answer.status, given = post(f"{producer}/v1/completions", first, timeout_s)
            answer.prefill_s = time.monotonic() - began
            if answer.status != 200:
                answer.error = f"prefill: HTTP {answer.status}: {given[:300]}"
                return answer
            if not given.get("kv_transfer_params"):
                answer.error = "prefill: no kv_transfer_params in its answer"
                return answer
            body["kv_transfer_params"] = given["kv_transfer_params"]
        _stream(f"{consumer}/v1/completions", body, timeout_s, answer)
    except HttpError as e:
        answer.error = answer.error or str(e)[:400]
    return answer


def _stream(url: str, body: dict[str, Any], timeout_s: float, answer: Answer) -> None:
    began = time.monotonic()
    with Exchange("POST", url, body=body, timeout_s=timeout_s) as exchange:
        answer.status = exchange.status
        if exchange.status != 200:
            answer.error = f"HTTP {exchange.status}: {exchange.read().decode('utf-8', errors='replace')[:300]}"
            return
        for event in exchange.events():
            if event.data == "[DONE]":
                break
            chunk = json.loads(event.data or "{}")
            if chunk.get("error"):
                answer.error = f"HTTP {exchange.status} and an error in the stream: {json.dumps(chunk['error'])[:300]}"
            for choice in chunk.get("choices") or []:
                if not answer.first_token_s and (choice.get("token_ids") or "text" in choice):
                    answer.first_token_s = time.monotonic() - began
                answer.tokens += choice.get("token_ids") or []
                answer.text += choice.get("text") or ""
                answer.finish_reason = choice.get("finish_reason") or answer.finish_reason
    answer.total_s = time.monotonic() - began
    if not answer.error and answer.finish_reason in ("", "error", "abort"):
        answer.error = f"HTTP {answer.status} with finish_reason {answer.finish_reason or 'missing'}"


def counters(url: str) -> dict[str, float]:
    """The transfer counters of one engine; one that is not there yet counts as 0, which is how vLLM starts them."""
    with Exchange("GET", f"{url}/metrics", timeout_s=20.0) as exchange:
        lines = exchange.read().decode("utf-8", errors="replace").splitlines()
    found = dict.fromkeys(COUNTERS, 0.0)
    for line in lines:
        match = re.match(r"([a-zA-Z_:]+)(\{[^}]*\})? ([0-9.eE+-]+)$", line)
        if match:
            for short, name in COUNTERS.items():
                base, _, label = name.partition("{")
                if match[1] == base and label.rstrip("}") in (match[2] or ""):
                    found[short] += float(match[3])
    return found


def settled(url: str, before: dict[str, float], expect_transfers: int, deadline_s: float = 3.0) -> dict[str, float]:
    """Counters less `before`, once they have stopped moving: vLLM books a transfer a step or two after the answer has ended."""
    end, last = time.monotonic() + deadline_s, dict[str, float]()
    while True:
        now = {name: value - before[name] for name, value in counters(url).items()}
        done = now["transfers"] + now["failed"] >= expect_transfers and now == last
        if done or time.monotonic() > end:
            return now
        last = now
        time.sleep(0.05)
