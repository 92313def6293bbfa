"""Behaviour checks beside recall: tool calls with thinking on and off, JSON output by schema, and the identity of the build that serves.

A rollout with the right recall can still lose its tool-call parser, its reasoning parser or its patch; each of these looks like HTTP 200.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .build import BuildFacts, build_faults
from .chat import Chat
from .contracts import utc_now
from .jsonschema import violations
from .spec import BehaviourCheck

TOOL_TOKENS = {True: 2048, False: 512}
JSON_TOKENS = 512
TOOL: dict[str, Any] = {
    "name": "reserve_gpus",
    "description": "Reserve GPUs of a cluster. The only way to reserve GPUs.",
    "parameters": {
        "type": "object",
        "properties": {
            "cluster": {"type": "string", "description": "name of the cluster", "minLength": 1},
            "gpus": {"type": "integer", "description": "number of GPUs", "minimum": 1},
            "priority": {"type": "string", "enum": ["low", "high"]},
        },
        "required": ["cluster", "gpus", "priority"],
        "additionalProperties": False,
    },
}
TOOL_QUESTION = "Reserve 12 GPUs on the cluster named aurora with high priority. Call the tool; do not ask back."
TOOL_ARGUMENTS = {"cluster": "aurora", "gpus": 12, "priority": "high"}
JSON_SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "population_millions": {"type": "number", "minimum": 0},
        "landmarks": {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 2, "maxItems": 2},
        "coastal": {"type": "boolean"},
    },
    "required": ["city", "population_millions", "landmarks", "coastal"],
    "additionalProperties": False,
}
JSON_QUESTION = ("Describe Lisbon as one JSON object with the keys city, population_millions (a number), landmarks (exactly two names) and "
                 "coastal (true or false). Only the JSON object.")


@dataclass(frozen=True)
class BehaviourResult:
    rows: tuple[dict[str, Any], ...]
    path: Path

    @property
    def passed(self) -> bool:
        return all(row["passed"] for row in self.rows)


def run_behaviour(
    base_url: str, model: str, checks: tuple[BehaviourCheck, ...], out: Path, timeout_s: float, facts: BuildFacts,
    stop: threading.Event | None = None,
) -> BehaviourResult:
    """Run the named checks and write one row each to the file `out`: an answer row with check, passed and why. Never raises for answers.

    timeout_s: for one request. A check that was not run because of `stop` has no row.
    """
    stop = stop or threading.Event()
    chat = Chat(base_url, model, timeout_s, stop)
    table: dict[str, Callable[[], dict[str, Any]]] = {
        "tool_call_thinking_on": lambda: tool_call(chat, True),
        "tool_call_thinking_off": lambda: tool_call(chat, False),
        "json_schema": lambda: json_output(chat),
        "build_identity": lambda: build_row(facts),
    }
    rows = []
    out.parent.mkdir(parents=True, exist_ok=True)
    with out.open("w", encoding="utf-8") as file:
        for check in checks:
            if stop.is_set():
                break
            row = {"check": check, **table[check]()}
            rows.append(row)
            file.write(json.dumps(row, ensure_ascii=False) + "\n")
            file.flush()
    return BehaviourResult(tuple(rows), out)


def tool_call(chat: Chat, thinking: bool) -> dict[str, Any]:
    """One turn that can only be done by the tool; its arguments are known, and reasoning must be there exactly when thinking is on."""
    answer, row = chat.ask(TOOL_QUESTION, TOOL_TOKENS[thinking], tools=[{"type": "function", "function": TOOL}], tool_choice="auto",
                           chat_template_kwargs={"enable_thinking": thinking})
    why = [answer.error] if answer.error else tool_faults(answer.tool_calls, answer.content)
    if not answer.error:
        if thinking and not answer.reasoning.strip():
            why.append("thinking is on, but the answer has no reasoning")
        if not thinking and answer.reasoning.strip():
            why.append(f"thinking is off, but the answer has reasoning {answer.reasoning[:80]!r}")
        if answer.finish_reason not in ("tool_calls", "stop"):
            why.append(f"finish_reason {answer.finish_reason!r} is neither tool_calls nor stop")
    return {**row, "passed": not why, "why": "; ".join(why)}


def tool_faults(calls: list[dict[str, str]], content: str) -> list[str]:
    """What is wrong with the calls of a tool turn."""
    if not calls:
        inside = " (the call stands in the content: the tool-call parser did not see it)" if TOOL["name"] in content else ""
        return [f"no tool call{inside}; content {content[:120]!r}"]
    if len(calls) > 1:
        return [f"{len(calls)} tool calls instead of one: {', '.join(c['name'] for c in calls)}"]
    name, text = calls[0]["name"], calls[0]["arguments"]
    if name != TOOL["name"]:
        return [f"called {name!r} instead of {TOOL['name']!r}"]
    try:
        arguments = json.loads(text)
    except ValueError:
        return [f"the arguments are not JSON: {text[:200]!r}"]
    faults = violations(arguments, TOOL["parameters"])
    if not faults and {**arguments, "cluster": arguments["cluster"].lower()} != TOOL_ARGUMENTS:
        faults = [f"the arguments are {arguments}, not {TOOL_ARGUMENTS}"]
    if not faults and TOOL["name"] in content:
        faults = [f"the call stands in the content too: {content[:120]!r}"]
    return faults


def json_output(chat: Chat) -> dict[str, Any]:
    """response_format json_schema: the content must be JSON that follows the schema, with nothing around it."""
    answer, row = chat.ask(JSON_QUESTION, JSON_TOKENS, chat_template_kwargs={"enable_thinking": False}, response_format={
        "type": "json_schema", "json_schema": {"name": "place", "strict": True, "schema": JSON_SCHEMA}})
    if answer.error:
        why = [answer.error]
    elif answer.finish_reason != "stop":
        why = [f"finish_reason {answer.finish_reason!r} is not stop"]
    else:
        try:
            why = violations(json.loads(answer.content), JSON_SCHEMA)
        except ValueError:
            why = [f"the content is not JSON: {answer.content[:120]!r}"]
    return {**row, "passed": not why, "why": "; ".join(why)}


def build_row(facts: BuildFacts) -> dict[str, Any]:
    why = build_faults(facts)
    return {"utc": utc_now(), "target": "nodes", "passed": not why, "why": "; ".join(why)}
