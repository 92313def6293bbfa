"""Greedy chat requests whose answers become rows of the archive, against any OpenAI-compatible endpoint.

Dynamo refuses a JSON key that it does not know with 400, other servers refuse nvext, stream_options or max_tokens: such keys are left out
(or renamed) one after the other, and the endpoint's taste is remembered for the next request.
"""

from __future__ import annotations

import threading
import time
from typing import Any

from .completion import NVEXT, Completion, chat_body, complete
from .contracts import utc_now

OPTIONAL_KEYS = ("nvext", "return_tokens_as_token_ids", "stream_options", "logprobs")


class Chat:
    """Requests to one endpoint. timeout_s: for one question, all its attempts together."""

    def __init__(self, base_url: str, model: str, timeout_s: float, stop: threading.Event, headers: dict[str, str] | None = None) -> None:
        self.base_url, self.model, self.timeout_s, self.stop, self.headers = base_url, model, timeout_s, stop, headers
        self._refused: set[str] = set()
        self._renamed: dict[str, str] = {}

    def ask(self, text: str, max_tokens: int, **more: Any) -> tuple[Completion, dict[str, Any]]:
        """The answer and its archive row (contracts.ANSWER_KEYS); `more` is added to the body. Never raises for a bad answer."""
        body = chat_body(self.model, text, max_tokens, nvext=NVEXT, **more)
        utc = utc_now()
        deadline = time.monotonic() + self.timeout_s
        while True:
            sent = {self._renamed.get(key, key): value for key, value in body.items() if key not in self._refused}
            answer = complete(self.base_url, sent, max(0.001, deadline - time.monotonic()), self.stop, self.headers)
            if answer.status not in (400, 422) or not self._adapt(sent, answer.error):
                return answer, answer_row(utc, answer)

    def _adapt(self, sent: dict[str, Any], message: str) -> bool:
        """Leave out, or rename, one key that the endpoint may have refused; False when nothing is left to try."""
        if "max_completion_tokens" in message and "max_tokens" in sent:
            self._renamed["max_tokens"] = "max_completion_tokens"
            return True
        present = [key for key in OPTIONAL_KEYS if key in sent]
        if not present:
            return False
        self._refused.add(next((key for key in present if key in message), present[0]))
        return True


def answer_row(utc: str, answer: Completion) -> dict[str, Any]:
    """contracts.ANSWER_KEYS, hang, worker_ids, and tool_calls where there are any; target is the deployment unless changed."""
    row = {
        "utc": utc, "target": "deployment", "status": answer.status, "error": answer.error, "hang": answer.hang,
        "content": answer.content, "reasoning": answer.reasoning, "finish_reason": answer.finish_reason or None,
        "prompt_tokens": _count(answer, "prompt_tokens"), "completion_tokens": _count(answer, "completion_tokens"),
        "latency_s": round(answer.total_s, 6), "ttft_s": None if answer.first_token_s is None else round(answer.first_token_s, 6),
        "worker_ids": answer.worker_ids,
    }
    return row | ({"tool_calls": answer.tool_calls} if answer.tool_calls else {})


def _count(answer: Completion, key: str) -> int | None:
    value = answer.usage.get(key)
    return value if isinstance(value, int) else None
