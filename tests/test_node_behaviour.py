"""Behaviour checks and agreement, against a local server that misbehaves in each way."""

from __future__ import annotations

import json
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdlaunch.node.agreement import AgreementResult, agreement_prompts, run_agreement
from pdlaunch.node.behaviour import JSON_SCHEMA, TOOL, TOOL_ARGUMENTS, run_behaviour
from pdlaunch.node.build import BuildFacts, file_faults
from pdlaunch.node.contracts import ANSWER_KEYS
from pdlaunch.node.jsonschema import violations
from pdlaunch.node.spec import AgreementSpec, BehaviourCheck, Proof
from tests.fakes import openai_server as fake

PROOF = Proof(
    disaggregated=True,
    kv_load_failure_policy="fail",
    prediction=None,
    mixed_heads=True,
    patches=("p",),
    file_sha256={"vllm/a.py": "a" * 64},
    versions={"vllm": "0.31.0", "ai-dynamo": "1.6.1"},
)
NODE = {
    "process": "decode-0",
    "role": "decode",
    "versions": {"vllm": "0.31.0+cpu", "ai-dynamo": "1.6.1"},
    "file_sha256": {"vllm/a.py": "a" * 64},
}
FACTS = BuildFacts({"decode-0": NODE, "prefill-0": {**NODE, "role": "prefill"}, "frontend": {"role": "frontend"}}, PROOF)
PLACE = {"city": "Lisbon", "population_millions": 0.55, "landmarks": ["Belem Tower", "Alfama"], "coastal": True}


def behave(
    tmp_path: Path, check: BehaviourCheck, behaviour: fake.Behaviour, facts: BuildFacts = FACTS, timeout_s: float = 10.0
) -> dict[str, Any]:
    with fake.openai_server(behaviour) as server:
        result = run_behaviour(server.url, "m", (check,), tmp_path / "behaviour.jsonl", timeout_s, facts)
    (row,) = [json.loads(line) for line in (tmp_path / "behaviour.jsonl").read_text().splitlines()]
    assert row == result.rows[0]
    assert result.passed is row["passed"]
    assert bool(row["why"]) is not row["passed"]
    return row


def calls(name: str = TOOL["name"], arguments: str | None = None, **more: Any) -> fake.Behaviour:
    """One tool call; reasoning exactly when the request asks for thinking, unless `reasoning` says otherwise."""

    def behaviour(reply: fake.Reply) -> None:
        thinking = reply.body["chat_template_kwargs"]["enable_thinking"]
        said = {"content": "", "reasoning": "I should call it." if thinking else "", "finish": "tool_calls", **more}
        call = {"name": name, "arguments": json.dumps(TOOL_ARGUMENTS) if arguments is None else arguments}
        reply.say(tool_calls=[call] * more.get("count", 1), **{k: v for k, v in said.items() if k != "count"})

    return behaviour


@pytest.mark.parametrize("check", ["tool_call_thinking_on", "tool_call_thinking_off"])
def test_a_right_tool_call_passes(tmp_path: Path, check: BehaviourCheck) -> None:
    row = behave(tmp_path, check, calls())
    assert row["passed"], row["why"]
    assert set(ANSWER_KEYS) <= set(row)
    assert row["tool_calls"] == [{"name": "reserve_gpus", "arguments": json.dumps(TOOL_ARGUMENTS)}]
    assert row["prompt_tokens"] > 0


BAD_CALLS = {
    "no call": (lambda reply: reply.say("I cannot do that."), "no tool call"),
    "parser did not see it": (lambda reply: reply.say("<|tool_call>call:reserve_gpus{gpus:12}"), "stands in the content"),
    "another tool": (calls("get_weather"), "called 'get_weather'"),
    "two calls": (calls(count=2), "2 tool calls"),
    "arguments cut": (calls(arguments='{"cluster": "aurora", "gpus": 1'), "not JSON"),
    "argument missing": (calls(arguments='{"cluster": "aurora", "gpus": 12}'), "$.priority: missing"),
    "number as text": (calls(arguments='{"cluster": "aurora", "gpus": "12", "priority": "high"}'), "not of type integer"),
    "value outside the enum": (calls(arguments='{"cluster": "aurora", "gpus": 12, "priority": "urgent"}'), "not one of"),
    "key not in the schema": (calls(arguments='{"cluster": "aurora", "gpus": 12, "priority": "high", "x": 1}'), "$.x: not allowed"),
    "another number": (calls(arguments='{"cluster": "aurora", "gpus": 21, "priority": "high"}'), "not {'cluster': 'aurora', 'gpus': 12"),
    "call twice, once as text": (calls(content="reserve_gpus(...)"), "stands in the content too"),
    "cut off": (calls(finish="length"), "finish_reason 'length'"),
    "error event": (fake.sse_error, "SSE error event"),
    "http 500": (fake.http_500, "HTTP 500"),
}


