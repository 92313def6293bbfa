"""The gate: every worker that was started is there, and a real completion through both roles brings text. HTTP 200 alone is never enough.

Dynamo 1.6.1: `/health`, `/live` and `/v1/models` are 200 with no worker at all; `/v1/models/<id>/ready` is 404 until the first model card
is there and 503 while a role is missing. The workers must be counted as well: one whose model card differs is rejected with a line in the
frontend's log, looks healthy itself, and is missing only from this count.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .chat import Chat
from .contracts import write_json
from .http import HttpError, get
from .prompts import recall_prompts
from .spec import EngineSpec, Spec

WORKER_TYPES = {"prefill": "prefill", "decode": "decode", "agg": "aggregated"}
"""Role of the spec -> worker type of Dynamo 1.6.1."""
_PROBE_TIMEOUT_S = 5.0
_PROMPT_TOKENS = 200
_MAX_TOKENS = 16


@dataclass(frozen=True)
class Readiness:
    """One look at /v1/models/<id>/ready. found: workers per worker type. failure: what is missing, in words; '' when all are there."""

    found: dict[str, int]
    expected: dict[str, int]
    ready: bool
    failure: str

    def write(self, path: Path) -> None:
        write_json(path, {"ready": self.ready, "expected": self.expected, "found": self.found, "failure": self.failure})


def expected_workers(engines: Sequence[EngineSpec]) -> dict[str, int]:
    """Worker type -> number of engines that register one; control engines serve without Dynamo."""
    expected: dict[str, int] = {}
    for engine in engines:
        if engine.role in WORKER_TYPES:
            expected[WORKER_TYPES[engine.role]] = expected.get(WORKER_TYPES[engine.role], 0) + 1
    return expected


def unregistered(engines: Sequence[EngineSpec], found: dict[str, int]) -> str:
    """Engines of the roles of which workers are missing, as '; not registered: decode-0', or ''. A count does not tell which of several."""
    expected = expected_workers(engines)
    names = []
    for worker, count in expected.items():
        of_role = [e.name for e in engines if WORKER_TYPES.get(e.role) == worker]
        if missing := max(0, count - found.get(worker, 0)):
            names.append(", ".join(of_role) if missing == count else f"{missing} of {', '.join(of_role)}")
    return f"; not registered: {', '.join(names)}" if names else ""


def look(base_url: str, model: str, namespace: str, expected: dict[str, int], stop: threading.Event | None = None) -> Readiness:
    """Ask the frontend once. Anything but the expected answer is 'not yet', with the reason."""
    try:
        answer = get(f"{base_url}/v1/models/{quote(model, safe='')}/ready", timeout_s=_PROBE_TIMEOUT_S, stop=stop)
        if answer.status == 404:
            return Readiness({}, expected, False, "no worker has registered the model yet")
        body = answer.json()
    except HttpError as e:
        return Readiness({}, expected, False, f"the frontend does not answer: {e}")
    return judge_ready(answer.status, body, namespace, expected)


def judge_ready(status: int, body: Any, namespace: str, expected: dict[str, int]) -> Readiness:
    """Readiness from the frontend's answer; only workers of this job's namespace count."""
    try:
        types = body["namespaces"].get(namespace, {}).get("worker_types", {})
        found = {str(name): int(entry["workers"]) for name, entry in types.items()}
        says_ready = body["ready"] is True and status == 200
    except (AttributeError, KeyError, TypeError, ValueError):
        return Readiness({}, expected, False, f"HTTP {status} with an answer of another form: {json.dumps(body)[:200]}")
    wrong = [f"{name}: {found.get(name, 0)} of {count}" for name, count in expected.items() if found.get(name, 0) != count]
    wrong += [f"{name}: {count}, none was started" for name, count in found.items() if name not in expected and count]
    if not wrong and not says_ready:
        wrong = [f"all workers are there, but the model is not ready (HTTP {status})"]
    return Readiness(found, expected, not wrong, "; ".join(wrong))


def control_ready(url: str, stop: threading.Event | None = None) -> bool:
    """Whether a control engine (vllm serve) says that it is healthy."""
    try:
        return get(f"{url}/health", timeout_s=_PROBE_TIMEOUT_S, stop=stop).status == 200
    except HttpError:
        return False


def first_completion(spec: Spec, base_url: str, run_seed: str, out: Path, stop: threading.Event, target: str = "deployment") -> str:
    """A real streaming completion; its answer row is appended to `out`. Returns what is wrong with it, or ''.

    The mocker's text is random tokens that may decode to nothing, so with proof.text_checked false only the stream itself is judged.
    """
    prompt = recall_prompts(f"{run_seed}/gate/{target}", 1, _PROMPT_TOKENS)[0]
    answer, row = Chat(base_url, spec.model.served_name, spec.deadlines.gate_s, stop).ask(prompt.text, _MAX_TOKENS)
    failure = answer.error
    if not failure and not (answer.content + answer.reasoning).strip() and spec.proof.text_checked:
        failure = f"the completion has no text (finish_reason {answer.finish_reason})"
    ids = answer.worker_ids
    if not failure and target == "deployment":
        failure = roles_fault(spec, ids)
    with out.open("a", encoding="utf-8") as f:
        f.write(json.dumps({**row, "target": target, "worker_ids": ids, "failure": failure}, ensure_ascii=False) + "\n")
    return failure


def roles_fault(spec: Spec, ids: dict[str, int] | None) -> str:
    """What the worker ids of an answer say against a hand-over; '' when they say nothing against it or the frontend gave none."""
    if not spec.proof.disaggregated or not ids:
        return ""
    prefill, decode = ids.get("prefill_worker_id"), ids.get("decode_worker_id")
    return f"the completion did not go through both roles: {ids}" if prefill is None or decode is None or prefill == decode else ""
