"""AIPerf phases: the real AIPerf against a local server that behaves or not, and its own JSON changed in each way that must not pass."""

from __future__ import annotations

import copy
import itertools
import json
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdlaunch.node.load import (
    EXPORT,
    RECORDS,
    PhaseResult,
    aiperf_argv,
    export_problems,
    in_milliseconds,
    judge_phase,
    phase_problems,
    run_phase,
    server_token_counts,
)
from pdlaunch.node.process import Exit
from pdlaunch.node.spec import LoadPhase, LoadSpec
from tests.envs import ROOT, aiperf
from tests.fakes import openai_server as fake

PHASE = LoadPhase(name="c2", input_tokens=64, output_tokens=8, requests=6, concurrency=2, warmup_requests=2, timeout_s=500.0,
                  slos_ms={"time_to_first_token": 5000.0})
TOKENIZER = str(ROOT / "models" / "gemma4-recall-4x1")


def load_spec(phase: LoadPhase) -> LoadSpec:
    return LoadSpec(aiperf=str(aiperf()), tokenizer=TOKENIZER, phases=(phase,))


def run(out: Path, behaviour: fake.Behaviour, phase: LoadPhase = PHASE, stop: threading.Event | None = None) -> PhaseResult:
    with fake.openai_server(behaviour) as server:
        server.metrics = "# TYPE vllm:num_preemptions counter\nvllm:num_preemptions_total 0\n"
        return run_phase(load_spec(phase), phase, server.url, "m", [f"{server.url}/metrics"], out, stop or threading.Event())


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> tuple[PhaseResult, Path]:
    out = tmp_path_factory.mktemp("load") / "c2"
    return run(out, fake.right), out