@pytest.mark.parametrize("name", BAD_CALLS)
@pytest.mark.parametrize("check", ["tool_call_thinking_on", "tool_call_thinking_off"])
def test_a_wrong_tool_call_fails(tmp_path: Path, check: BehaviourCheck, name: str) -> None:
    behaviour, why = BAD_CALLS[name]
    row = behave(tmp_path, check, behaviour)
    assert not row["passed"]
    assert why in row["why"]


def test_thinking_must_follow_the_switch(tmp_path: Path) -> None:
    assert "has no reasoning" in behave(tmp_path, "tool_call_thinking_on", calls(reasoning=""))["why"]
    assert "thinking is off, but" in behave(tmp_path, "tool_call_thinking_off", calls(reasoning="Hm."))["why"]


def test_a_hang_of_a_behaviour_check_is_a_hang(tmp_path: Path) -> None:
    row = behave(tmp_path, "json_schema", fake.hang, timeout_s=0.4)
    assert row["hang"]
    assert row["why"].startswith("hang")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        (json.dumps(PLACE), ""),
        (f"```json\n{json.dumps(PLACE)}\n```", "not JSON"),
        (json.dumps(PLACE)[:-4], "not JSON"),
        ("Lisbon is a city.", "not JSON"),
        (json.dumps({**PLACE, "landmarks": ["one"]}), "number of items 1 is below 2"),
        (json.dumps({**PLACE, "coastal": "yes"}), "$.coastal: 'yes' is not of type boolean"),
        (json.dumps({k: v for k, v in PLACE.items() if k != "city"}), "$.city: missing"),
        (json.dumps([PLACE]), "not of type object"),
        ("", "not JSON"),
    ],
)
def test_json_output_by_schema(tmp_path: Path, content: str, why: str) -> None:
    row = behave(tmp_path, "json_schema", lambda reply: reply.say(content))
    assert why in row["why"]
    assert row["passed"] is (why == "")


def test_json_output_that_was_cut_off_fails_even_when_it_parses(tmp_path: Path) -> None:
    row = behave(tmp_path, "json_schema", lambda reply: reply.say(json.dumps(PLACE), finish="length"))
    assert "finish_reason 'length'" in row["why"]


def test_requests_ask_for_what_they_check(tmp_path: Path) -> None:
    with fake.openai_server(calls()) as server:
        checks: tuple[BehaviourCheck, ...] = ("tool_call_thinking_on", "tool_call_thinking_off", "json_schema")
        run_behaviour(server.url, "m", checks, tmp_path / "b.jsonl", 10.0, FACTS)
        on, off, as_json = server.bodies
    assert [b["chat_template_kwargs"] for b in (on, off)] == [{"enable_thinking": True}, {"enable_thinking": False}]
    assert on["tools"][0]["function"]["name"] == "reserve_gpus"
    assert as_json["response_format"]["json_schema"]["schema"] == JSON_SCHEMA


