"""One streaming chat completion of an OpenAI-compatible endpoint, read to its end and kept as it came.

Dynamo answers 200 and puts a failure into the stream as an SSE event named `error`; this counts as a failure, as does an `error` object in
a data chunk, a stream without `[DONE]` or finish_reason, and finish_reason `error` (vLLM with kv_load_failure_policy=fail).
"""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

from .http import Exchange, Hang, HttpError, SseEvent, Stopped


@dataclass
class Completion:
    """What one request brought. error is '' only when the stream ended properly; hang: the deadline passed; stopped: it was called off."""

    status: int = 0
    content: str = ""
    reasoning: str = ""
    finish_reason: str = ""
    error: str = ""
    hang: bool = False
    stopped: bool = False
    first_token_s: float | None = None
    total_s: float = 0.0
    usage: dict[str, Any] = field(default_factory=dict)
    worker_ids: dict[str, int] = field(default_factory=dict)
    """prefill_worker_id and decode_worker_id when the frontend gives them; different ids prove routing, not that bytes arrived."""
    tool_calls: list[dict[str, str]] = field(default_factory=list)
    """One entry per call index: name and arguments (JSON text put together from its pieces)."""
    tokens: list[str] = field(default_factory=list)
    """The tokens of the answer when the body asked for log probabilities: texts, or "token_id:123" with return_tokens_as_token_ids."""

    @property
    def ok(self) -> bool:
        return not self.error


def chat_body(model: str, text: str, max_tokens: int, **more: Any) -> dict[str, Any]:
    """The body of a greedy streaming request whose answer names the workers that served it (nvext, Dynamo 1.6.1)."""
    body = {"model": model, "messages": [{"role": "user", "content": text}], "max_tokens": max_tokens, "temperature": 0.0, "stream": True,
            "stream_options": {"include_usage": True}}
    return {**body, **more}


NOT_OPENAI = "no OpenAI endpoint"
"""How the error of an answer begins that is 200 and neither JSON nor an event stream, as the page of a web server."""
MOST_TOOL_CALLS = 1000
NVEXT = {"extra_fields": ["worker_id", "timing"]}


def complete(
    base_url: str, body: dict[str, Any], timeout_s: float, stop: threading.Event | None = None, headers: dict[str, str] | None = None
) -> Completion:
    """POST body to base_url/v1/chat/completions and read the answer, streamed or not. Never raises for what a server answers or not.

    base_url: http://HOST:PORT, with or without /v1 at its end.
    """
    done = Completion()
    began = time.monotonic()
    url = f"{base_url.rstrip('/').removesuffix('/v1')}/v1/chat/completions"
    try:
        with Exchange("POST", url, body=body, timeout_s=timeout_s, stop=stop, headers=headers) as exchange:
            done.status = exchange.status
            if exchange.status != 200:
                done.error = f"HTTP {exchange.status}: {exchange.read().decode('utf-8', errors='replace')[:500]}"
            else:
                _read(exchange, done, began)
    except Hang as e:
        done.error, done.hang = done.error or f"hang: {e}", True
    except Stopped as e:
        done.error, done.stopped = done.error or f"stopped: {e}", True
    except HttpError as e:
        done.error = done.error or str(e)
    except (AttributeError, TypeError, IndexError) as e:
        done.error = done.error or f"the answer has not the shape of a chat completion: {type(e).__name__}: {e}"
    done.content, done.reasoning = whole(done.content), whole(done.reasoning)
    done.tokens = [whole(token) for token in done.tokens]
    done.tool_calls = [{key: whole(value) for key, value in call.items()} for call in done.tool_calls]
    done.total_s = time.monotonic() - began
    return done


def whole(text: str) -> str:
    """Halves of a character that came in two chunks (JSON may say them as \\ud83d and \\ude00) put together; one alone becomes U+FFFD.

    No file could take such a half.
    """
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _read(exchange: Exchange, done: Completion, began: float) -> None:
    ended = False
    if "text/event-stream" not in exchange.headers.get("content-type", ""):
        text = exchange.read().decode("utf-8", errors="replace")
        if text.lstrip()[:1] != "{":
            kind = exchange.headers.get("content-type") or "no content type"
            done.error = f"{NOT_OPENAI}: the answer is not JSON ({kind}): {text[:200]!r}"
            return
        _chunk(SseEvent("", text), done, began)
        ended = True
    else:
        for event in exchange.events():
            if event.event == "error":
                done.error = done.error or f"SSE error event: {(event.data or event.comment)[:500]}"
            elif event.data == "[DONE]":
                ended = True
                break
            elif event.data:
                _chunk(event, done, began)
    if not done.error and not ended:
        done.error = "the stream ended without [DONE]"
    if not done.error and not done.finish_reason:
        done.error = "the stream ended without a finish_reason"


def _chunk(event: SseEvent, done: Completion, began: float) -> None:
    try:
        chunk = json.loads(event.data)
    except (ValueError, RecursionError):
        done.error = done.error or f"a chunk is not JSON: {event.data[:200]!r}"
        return
    if not isinstance(chunk, dict):
        done.error = done.error or f"a chunk is not an object: {event.data[:200]!r}"
        return
    if chunk.get("error"):
        done.error = done.error or f"error chunk: {json.dumps(chunk['error'])[:500]}"
    if isinstance(chunk.get("usage"), dict):
        done.usage = chunk["usage"]
    ids = (chunk.get("nvext") or {}).get("worker_id")
    if isinstance(ids, dict):
        done.worker_ids |= {k: v for k, v in ids.items() if k.endswith("_worker_id") and isinstance(v, int)}
    for choice in chunk.get("choices") or []:
        delta = choice.get("delta") or choice.get("message") or {}
        content, reasoning = delta.get("content") or "", delta.get("reasoning_content") or delta.get("reasoning") or ""
        if done.first_token_s is None and (content or reasoning or delta.get("tool_calls")):
            done.first_token_s = time.monotonic() - began
        done.content += content
        done.reasoning += reasoning
        _tool_calls(delta, done)
        done.tokens += [str(entry.get("token")) for entry in (choice.get("logprobs") or {}).get("content") or []]
        if choice.get("finish_reason"):
            done.finish_reason = str(choice["finish_reason"])
            if done.finish_reason == "error":
                done.error = done.error or "finish_reason error"


def _tool_calls(delta: dict[str, Any], done: Completion) -> None:
    for position, piece in enumerate(delta.get("tool_calls") or []):
        index = piece.get("index", position)
        if not 0 <= index < MOST_TOOL_CALLS:
            raise IndexError(f"tool call {index}")
        while len(done.tool_calls) <= index:
            done.tool_calls.append({"name": "", "arguments": ""})
        function = piece.get("function") or {}
        done.tool_calls[index]["name"] += function.get("name") or ""
        done.tool_calls[index]["arguments"] += function.get("arguments") or ""