def test_a_good_phase_passes(good: tuple[PhaseResult, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    result, out = good
    assert result.passed, result.why
    assert (result.completed, result.errors, result.error_rate_pct, result.output_tokens, result.exit_code) == (6, 0, 0.0, 48, 0)
    assert result.metrics["time_to_first_token"]["unit"] == "ms"
    assert result.metrics["output_sequence_length"]["avg"] == 8.0
    assert result.metrics["goodput"]["unit"] == "requests/sec"
    assert result.aiperf_version == "0.13.0"
    assert json.loads((out / "phase.json").read_text())["passed"] is True
    assert "aiperf profile" in json.loads((out / "command.json").read_text())["command"]
    assert (out / "aiperf" / "server_metrics_export.json").exists()


def test_every_request_of_a_phase_has_a_known_token_count_and_a_prompt_of_its_own(good: tuple[PhaseResult, Path]) -> None:
    counts = server_token_counts(good[1] / "aiperf" / RECORDS)
    assert len(counts) == 8
    assert all(n is not None and n > 0 for n in counts)
    prompts = [json.dumps(s["payloads"]) for s in json.loads((good[1] / "aiperf" / "inputs.json").read_text())["data"]]
    assert len(set(prompts)) == 8


def test_an_old_folder_is_never_used_again(good: tuple[PhaseResult, Path]) -> None:
    with pytest.raises(FileExistsError):
        run(good[1], fake.right)


def test_t24_half_of_the_requests_fail_and_aiperf_ends_with_0(tmp_path: Path) -> None:
    result = run(tmp_path / "x", fake.half_errors, replace(PHASE, warmup_requests=0))
    assert result.exit_code == 0
    assert result.errors == 3
    assert not result.passed
    assert any("error rate 50 % is above 0 %" in w for w in result.why)


def test_t24_no_tokens_at_all(tmp_path: Path) -> None:
    result = run(tmp_path / "x", fake.empty, replace(PHASE, warmup_requests=0))
    assert not result.passed
    assert (result.exit_code, result.output_tokens) == (1, None)
    assert any("left no profile_export_aiperf.json" in w for w in result.why)


def test_t24_sse_errors_in_200_streams_and_answers_that_are_too_short(tmp_path: Path) -> None:
    def every_third_fails(reply: fake.Reply) -> None:
        (fake.short_output if reply.number % 3 else fake.sse_error_data)(reply)

    result = run(tmp_path / "x", every_third_fails, replace(PHASE, warmup_requests=0, max_error_rate_pct=50.0))
    assert not result.passed
    assert result.errors == 2
    assert any("output lengths (avg 2, min 2, max 2)" in w for w in result.why)


def test_t15_a_server_that_hangs_ends_the_phase_at_its_deadline_and_leaves_no_process(tmp_path: Path) -> None:
    result = run(tmp_path / "x", fake.hang, replace(PHASE, timeout_s=20.0))
    assert (result.passed, result.timed_out, result.stopped) == (False, True, False)
    assert result.why[0] == "AIPerf did not end within 20 s"


def test_a_stop_ends_the_phase(tmp_path: Path) -> None:
    stop = threading.Event()

    def first_request_stops(reply: fake.Reply) -> None:
        stop.set()
        fake.hang(reply)

    result = run(tmp_path / "x", first_request_stops, stop=stop)
    assert (result.passed, result.timed_out, result.stopped) == (False, False, True)
    assert result.why[0] == "the run was stopped during this phase"


def edit(**changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda export: export.update(changes)


def metric(name: str, **changes: Any) -> Callable[[dict[str, Any]], None]:
    return lambda export: export[name].update(changes)


@pytest.mark.parametrize(("change", "why"), [
    (edit(was_cancelled=True), "was_cancelled: True"),
    (lambda e: e.pop("was_cancelled"), "was_cancelled: None"),
    (edit(is_complete=False, incomplete_reason="threshold"), "is_complete: False (threshold)"),
    (lambda e: e.pop("is_complete"), "is_complete: None"),
    (metric("completed_request_count", avg=5.0), "5 of 6 requests completed"),
    (lambda e: e.pop("completed_request_count"), "an unknown number of 6 requests completed"),
    (metric("request_error_rate", avg=0.5), "error rate 0.5 % is above 0 %"),
    (metric("request_error_rate", unit="ratio"), "not a percentage"),
    (lambda e: e.pop("request_error_rate"), "not a percentage"),
    (metric("total_output_tokens", avg=0.0), "0 output tokens"),
    (lambda e: e.pop("total_output_tokens"), "an unknown number output tokens"),
    (metric("output_sequence_length", avg=6.0), "output lengths (avg 6)"),
    (metric("output_sequence_length", min=1.0), "output lengths (min 1)"),
    (lambda e: e.pop("output_sequence_length"), "output lengths"),
    (metric("time_to_first_token", unit="fortnights"), "unknown unit 'fortnights'"),
])
def test_t24_t27_every_way_in_which_the_json_says_no(good: tuple[PhaseResult, Path], change: Callable[..., None], why: str) -> None:
    export = json.loads((good[1] / "aiperf" / EXPORT).read_text())
    assert export_problems(export, PHASE) == []
    broken = copy.deepcopy(export)
    change(broken)
    assert any(why in problem for problem in export_problems(broken, PHASE)), export_problems(broken, PHASE)


def test_an_exit_code_alone_fails_a_phase_with_a_good_json(good: tuple[PhaseResult, Path]) -> None:
    result = judge_phase(PHASE, good[1] / "aiperf", Exit(3, False, False), good[1] / "aiperf.log", stopped=False, wall_s=1.0)
    assert result.why == ("AIPerf ended with exit code 3",)


def test_t27_seconds_become_milliseconds() -> None:
    assert in_milliseconds({"unit": "s", "avg": 1.5, "p99": 2.0, "count": 3}) == {"unit": "ms", "avg": 1500.0, "p99": 2000.0, "count": 3}
    assert in_milliseconds({"unit": "sec", "avg": 1.5}) == {"unit": "sec", "avg": 1.5}
    assert in_milliseconds({"unit": "requests/sec", "avg": 2.0}) == {"unit": "requests/sec", "avg": 2.0}


def test_the_command_of_a_phase(tmp_path: Path) -> None:
    phase = replace(PHASE, concurrency=None, request_rate_per_s=2.5, streaming=False, warmup_requests=0, slos_ms={}, timeout_s=3600.0)
    argv = aiperf_argv(LoadSpec("aiperf", "tok", (phase,)), phase, "http://h:1", "m", [], tmp_path)
    assert argv[:2] == ["aiperf", "profile"]
    options = dict(itertools.pairwise(argv))
    assert options["--num-dataset-entries"] == "6"
    assert options["--request-rate"] == "2.5"
    assert options["--request-timeout-seconds"] == "600"
    assert options["--connection-reuse-strategy"] == "never"
    assert "--no-server-metrics" in argv
    assert not {"--streaming", "--concurrency", "--warmup-request-count", "--goodput"} & set(argv)


@pytest.mark.parametrize(("change", "key"), [
    ({"name": "a/b"}, "name"),
    ({"requests": 0}, "requests"),
    ({"concurrency": 7}, "concurrency"),
    ({"concurrency": None}, "concurrency"),
    ({"request_rate_per_s": 0.0}, "request_rate_per_s"),
    ({"warmup_requests": -1}, "warmup_requests"),
    ({"timeout_s": 5.0}, "timeout_s"),
    ({"max_error_rate_pct": 100.0}, "max_error_rate_pct"),
    ({"slos_ms": {"ttft": 1.0}}, "slos_ms.ttft"),
    ({"slos_ms": {"inter_token_latency": 1.0}, "streaming": False}, "slos_ms.inter_token_latency"),
    ({"slos_ms": {"request_latency": 0.0}}, "slos_ms.request_latency"),
])
def test_what_aiperf_would_refuse_is_found_before_submission(change: dict[str, Any], key: str) -> None:
    assert phase_problems(PHASE) == []
    assert key in [k for k, _ in phase_problems(replace(PHASE, **change))]
