"""The gate's prompts with the hybrid KV cache manager on: live against local servers, and judged again from the rows alone."""

from __future__ import annotations

import dataclasses
import json
import threading
from pathlib import Path
from typing import Any

import pytest

from pdlaunch import cluster, job, recipe
from pdlaunch.errors import RecipeError
from pdlaunch.modelcheck import page_smoke
from pdlaunch.node import evidence, smoke
from pdlaunch.node.contracts import ANSWER_KEYS
from pdlaunch.node.prompts import estimate_tokens
from pdlaunch.node.spec import RecallSpec, SmokePrompt, Spec
from pdlaunch.node.verdict import gate_rules
from tests.fakes import openai_server as fake
from tests.fakes import specs
from tests.golden_cases import ROOT, build
from tests.nodefactory import Folder, engine, good_run

SHORT, BEYOND = "short_last_page", "beyond_window"
TINY = page_smoke(128, 64, 24)
PAIR = (engine("prefill", 1), engine("decode", 2))
CONTROL = (*PAIR, engine("control", 1, kind="vllm.serve"))
RECALL = RecallSpec(prompts=9, prompt_tokens=800, when=("before",))


def spec(tmp_path: Path, control: bool, **changes: Any) -> Spec:
    made = specs.spec(tmp_path, (), CONTROL if control else PAIR, page_smoke=TINY, recall=RECALL)
    proof = dataclasses.replace(made.proof, text_checked=True)
    return dataclasses.replace(made, **{"proof": proof, **changes})


def counting(behaviour: fake.Behaviour, overhead: int = 17, ratio: float = 1.0) -> fake.Behaviour:
    """A server whose tokenizer counts `ratio` times the estimate, and whose chat template adds tokens."""

    def answer(reply: fake.Reply) -> None:
        reply.prompt_tokens = round(estimate_tokens(reply.prompt) * ratio) + overhead
        behaviour(reply)

    return answer


def tokens(*numbers: int, text: str = "same") -> fake.Behaviour:
    def answer(reply: fake.Reply) -> None:
        reply.head()
        ids = [{"token": f"token_id:{n}", "logprob": -0.1} for n in numbers]
        choice = {"index": 0, "delta": {"content": text}, "finish_reason": "stop", "logprobs": {"content": ids}}
        reply.raw("data: " + json.dumps({"choices": [choice]}) + "\n\n")
        reply.end(len(numbers))

    return counting(answer)


def for_length(longest: int, short: fake.Behaviour, long: fake.Behaviour) -> fake.Behaviour:
    """`short` for prompts up to `longest` estimated tokens, `long` for others."""
    return lambda reply: (short if estimate_tokens(reply.prompt) <= longest else long)(reply)


def ask(
    tmp_path: Path, deployment: fake.Behaviour, control: fake.Behaviour | None = None, **changes: Any
) -> tuple[list[str], list[dict[str, Any]], dict[str, Any]]:
    """(failures, rows, checks by name as the archive gives them)."""
    made = spec(tmp_path, control is not None, **changes)
    gate = tmp_path / "gate.jsonl"
    with fake.openai_server(deployment) as left, fake.openai_server(control or fake.right) as right:
        urls = {"deployment": left.url} | ({"control": right.url} if control else {})
        failures = smoke.run_smoke(made, urls, "seed", gate, threading.Event())
        assert control or not right.prompts
        assert set(right.prompts) <= set(left.prompts)
    rows = [json.loads(line) for line in gate.read_text().splitlines()]
    assert all(set(ANSWER_KEYS) <= set(row) for row in rows)
    found = evidence.collect(made, tmp_path)
    checks = {check.name: check for check in gate_rules(made, found) if check.name.startswith("gate, ")}
    assert list(checks) == [f"gate, {smoke.TITLES[prompt.name]}" for prompt in TINY.prompts]
    assert [c.observed for c in checks.values() if not c.passed] == [f.partition(": ")[2] for f in failures]
    return failures, rows, {p.name: check for p, check in zip(TINY.prompts, checks.values(), strict=True)}


def test_equal_tokens_pass_and_the_lengths_are_those_wanted(tmp_path: Path) -> None:
    failures, rows, checks = ask(tmp_path, tokens(5, 6, 7), tokens(5, 6, 7))
    assert failures == []
    assert [(r["smoke"], r["target"]) for r in rows] == [(n, t) for n in (SHORT, BEYOND) for t in ("deployment", "control")]
    short, beyond = rows[0]["prompt_tokens"], rows[2]["prompt_tokens"]
    assert 0 < short % 128 <= 64
    assert short > 128
    assert beyond > 64 + 128
    assert all(check.passed and check.source.startswith("gate.jsonl:") for check in checks.values())
    assert (
        checks[SHORT].observed
        == f"{short} tokens, {short % 128} beyond whole blocks of 128: 3 tokens of the answer equal to the control engine's"
    )
    assert "257 to 320 tokens" in checks[SHORT].required


