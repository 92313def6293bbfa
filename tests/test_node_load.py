"""AIPerf phases: the real AIPerf against a local server that behaves or not, and its own JSON changed in each way that must not pass."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pdlaunch.node.http import HttpError, get
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
from pdlaunch.node.recall import run_recall
from pdlaunch.node.spec import LoadPhase, LoadSpec, RecallSpec
from tests.envs import ROOT, aiperf, engine_python
from tests.fakes import openai_server as fake

PHASE = LoadPhase(
    name="c2",
    input_tokens=64,
    output_tokens=8,
    requests=6,
    concurrency=2,
    warmup_requests=2,
    timeout_s=500.0,
    slos_ms={"time_to_first_token": 5000.0},
)
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
    assert any("left no profile_export_aiperf.json" in w and "No responses with actual content" in w for w in result.why)


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


@pytest.mark.parametrize(
    ("change", "why"),
    [
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
    ],
)
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


@pytest.mark.parametrize(
    ("change", "key"),
    [
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
    ],
)
def test_what_aiperf_would_refuse_is_found_before_submission(change: dict[str, Any], key: str) -> None:
    assert phase_problems(PHASE) == []
    assert key in [k for k, _ in phase_problems(replace(PHASE, **change))]


@pytest.fixture
def mocker_pair(tmp_path: Path) -> Iterator[tuple[str, Path, list[str]]]:
    """(URL of a real frontend, model folder, metrics URLs) with Dynamo's mocker as prefill and decode, found through files."""
    python = str(engine_python([]))
    http, *ports = free_ports(3)
    model = ROOT / "models" / "mocker-words"
    loopback = dict.fromkeys(
        ("DYN_HTTP_HOST", "DYN_SYSTEM_HOST", "DYN_TCP_RPC_HOST", "DYN_TCP_RESPONSE_STREAM_HOST", "DYN_EVENT_PLANE_HOST"), "127.0.0.1"
    )
    env = {
        **os.environ,
        **loopback,
        "DYN_DISCOVERY_BACKEND": "file",
        "DYN_FILE_KV": str(tmp_path / "kv"),
        "DYN_EVENT_PLANE": "zmq",
        "DYN_NAMESPACE": "load-test",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        "HF_HUB_OFFLINE": "1",
    }
    (tmp_path / "kv").mkdir()
    started = []
    with (tmp_path / "dynamo.log").open("wb") as log:
        for role, port in zip(("prefill", "decode"), ports, strict=True):
            argv = [
                python,
                "-m",
                "dynamo.mocker",
                "--model-path",
                str(model),
                "--model-name",
                "m",
                "--disaggregation-mode",
                role,
                "--speedup-ratio",
                "10",
            ]
            started.append(
                subprocess.Popen(argv, env={**env, "DYN_SYSTEM_PORT": str(port)}, stdout=log, stderr=log, start_new_session=True)
            )
        started.append(
            subprocess.Popen(
                [python, "-m", "dynamo.frontend", "--http-port", str(http)], env=env, stdout=log, stderr=log, start_new_session=True
            )
        )
    url, deadline = f"http://127.0.0.1:{http}", time.monotonic() + 240
    try:
        while not ready(url):
            alive = all(process.poll() is None for process in started)
            assert alive and time.monotonic() < deadline, (tmp_path / "dynamo.log").read_text()[:5000]
            time.sleep(0.2)
        yield url, model, [f"http://127.0.0.1:{port}/metrics" for port in ports]
    finally:
        for process in started:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def free_ports(count: int) -> list[int]:
    """Below 32768: Dynamo 1.6.1 reads DYN_SYSTEM_PORT as a signed 16-bit number."""
    found: list[int] = []
    for port in random.sample(range(20000, 32000), 200):
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free port between 20000 and 32000")


def ready(url: str) -> bool:
    try:
        return get(f"{url}/v1/models/m/ready", timeout_s=5.0).status == 200
    except HttpError:
        return False


@pytest.mark.engine
def test_load_and_recall_against_real_dynamo_with_a_simulated_engine(mocker_pair: tuple[str, Path, list[str]], tmp_path: Path) -> None:
    url, model, metrics_urls = mocker_pair
    phase = replace(PHASE, concurrency=None, request_rate_per_s=20.0)
    load = LoadSpec(aiperf=str(aiperf()), tokenizer=str(model), phases=(phase,))
    result = run_phase(load, phase, url, "m", metrics_urls, tmp_path / "c2", threading.Event())
    assert result.passed, result.why
    assert (result.completed, result.output_tokens) == (6, 48)
    assert None not in server_token_counts(tmp_path / "c2" / "aiperf" / RECORDS)
    served = json.loads((tmp_path / "c2" / "aiperf" / "server_metrics_export.json").read_text())["summary"]["endpoints_successful"]
    assert set(metrics_urls) <= set(served)
    recall = run_recall(url, "m", RecallSpec(2, 300, ("before",)), "before", "seed", tmp_path / "recall", 60.0, threading.Event())
    assert recall.correct == 0
    assert all(r["status"] == 200 and not r["error"] and len(set(r["worker_ids"].values())) == 2 for r in recall.rows)
