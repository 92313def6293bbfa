"""The verdict on run folders that differ from a good one in one thing; tests of a public report carry its trap number."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdlaunch.node.contracts import Evidence, Verdict
from pdlaunch.node.logs import PATTERNS
from pdlaunch.node.spec import BehaviourCheck
from pdlaunch.node.verdict import judge
from tests.nodefactory import AGREEMENT, PROMPTS, SPLIT, Folder, engine, good_run


def reasons(verdict: Verdict) -> str:
    return "\n".join(verdict.reasons)


def test_a_good_run_is_valid_in_one_line(tmp_path: Path) -> None:
    verdict = good_run(tmp_path).verdict()
    assert (verdict.verdict, verdict.reasons, verdict.text_checked) == ("VALID", (), True)
    assert verdict.line == "VALID  tiny-p1d2  recall 27/27, 726,000 bytes in 66 transfers, 0 failed, load 1/1 phases"
    assert all(c.source for c in verdict.checks if c.passed)


def test_the_same_evidence_gives_the_same_verdict_after_a_file(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.log("decode-0", [SPLIT])
    found, verdict = run.evidence(), run.verdict()
    found.write(tmp_path / "evidence.json")
    verdict.write(tmp_path / "verdict.json")
    assert judge(run.spec, Evidence.read(tmp_path / "evidence.json"), "") == verdict == Verdict.read(tmp_path / "verdict.json")


def test_t1_noise_with_200_is_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.wrong_recall("before")
    verdict = run.verdict()
    assert verdict.verdict == "INVALID"
    assert verdict.reasons[0].startswith("recall before load: recall 0 of 9; first: the code is not in the answer")
    assert verdict.reasons[0].endswith("(recall/before.jsonl:1)")


def test_stock_split_failure_tells_recall_first_and_quotes_the_assertion(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.wrong_recall("before", content="", error="SSE error event: Remote KV load failed", why="SSE error event: Remote KV load failed")
    for name in ("recall/during.jsonl", "recall/after.jsonl", "load/c2/command.json"):
        (tmp_path / name).unlink()
    line = run.log("decode-0", [SPLIT])
    run.counters(bytes=0, transfers=0, failed_transfers=18)
    verdict = run.verdict("recall before load: 0 of 9, 0 hangs")
    assert verdict.verdict == "INVALID"
    assert verdict.reasons[0].startswith("recall before load: recall 0 of 9; first: SSE error event")
    assert verdict.reasons[1].startswith(f"logs/decode-0.log:{line}: {SPLIT}")
    assert "failed KV transfers: 18" in reasons(verdict)
    assert verdict.reasons[-1] == "the run ended early: recall before load: 0 of 9, 0 hangs"
    assert "could not be judged" not in reasons(verdict)
    assert verdict.line.startswith("INVALID  tiny-p1d2  recall 0/9 of 27, ")
    assert sum("SPLIT region" in r for r in verdict.reasons) == 1


def test_t3_answers_of_other_prompts_are_invalid_and_named(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.wrong_recall("after", 1, leaked_from=["prompt 4"], why="answered with the code of prompt 4", content="CODE0004")
    verdict = run.verdict()
    assert verdict.verdict == "INVALID"
    assert "recall 8 of 9, 1 answered with the code of another prompt; first: answered with the code of prompt 4" in reasons(verdict)


def test_t3_a_leak_beside_the_right_code_is_invalid_too(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.rows("recall/before.jsonl", [run.recall_row(i, leaked_from=["prompt 1"] if i == 0 else []) for i in range(PROMPTS)])
    assert run.verdict().verdict == "INVALID"


def test_t3_blocks_that_were_read_after_they_expired_are_invalid_although_no_counter_says_so(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.log(
        "prefill-0",
        [
            "(Worker pid=1) ERROR 11-30 01:27:56 [pull_worker.py:663] Potentially invalid KV blocks for unrecognized request "
            "14342e were retrieved by a decode worker. They may have expired."
        ],
    )
    verdict = run.verdict()
    assert verdict.verdict == "INVALID"
    assert verdict.reasons[0].startswith("logs/prefill-0.log:3: (Worker pid=1) ERROR")


def test_t2_nixl_backend_error_and_a_dead_decode_engine(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for name in ("recall/before.jsonl", "recall/during.jsonl", "recall/after.jsonl"):
        (tmp_path / name).unlink()
    run.log("decode-0", ["nixl_cu12._bindings.nixlBackendError: NIXL_ERR_BACKEND", "vllm.v1.engine.exceptions.EngineDeadError: died"])
    verdict = run.verdict("decode-0 on vm ended with exit code 1")
    assert verdict.verdict == "INVALID"
    assert "NIXL_ERR_BACKEND" in verdict.reasons[0]
    assert "EngineDeadError" in verdict.reasons[1]


def test_t5_handshake_assertion(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.log("decode-0", ["ERROR [base_worker.py:1282] NIXL transfer failure: handshake_failed | Context: {}", "AssertionError"])
    verdict = run.verdict()
    assert (verdict.verdict, "handshake" in verdict.reasons[0], "AssertionError" in verdict.reasons[1]) == ("INVALID", True, True)


def test_t6_disagreement_with_the_control_is_invalid(tmp_path: Path) -> None:
    engines = (engine("prefill", 1), engine("decode", 2), engine("control", 1, kind="vllm.serve"))
    run = good_run(tmp_path, agreement=AGREEMENT, engines=engines)
    run.rows("gate.jsonl", [run.row("gate"), run.row("gate", target="control")])
    run.spec = replace(run.spec, proof=replace(run.spec.proof, prediction=None))

    def pair(equal: bool) -> list[dict[str, Any]]:
        told = {"equal": equal, "compared": "tokens", "first_difference": None if equal else 3, "why": "" if equal else "token 3"}
        return [run.row("agreement"), run.row("agreement", target="control") | told]

    run.rows("agreement.jsonl", pair(True) + pair(False))
    assert "control engine: 1 of 2 answers are equal; first: token 3 (agreement.jsonl:4)" in reasons(run.verdict())
    run.rows("agreement.jsonl", pair(True))
    assert (run.verdict("stopped").verdict, run.verdict().verdict) == ("INCOMPLETE", "INCOMPLETE")
    (tmp_path / "agreement.jsonl").unlink()
    assert "agreement with the control engine could not be judged" in reasons(run.verdict())


def test_t13_hybrid_manager_off_is_shown_and_does_not_decide(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.log("decode-0", ["WARNING [kv_cache_utils.py:1957] Hybrid KV cache manager is disabled for this hybrid model, This means"])
    verdict = run.verdict()
    assert verdict.verdict == "VALID"
    (check,) = [c for c in verdict.checks if c.name == "log hybrid_off"]
    assert (check.needed, check.passed, check.required) == (False, None, "nothing: the line is only shown")


def test_the_line_says_what_was_asked_not_what_was_planned(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "recall/after.jsonl").unlink()
    assert "recall 18/18 of 27" in run.verdict("stopped").line
    for when in ("before", "during"):
        (tmp_path / f"recall/{when}.jsonl").unlink()
    assert "recall not asked" in run.verdict("stopped").line


def test_every_observed_value_is_words_or_figures(tmp_path: Path) -> None:
    for check in good_run(tmp_path).verdict().checks:
        assert check.observed, check.name
        assert not {"{", "True", "False", "None"} & {check.observed[0], check.observed, check.required}, check


@pytest.mark.parametrize(
    ("counters", "why"),
    [
        ({"bytes": 0, "transfers": 0, "external": 0, "local_compute": 22660}, "KV bytes transferred: 0"),
        ({"external": 20000, "local_compute": 2660}, "prompt tokens that decode computed itself: 2,660 tokens in 33 requests"),
    ],
)
def test_t14_right_text_without_a_transfer_is_invalid(tmp_path: Path, counters: dict[str, float], why: str) -> None:
    run = good_run(tmp_path)
    run.counters(**counters)
    verdict = run.verdict()
    assert verdict.verdict == "INVALID"
    assert why in reasons(verdict)
    assert verdict.line.startswith("INVALID  tiny-p1d2  recall 27/27")


def test_t14_bytes_that_do_not_follow_from_the_geometry_are_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.counters(bytes=726_000 - 2000)
    assert "bytes as predicted, after_load-end: 232,000 bytes moved for 9 requests, 234,000 predicted" in reasons(run.verdict())


def test_an_inexact_prediction_is_shown_and_does_not_decide(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.counters(bytes=726_000 - 2000, local_cache_hit=64)
    verdict = run.verdict()
    assert verdict.verdict == "VALID"
    (check,) = [c for c in verdict.checks if c.name == "bytes as predicted, after_load-end"]
    assert (check.passed, check.observed) == (None, "not exact: tokens.local_cache_hit is 64")


def test_t15_hangs_are_called_hangs(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.wrong_recall("during", 2, hang=True, error="hang: no complete answer before the deadline", why="hang: no complete answer")
    assert "recall 7 of 9, 2 hung; first: hang: no complete answer" in reasons(run.verdict())


def test_vllm_52627_corruption_only_under_load_is_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.wrong_recall("during", 1)
    verdict = run.verdict()
    assert verdict.reasons[0].startswith("recall during load: recall 8 of 9")
    assert verdict.line.startswith("INVALID  tiny-p1d2  recall 26/27")


@pytest.mark.parametrize(
    ("process", "counters", "why"),
    [
        ("decode-0", {"failed_transfers": 1}, "failed KV transfers: 1"),
        ("decode-0", {"failed_notifications": 2}, "failed notifications: 2"),
        ("decode-0", {"errors": 1}, "requests ended with an error: 1"),
        ("prefill-0", {"failed_notifications": 1}, "failed notifications of prefill: 1"),
        ("prefill-0", {"expired": 4}, "requests whose KV blocks prefill gave up unread: 4"),
    ],
)
def test_every_failure_counter_decides(tmp_path: Path, process: str, counters: dict[str, float], why: str) -> None:
    run = good_run(tmp_path)
    run.counters(process, **counters)
    assert run.verdict().verdict == "INVALID"
    assert why in reasons(run.verdict())


def test_t17_metrics_of_another_process_are_not_evidence(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for when in ("ready", "before_load", "after_load", "end"):
        path = tmp_path / "metrics" / f"prefill-0.{when}.prom"
        path.write_text(path.read_text().replace('worker_id="prefill-0"', 'worker_id="decode-0"'))
    assert "show the counters of one worker" in reasons(run.verdict())
    run.counters()
    for when in ("ready", "before_load", "after_load", "end"):
        (tmp_path / "metrics" / f"decode-0.{when}.prom").write_text("dynamo_component_uptime_seconds 1\n")
    assert "metrics of decode-0: not seen: vllm metrics in the scrapes" in reasons(run.verdict())


def test_a_worker_that_was_refused_is_a_lost_worker(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    gate = json.loads((tmp_path / "gate.json").read_text())
    (tmp_path / "gate.json").write_text(json.dumps(gate | {"found": {"prefill": 1, "decode": 0}}))
    run.log("frontend", ["ERROR Rejected incompatible workers; the first accepted configuration retains the WorkerSet"])
    verdict = run.verdict()
    assert verdict.reasons[0].startswith("logs/frontend.log:1: ERROR Rejected incompatible workers")
    assert "workers per role: 0 decode, 1 prefill" in reasons(verdict)


def test_a_gate_that_never_opened_leaves_the_run_incomplete_with_its_reason(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    before_anything(run)
    gate = {"ready": False, "expected": {"prefill": 1, "decode": 1}, "found": {"prefill": 1}, "failure": "decode: 0 of 1"}
    (tmp_path / "gate.json").write_text(json.dumps(gate))
    verdict = run.verdict("engines to be ready: not there after 600 s")
    assert verdict.verdict == "INCOMPLETE"
    assert "workers per role could not be judged: decode: 0 of 1" in reasons(verdict)


def test_a_recipe_without_recall_says_that_its_text_was_not_checked(tmp_path: Path) -> None:
    verdict = good_run(tmp_path, recall=None).verdict()
    assert (verdict.verdict, verdict.text_checked) == ("VALID", False)
    assert "text NOT checked" in verdict.line


def test_http_200_alone_does_not_open_the_gate(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.rows("gate.jsonl", [run.row("gate", failure="the completion is empty", content="")])
    assert "first completion: the completion is empty" in reasons(run.verdict())


def test_a_first_completion_that_was_called_off_shows_nothing(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for name in ("recall/before.jsonl", "recall/during.jsonl", "recall/after.jsonl", "load/c2/command.json"):
        (tmp_path / name).unlink()
    run.rows("gate.jsonl", [run.row("gate", content="", error="stopped: while waiting for the answer", failure="stopped: while waiting")])
    verdict = run.verdict("interrupted by SIGINT while requests were running")
    assert verdict.verdict == "INCOMPLETE", verdict.reasons
    (check,) = [c for c in verdict.checks if c.name == "first completion"]
    assert check.passed is None


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"completed_request_count": {"unit": "requests", "avg": 3.0}}, "3 of 4 requests completed"),
        ({"request_error_rate": {"unit": "%", "avg": 50.0}}, "error rate 50 % is above 0 %"),
        ({"total_output_tokens": {"unit": "tokens", "avg": 0.0}}, "0 output tokens"),
        ({"is_complete": False}, "is_complete: False"),
        ({"was_cancelled": True}, "was_cancelled: True"),
        ({"output_sequence_length": {"unit": "tokens", "avg": 2.0, "min": 2.0, "max": 2.0}}, "output lengths"),
    ],
)
def test_t24_a_load_tool_that_ended_with_0_can_be_invalid(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    run = good_run(tmp_path)
    run.aiperf(**changes)
    verdict = run.verdict()
    assert (verdict.verdict, why in reasons(verdict)) == ("INVALID", True)
    assert "load 0/1 phases" in verdict.line


def test_t24_no_result_at_all_is_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "load" / "c2" / "aiperf" / "profile_export_aiperf.json").unlink()
    assert "AIPerf left no profile_export_aiperf.json" in reasons(run.verdict())


def test_t27_an_unknown_unit_is_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.aiperf(time_to_first_token={"unit": "ticks", "avg": 1.0})
    assert "time_to_first_token has the unknown unit 'ticks'" in reasons(run.verdict())


@pytest.mark.parametrize(("received", "verdict"), [(726_000 // 4, "VALID"), (100, "INVALID")])
def test_t31_rdma_that_fell_back_to_tcp(tmp_path: Path, received: int, verdict: str) -> None:
    run = good_run(tmp_path)
    for process, host in (("prefill-0", "node1"), ("decode-0", "node2")):
        run.node(
            process,
            host=host,
            fabric_before={"mlx5_0/1/port_rcv_data": 5},
            fabric_after={"mlx5_0/1/port_rcv_data": 5 + received},
            fabric_error="",
        )
    assert run.verdict().verdict == verdict
    if verdict == "INVALID":
        assert "RDMA carried the transfer: 400 bytes received by the RDMA ports" in reasons(run.verdict())


def test_t31_one_host_needs_no_fabric(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for process in ("prefill-0", "decode-0"):
        run.node(process, fabric_before={"mlx5_0/1/port_rcv_data": 5}, fabric_after={"mlx5_0/1/port_rcv_data": 5}, fabric_error="")
    assert run.verdict().verdict == "VALID"


@pytest.mark.parametrize("role", ["prefill", "decode"])
@pytest.mark.parametrize("policy", ["recompute", ""])
def test_the_load_failure_policy_must_be_set_on_both_roles(tmp_path: Path, role: str, policy: str) -> None:
    run = good_run(tmp_path)
    engines = tuple(engine(e.role, e.tensor_parallel, policy or "fail") if e.role == role else e for e in run.spec.engines)
    if not policy:
        engines = tuple(replace(e, ranks=(replace(e.ranks[0], argv=("python",)),)) if e.role == role else e for e in engines)
    run.spec = replace(run.spec, engines=engines)
    assert f"kv_load_failure_policy of {role}-0: {policy or 'not set'}" in reasons(run.verdict())


def test_a_prefill_rank_in_which_the_patch_is_not_active_is_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    path = tmp_path / "logs" / "prefill-0.log"
    path.write_text(path.read_text().replace("active", "silent"))
    assert "patch active in prefill-0: 0 of 1 prefill ranks" in reasons(run.verdict())


def silent(run: Folder) -> None:
    for path in (run.path / "logs").glob("*.log"):
        path.write_text("INFO starting\n")


def not_ready(run: Folder) -> None:
    before_anything(run)
    gate = {"ready": False, "expected": {"prefill": 1, "decode": 1}, "found": {}, "failure": "no worker has registered the model yet"}
    (run.path / "gate.json").write_text(json.dumps(gate))


@pytest.mark.parametrize(
    ("ended", "spoil"),
    [
        ("interrupted by SIGINT while waiting for engines to be ready", lambda run: before_anything(run)),
        ("engines to be ready: not there after 5 s; no facts from prefill-0", not_ready),
    ],
)
def test_engines_that_never_registered_are_not_blamed_for_their_silence(
    tmp_path: Path, ended: str, spoil: Callable[[Folder], None]
) -> None:
    run = good_run(tmp_path)
    spoil(run)
    silent(run)
    verdict = run.verdict(ended)
    assert verdict.verdict == "INCOMPLETE", verdict.reasons
    assert verdict.reasons[0] == f"the run did not reach its end: {ended}"
    found = {c.name: (c.passed, c.observed) for c in verdict.checks}
    assert found["patch active in prefill-0"] == (None, "0 of 1 prefill ranks, when the run had not come to registration")
    assert found["plan lines of decode-0"] == (None, "0 of 2 decode ranks, before the first completion")


def test_silence_before_the_first_completion_shows_nothing_of_the_plan_but_of_the_patch(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    gate = (tmp_path / "gate.json").read_text()
    before_anything(run)
    (tmp_path / "gate.json").write_text(gate)
    path = tmp_path / "logs" / "decode-0.log"
    path.write_text("\n".join(line for line in path.read_text().splitlines() if "plan:" not in line))
    assert run.verdict("interrupted by SIGINT").verdict == "INCOMPLETE"
    silent(run)
    verdict = run.verdict("interrupted by SIGINT")
    assert verdict.verdict == "INVALID"
    assert "plan lines" not in reasons(verdict)
    for said in ("patch active in prefill-0: 0 of 1 prefill ranks", "patch active in decode-0: 0 of 2 decode ranks"):
        assert said in reasons(verdict)


@pytest.mark.parametrize("ended", ["", "interrupted by SIGINT while requests were running"])
def test_ranks_that_served_in_silence_are_invalid_however_the_run_ended(tmp_path: Path, ended: str) -> None:
    run = good_run(tmp_path)
    silent(run)
    verdict = run.verdict(ended)
    assert verdict.verdict == "INVALID"
    for said in ("patch active in prefill-0: 0 of 1", "patch active in decode-0: 0 of 2", "plan lines of decode-0: 0 of 2"):
        assert said in reasons(verdict)


def test_a_run_without_its_gate_is_never_valid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    silent(run)
    (tmp_path / "gate.json").unlink()
    assert run.verdict().verdict == "INCOMPLETE"


def test_a_decode_rank_without_its_plan_line_is_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    path = tmp_path / "logs" / "decode-0.log"
    path.write_text(path.read_text().replace("plan: engine=e1 rank=1/2", "plan: engine=e1 rank=0/2"))
    assert "plan lines of decode-0: 1 of 2 decode ranks" in reasons(run.verdict())


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"file_sha256": {"vllm/a.py": "cd"}}, "build identity: decode-0: vllm/a.py has sha256 cd, required ab"),
        ({"versions": {"vllm": "0.30.0"}}, "build identity: decode-0: vllm 0.30.0 instead of 0.31.0"),
    ],
)
def test_another_build_on_one_role_is_invalid(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    run = good_run(tmp_path)
    run.node("decode-0", **change)
    assert why in reasons(run.verdict())


@pytest.mark.parametrize("check", ["tool_call_thinking_on", "tool_call_thinking_off", "json_schema"])
def test_behaviour_checks_decide(tmp_path: Path, check: BehaviourCheck) -> None:
    run = good_run(tmp_path, behaviour=(check,))
    run.rows("behaviour.jsonl", [run.row("behaviour", check=check, passed=False, why="no tool call")])
    assert f"{check.replace('_', ' ')}: no tool call (behaviour.jsonl:1)" in reasons(run.verdict())
    (tmp_path / "behaviour.jsonl").unlink()
    assert run.verdict().verdict == "INCOMPLETE"


@pytest.mark.parametrize("pattern", [p for p in PATTERNS if p.decides], ids=lambda p: p.name)
def test_every_deciding_log_line_decides(tmp_path: Path, pattern: Any) -> None:
    samples = {
        "split_region": SPLIT,
        "hash_mismatch": "RuntimeError: NIXL compatibility hash mismatch. Local",
        "block_size": "Local block size 128 is not divisible by remote block size 256 or vice versa.",
        "nixl_error": "NIXL_ERR_NOT_FOUND",
        "handshake": "NIXL transfer failure: handshake_setup_failed | Context: {}",
        "assertion": "AssertionError: x",
        "transfer_failure": "NIXL transfer failure: transfer_exception | Context: {}",
        "engine_dead": "EngineDeadError",
        "kv_load_failure": "Failing 1 request(s) due to KV load failure (failure_policy=fail, 800 tokens affected).",
        "kv_recomputed": "Recovered from KV load failure: 1 request(s) rescheduled (800 tokens affected).",
        "not_implemented": "NotImplementedError: mixed KV heads: decode TP must be at least prefill TP",
        "expired": "Releasing expired KV blocks for request x which were retrieved by 0 remote worker(s) before lease expired.",
        "rejected_worker": "Rejected incompatible workers; the first",
        "system_port": "System status server startup failed: x",
        "invalid_blocks": "Potentially invalid KV blocks for unrecognized request x were retrieved by a decode worker.",
    }
    run = good_run(tmp_path)
    line = run.log("decode-0", [samples[pattern.name]])
    verdict = run.verdict()
    assert verdict.verdict == "INVALID"
    assert verdict.reasons[0].startswith(f"logs/decode-0.log:{line}: ")


def after_load(run: Folder) -> None:
    (run.path / "recall" / "after.jsonl").unlink()
    (run.path / "metrics" / "decode-0.end.prom").unlink()


def in_recall(run: Folder) -> None:
    stopped = {"error": "stopped: while waiting", "correct": False, "content": ""}
    run.rows("recall/before.jsonl", [run.recall_row(0), run.recall_row(1), run.recall_row(2, **stopped)])
    for name in ("recall/during.jsonl", "recall/after.jsonl", "load/c2/command.json"):
        (run.path / name).unlink()


def in_load(run: Folder) -> None:
    (run.path / "load" / "c2" / "phase.json").write_text('{"exit_code": null, "stopped": true, "wall_s": 3.0}')
    (run.path / "load" / "c2" / "aiperf" / "profile_export_aiperf.json").unlink()
    after_load(run)


def before_anything(run: Folder) -> None:
    for folder in ("recall", "metrics", "load", "nodes"):
        for path in sorted((run.path / folder).rglob("*"), reverse=True):
            path.unlink() if path.is_file() else path.rmdir()
    for name in ("gate.json", "gate.jsonl", "behaviour.jsonl"):
        (run.path / name).unlink()


@pytest.mark.parametrize("spoil", [after_load, in_recall, in_load, before_anything])
def test_t35_a_run_that_did_not_reach_its_end_is_incomplete(tmp_path: Path, spoil: Callable[[Folder], None]) -> None:
    run = good_run(tmp_path)
    spoil(run)
    verdict = run.verdict("interrupted by SIGTERM while requests were running")
    assert verdict.verdict == "INCOMPLETE"
    assert verdict.reasons[0] == "the run did not reach its end: interrupted by SIGTERM while requests were running"
    assert len(verdict.reasons) > 1


def test_a_whole_folder_of_an_interrupted_run_is_incomplete_all_the_same(tmp_path: Path) -> None:
    assert good_run(tmp_path).verdict("interrupted by SIGINT").verdict == "INCOMPLETE"
    assert good_run(tmp_path / "x").verdict("complete").verdict == "VALID"


def test_what_failed_for_good_before_the_interruption_stays_invalid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.wrong_recall("before", 1)
    after_load(run)
    assert run.verdict("interrupted by SIGTERM").verdict == "INVALID"


def test_recall_during_load_that_never_overlapped_leaves_the_run_incomplete(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "recall" / "during.jsonl").unlink()
    with (tmp_path / "events.jsonl").open("a") as file:
        file.write(
            json.dumps(
                {
                    "utc": "2026-11-30T01:06:00.000000Z",
                    "monotonic_s": 180.0,
                    "stage": "recall_during",
                    "state": "failed",
                    "reason": "the load was over before a request of it was seen in flight",
                }
            )
            + "\n"
        )
    verdict = run.verdict()
    assert verdict.verdict == "INCOMPLETE"
    assert "the load was over before a request of it was seen in flight" in reasons(verdict)


def test_a_mocker_run_says_that_its_text_was_not_checked(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    engines = (engine("prefill", 1, kind="dynamo.mocker"), engine("decode", 1, kind="dynamo.mocker"))
    run.spec = replace(
        run.spec, engines=engines, behaviour=(), proof=replace(run.spec.proof, text_checked=False, prediction=None, mixed_heads=False)
    )
    for when in ("before", "during", "after"):
        run.wrong_recall(when)
    verdict = run.verdict()
    assert verdict.text_checked is False
    assert verdict.line == "VALID  tiny-p1d2  text NOT checked, load 1/1 phases"


def test_an_aggregated_run_needs_no_transfer(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.spec = replace(
        run.spec,
        engines=(replace(run.spec.engines[0], name="agg-0", role="agg"),),
        proof=replace(run.spec.proof, disaggregated=False, prediction=None, mixed_heads=False),
    )
    gate = json.loads((tmp_path / "gate.json").read_text())
    (tmp_path / "gate.json").write_text(json.dumps(gate | {"expected": {"agg": 1}, "found": {"agg": 1}}))
    for when in ("ready", "before_load", "after_load", "end"):
        (tmp_path / "metrics" / f"prefill-0.{when}.prom").rename(tmp_path / "metrics" / f"agg-0.{when}.prom")
    (tmp_path / "nodes" / "prefill-0.json").rename(tmp_path / "nodes" / "agg-0.json")
    verdict = run.verdict()
    assert verdict.verdict == "VALID", verdict.reasons
    assert verdict.line == "VALID  tiny-p1d2  recall 27/27, aggregated, no transfer, load 1/1 phases"


def test_nothing_at_all_is_never_valid(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    assert judge(run.spec, Evidence(), "").verdict == "INCOMPLETE"
    bare = replace(run.spec, engines=(), recall=None, load=None, behaviour=(), proof=replace(run.spec.proof, versions={}, file_sha256={}))
    assert judge(bare, Evidence(), "").verdict == "INCOMPLETE"