def test_a_wrong_token_fails_and_names_length_block_and_place(tmp_path: Path) -> None:
    failures, rows, checks = ask(tmp_path, for_length(330, tokens(5, 6, 8), tokens(5, 6, 7)), tokens(5, 6, 7))
    assert len(failures) == 1
    assert failures[0].startswith(f"last page at prefill at most half full: {rows[0]['prompt_tokens']} tokens, ")
    assert "beyond whole blocks of 128: first differing token 2: 'same' against 'same'" in failures[0]
    assert [check.passed for check in checks.values()] == [False, True]
    assert (rows[1]["failure"], checks[SHORT].source) == (failures[0].partition(": ")[2], "gate.jsonl:2")


def test_a_wrong_token_beyond_the_window_fails(tmp_path: Path) -> None:
    failures, _, checks = ask(tmp_path, for_length(330, tokens(5, 6), tokens(9, 6)), tokens(5, 6))
    assert [check.passed for check in checks.values()] == [True, False]
    assert "first differing token 0" in failures[0]


def test_an_answer_from_a_cache_that_lost_its_first_block_fails(tmp_path: Path) -> None:
    """What a list paired by its end does: 64 tokens of the start are lost, every other note is still there."""

    def lost(reply: fake.Reply) -> None:
        kept = " ".join(reply.prompt.split(" ")[28:])
        assert estimate_tokens(reply.prompt) - estimate_tokens(kept) < 64
        reply.say(fake.right_code(kept) or "ABCD1234")

    failures, rows, checks = ask(tmp_path, for_length(330, counting(lost), counting(fake.right)))
    assert len(failures) == 1
    assert f"the code {rows[0]['code']} is not the answer" in checks[SHORT].observed


@pytest.mark.parametrize("ratio", [0.6, 1.0, 1.3, 2.0])
def test_the_length_is_found_by_what_the_server_counts(tmp_path: Path, ratio: float) -> None:
    answer = counting(fake.right, overhead=23, ratio=ratio)
    failures, rows, _ = ask(tmp_path, answer)
    assert failures == []
    assert all(row["attempt"] < smoke.ATTEMPTS for row in rows)
    assert (ratio == 1.0) == (len(rows) == 2)


def test_small_blocks_need_a_length_to_a_few_tokens(tmp_path: Path) -> None:
    made = dataclasses.replace(spec(tmp_path, False), page_smoke=page_smoke(16, 32, 24))
    with fake.openai_server(counting(fake.right)) as server:
        assert smoke.run_smoke(made, {"deployment": server.url}, "seed", tmp_path / "gate.jsonl", threading.Event()) == []
    rows = [json.loads(line) for line in (tmp_path / "gate.jsonl").read_text().splitlines()]
    assert 0 < [r for r in rows if r["smoke"] == SHORT][-1]["prompt_tokens"] % 16 <= 8


def test_a_length_that_is_never_hit_is_a_failure_although_every_answer_is_right(tmp_path: Path) -> None:
    def stuck(reply: fake.Reply) -> None:
        reply.prompt_tokens = 256
        fake.right(reply)

    failures, rows, checks = ask(tmp_path, stuck, stuck)
    assert len(rows) == 2 * smoke.ATTEMPTS
    assert {row["target"] for row in rows} == {"deployment"}
    assert all("was hit in 6 attempts, the server counted 256, 256" in failure for failure in failures)
    assert [check.passed for check in checks.values()] == [False, False]


def test_a_server_that_does_not_count_is_a_failure(tmp_path: Path) -> None:
    failures, rows, _ = ask(tmp_path, fake.no_usage)
    assert len(rows) == 2
    assert all("no usage.prompt_tokens" in failure for failure in failures)


def test_a_control_that_is_down_is_a_failure(tmp_path: Path) -> None:
    made = spec(tmp_path, True)
    with fake.openai_server(fake.right) as gone:
        url = gone.url
    with fake.openai_server(tokens(5)) as server:
        failures = smoke.run_smoke(made, {"deployment": server.url, "control": url}, "seed", tmp_path / "gate.jsonl", threading.Event())
    assert len(failures) == 2
    assert all("control: " in failure and "refused" in failure for failure in failures)