def test_build_identity_passes_and_ignores_the_local_part_of_a_version(tmp_path: Path) -> None:
    assert behave(tmp_path, "build_identity", fake.right)["passed"]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"versions": {"vllm": "0.30.0", "ai-dynamo": "1.6.1"}}, "decode-0: vllm 0.30.0 instead of 0.31.0"),
        ({"versions": {"vllm": "0.31.0"}}, "decode-0: ai-dynamo not found instead of 1.6.1"),
        ({"file_sha256": {"vllm/a.py": "b" * 64}}, "decode-0: vllm/a.py has sha256 bbbbbbbbbbbb, required aaaaaaaaaaaa"),
        ({"file_sha256": {"vllm/a.py": None}}, "decode-0: vllm/a.py has sha256 absent"),
        ({"versions": None, "file_sha256": None}, "not found"),
    ],
)
def test_build_identity_names_the_process_that_serves_something_else(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    facts = replace(FACTS, nodes={**FACTS.nodes, "decode-0": {**NODE, **change}})
    row = behave(tmp_path, "build_identity", fake.right, facts)
    assert not row["passed"]
    assert why in row["why"]
    assert "prefill-0" not in row["why"]


def test_build_identity_without_any_engine_fails(tmp_path: Path) -> None:
    assert behave(tmp_path, "build_identity", fake.right, BuildFacts({}, PROOF))["why"] == "no facts of any engine process"


def test_schema_validator_refuses_what_it_does_not_know() -> None:
    with pytest.raises(ValueError, match="oneOf"):
        violations({}, {"oneOf": []})
    assert violations(True, {"type": "integer"}) == ["$: True is not of type integer"]
    assert violations(5, {"maximum": 4}) == ["$ 5 is above 4"]
    assert violations("ab", {"pattern": "^a$", "maxLength": 1, "const": "a"}) != []


AGREE = AgreementSpec(prompts=3, prompt_tokens=(200, 400), max_tokens=8)


def with_tokens(text: str, ids: list[int]) -> fake.Behaviour:
    def behaviour(reply: fake.Reply) -> None:
        reply.head()
        reply.raw(
            "data: "
            + json.dumps(
                {
                    "choices": [
                        {
                            "index": 0,
                            "delta": {"content": text},
                            "finish_reason": "stop",
                            "logprobs": {"content": [{"token": f"token_id:{i}", "logprob": -0.1} for i in ids]},
                        }
                    ]
                }
            )
            + "\n\n"
        )
        reply.end(len(ids))

    return behaviour


def agree(tmp_path: Path, deployment: fake.Behaviour, control: fake.Behaviour, timeout_s: float = 10.0) -> AgreementResult:
    with fake.openai_server(deployment) as left, fake.openai_server(control) as right:
        result = run_agreement(left.url, right.url, "m", AGREE, "seed", tmp_path / "agreement.jsonl", timeout_s, threading.Event())
        assert left.prompts == right.prompts[: len(left.prompts)]
    rows = [json.loads(line) for line in (tmp_path / "agreement.jsonl").read_text().splitlines()]
    assert rows == list(result.rows)
    assert [r["target"] for r in rows] == ["deployment", "control"] * (len(rows) // 2)
    return result


def test_t6_equal_answers_agree(tmp_path: Path) -> None:
    result = agree(tmp_path, fake.right, fake.right)
    assert (result.asked, result.equal, result.passed) == (3, 3, True)
    assert result.rows[1]["compared"] == "text"


def test_agreement_prompts_have_the_lengths_in_turn() -> None:
    prompts = agreement_prompts(AGREE, "seed")
    assert len({p.text for p in prompts}) == 3
    assert max(prompts[0].lines, prompts[2].lines) * 1.5 < prompts[1].lines


def test_t6_the_first_differing_token_is_recorded(tmp_path: Path) -> None:
    result = agree(tmp_path, with_tokens("same", [5, 6, 7]), with_tokens("same", [5, 6, 8]))
    assert (result.equal, result.rows[1]["compared"], result.rows[1]["first_difference"]) == (0, "tokens", 2)


def test_a_shorter_answer_differs_at_its_end(tmp_path: Path) -> None:
    assert agree(tmp_path, with_tokens("a", [5]), with_tokens("a b", [5, 6])).rows[1]["first_difference"] == 1


def test_text_that_differs_is_recorded(tmp_path: Path) -> None:
    result = agree(tmp_path, lambda r: r.say("LANTERN ONE"), lambda r: r.say("LANTERN TWO"))
    assert (result.equal, result.rows[1]["compared"], result.rows[1]["first_difference"]) == (0, "text", 8)


@pytest.mark.parametrize(
    ("deployment", "control", "why"),
    [
        (fake.sse_error, fake.right, "deployment: SSE error event"),
        (fake.right, fake.http_500, "control: HTTP 500"),
        (fake.sse_error, fake.sse_error, "deployment: SSE error event"),
        (fake.empty, fake.empty, "both answers are empty"),
        (fake.hang, fake.right, "deployment: hang"),
    ],
)
def test_two_failures_are_no_agreement(tmp_path: Path, deployment: fake.Behaviour, control: fake.Behaviour, why: str) -> None:
    result = agree(tmp_path, deployment, control, timeout_s=0.5 if fake.hang in (deployment, control) else 30.0)
    assert (result.equal, result.passed) == (0, False)
    assert all(why in row["why"] for row in result.rows[1::2])


def test_a_file_that_is_required_once_may_be_absent_elsewhere() -> None:
    either = {"nixl_cu12/_api.py": "a" * 64 + " or absent", "nixl_cu13/_api.py": "a" * 64 + " or absent", "new.py": "absent"}
    assert file_faults("decode-0", {"nixl_cu12/_api.py": "a" * 64, "nixl_cu13/_api.py": None, "new.py": None}, either) == []
    (none,) = file_faults("decode-0", {}, either)
    assert "one is needed" in none
    (changed,) = file_faults("decode-0", {"nixl_cu12/_api.py": "a" * 64, "nixl_cu13/_api.py": "b" * 64}, either)
    assert "nixl_cu13/_api.py" in changed
    (present,) = file_faults("decode-0", {"nixl_cu12/_api.py": "a" * 64, "new.py": "c" * 64}, either)
    assert "required absent" in present