def test_a_control_that_counts_another_length_was_asked_something_else(tmp_path: Path) -> None:
    failures, _, _ = ask(tmp_path, counting(fake.right), counting(fake.right, overhead=18))
    assert len(failures) == 2
    assert all("the control engine counted" in failure for failure in failures)


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (fake.noise, "is not the answer 'the the of"),
        (fake.sse_error, "SSE error event"),
        (fake.previous, "is not the answer"),
        (fake.empty, ""),
    ],
)
def test_without_a_control_the_code_must_be_recalled(tmp_path: Path, behaviour: fake.Behaviour, why: str) -> None:
    failures, _, checks = ask(tmp_path, counting(behaviour))
    assert [check.passed for check in checks.values()] == [False, False]
    assert all(why in failure for failure in failures)


def test_without_a_control_the_right_code_passes(tmp_path: Path) -> None:
    failures, rows, checks = ask(tmp_path, counting(fake.right))
    assert failures == []
    assert f"the code {rows[0]['code']} was recalled" in checks[SHORT].observed


def test_text_that_cannot_be_judged_is_not_but_a_stream_must_come(tmp_path: Path) -> None:
    proof = dataclasses.replace(spec(tmp_path, False).proof, text_checked=False)
    failures, _, checks = ask(tmp_path, counting(fake.noise), proof=proof)
    assert failures == []
    assert "not judged" in checks[SHORT].observed
    (tmp_path / "gate.jsonl").unlink()
    failures, _, _ = ask(tmp_path, counting(fake.cut), proof=proof)
    assert len(failures) == 2


def test_an_answer_that_missed_a_role_is_a_failure(tmp_path: Path) -> None:
    made = spec(tmp_path, False)
    row = good_run(tmp_path).row("gate", prompt_tokens=300, smoke=SHORT, attempt=0, tokens=[], code="X", content="X")
    assert smoke.judge_smoke(made, TINY.prompts[0], [row]).passed is True
    alone = {**row, "worker_ids": {"prefill_worker_id": 7, "decode_worker_id": 7}}
    assert "both roles" in smoke.judge_smoke(made, TINY.prompts[0], [alone]).observed


def test_a_stop_leaves_it_open(tmp_path: Path) -> None:
    stop = threading.Event()
    stop.set()
    made = spec(tmp_path, False)
    with fake.openai_server(fake.right) as server:
        smoke.run_smoke(made, {"deployment": server.url}, "seed", tmp_path / "gate.jsonl", stop)
    found = evidence.collect(made, tmp_path)
    assert found.get(f"gate.smoke.{SHORT}.passed") is None
    assert "stopped" in found.get(f"gate.smoke.{SHORT}.observed")


def folder(path: Path, *rows: dict[str, Any]) -> Folder:
    run = good_run(path, page_smoke=TINY)
    run.spec = dataclasses.replace(run.spec, proof=dataclasses.replace(run.spec.proof, prediction=None))
    run.rows("gate.jsonl", [run.row("gate"), *rows])
    return run


def row_of(path: Path, name: str, count: int, **changes: Any) -> dict[str, Any]:
    said = {"prompt_tokens": count, "smoke": name, "attempt": 0, "tokens": [], "code": "ABCD1234", "content": "ABCD1234"}
    return Folder(path, spec(path, False)).row("gate", **{**said, **changes})


def test_a_run_in_which_nothing_was_asked_is_not_valid(tmp_path: Path) -> None:
    verdict = folder(tmp_path).verdict()
    assert verdict.verdict == "INCOMPLETE"
    assert "gate, prompt beyond the sliding window could not be judged: it was not asked" in verdict.reasons


def test_the_archive_is_judged_by_its_rows_and_not_by_what_they_say_of_themselves(tmp_path: Path) -> None:
    good = [row_of(tmp_path, SHORT, 300), row_of(tmp_path, BEYOND, 400)]
    assert folder(tmp_path, *good).verdict().verdict == "VALID"
    for spoiled, why in (({"content": "noise"}, "is not the answer 'noise'"), ({"prompt_tokens": 350}, "the server counted 350")):
        verdict = folder(tmp_path, {**good[0], **spoiled, "failure": ""}, good[1]).verdict()
        assert verdict.verdict == "INVALID"
        assert verdict.reasons[0].startswith("gate, last page at prefill at most half full: ")
        assert why in verdict.reasons[0]
        assert verdict.reasons[0].endswith("(gate.jsonl:2)")
    damaged = {"smoke": SHORT, "target": "deployment"}
    assert folder(tmp_path, damaged, good[1]).verdict().verdict == "INCOMPLETE"


def test_rows_of_the_smoke_test_do_not_stand_for_the_first_completion(tmp_path: Path) -> None:
    run = folder(tmp_path, row_of(tmp_path, SHORT, 300), row_of(tmp_path, BEYOND, 400))
    run.rows("gate.jsonl", [run.row("gate", failure="no text"), row_of(tmp_path, SHORT, 300), row_of(tmp_path, BEYOND, 400)])
    assert any("first completion: no text" in reason for reason in run.verdict().reasons)


@pytest.mark.parametrize(
    "wanted",
    [
        SmokePrompt(SHORT, 257, 330),
        SmokePrompt(SHORT, 256, 320),
        SmokePrompt(SHORT, 30, 60),
        SmokePrompt(SHORT, 320, 257),
        SmokePrompt(SHORT, 257, 400),
        SmokePrompt(BEYOND, 60, 500),
        SmokePrompt(BEYOND, 192, 500),
        SmokePrompt(BEYOND, 500, 400),
    ],
)
def test_lengths_that_would_test_something_else_fail_with_a_message_of_their_own(tmp_path: Path, wanted: SmokePrompt) -> None:
    made = dataclasses.replace(spec(tmp_path, False), page_smoke=dataclasses.replace(TINY, prompts=(wanted,)))
    with fake.openai_server(counting(fake.right)) as server:
        (failure,) = smoke.run_smoke(made, {"deployment": server.url}, "seed", tmp_path / "gate.jsonl", threading.Event())
        assert server.prompts == []
    assert f"spec.json: {wanted.minimum_tokens} to {wanted.maximum_tokens} tokens do not suit {wanted.name}" in failure
    assert evidence.collect(made, tmp_path).get(f"gate.smoke.{wanted.name}.passed") is False


def test_a_length_that_no_prompt_can_have_is_a_failure_and_nothing_is_sent(tmp_path: Path) -> None:
    made = dataclasses.replace(
        spec(tmp_path, False), page_smoke=dataclasses.replace(TINY, prompts=(SmokePrompt(SHORT, 17, 24),), block_tokens=16)
    )
    with fake.openai_server(counting(fake.right)) as server:
        (failure,) = smoke.run_smoke(made, {"deployment": server.url}, "seed", tmp_path / "gate.jsonl", threading.Event())
        assert server.prompts == []
    assert "not sent: no recall prompt of 17 to 24 tokens can be built" in failure


@pytest.mark.parametrize("block", [2, 16, 32, 48, 64, 128, 256, 528, 1056])
@pytest.mark.parametrize("window", [0, 64, 512, 1024, 4096])
def test_every_length_that_is_asked_for_suits_its_purpose(block: int, window: int) -> None:
    found = page_smoke(block, window, 24)
    assert [p.name for p in found.prompts] == ([SHORT, BEYOND] if window else [SHORT])
    for prompt in found.prompts:
        assert smoke.length_fault(found, prompt) == ""
        for count in range(prompt.minimum_tokens, prompt.maximum_tokens + 1):
            assert prompt.name == BEYOND or (count > block and 0 < count % block <= block / 2)
            assert prompt.name == SHORT or count > max(window + block, 2 * block)


def test_recipes_with_the_manager_on_ask_for_it_and_others_do_not() -> None:
    for name in ("tiny-p1d2-hybrid", "tiny-p4d8-hybrid"):
        found = build(name, "local").spec.page_smoke
        assert found == page_smoke(128, 64, 24)
    for name in ("tiny-p1d2", "tiny-agg", "mocker-p1d1"):
        assert build(name, "local").spec.page_smoke is None


def test_the_31b_model_is_asked_beyond_1024_tokens() -> None:
    path = ROOT / "recipes" / "gemma4-p4d8.yaml"
    found = recipe.load(path, ("engine_args.hybrid_kv_cache_manager=true",))
    patched = dataclasses.replace(found, patches=(), allow_unsupported_pair="shows the failure")
    context = job.Context(ROOT, "2026-01-02T03:04:05Z", files=ROOT)
    made = job.build(patched, cluster.load(ROOT / "clusters" / "example.yaml"), context).spec.page_smoke
    assert made is not None
    assert (made.block_tokens, made.window_tokens) == (128, 1024)
    assert made.prompts == (SmokePrompt(SHORT, 257, 320), SmokePrompt(BEYOND, 1153, 1280))


def test_a_max_model_len_below_the_prompts_is_refused() -> None:
    with pytest.raises(RecipeError, match="max_model_len 400 is too small for the gate's prompt") as caught:
        build("tiny-p1d2-hybrid", "local", ("engine_args.max_model_len=400", "recall.prompt_tokens=200", "agreement.prompt_tokens=[200]"))
    assert "536 tokens with the answer" in str(caught.value)
