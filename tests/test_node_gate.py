from __future__ import annotations

import json
import threading
from dataclasses import replace

import pytest

from pdlaunch.node.gate import Readiness, expected_workers, first_completion, judge_ready, look, unregistered
from pdlaunch.node.spec import Proof
from tests.fakes.raw_server import answering, raw_server, respond
from tests.fakes.specs import engine, spec

EXPECTED = {"prefill": 1, "decode": 1}


def ready_body(ready=True, namespace="ns", **workers):
    types = {name: {"workers": count, "needs": []} for name, count in workers.items()}
    return {"model": "m", "ready": ready, "namespaces": {namespace: {"ready": ready, "worker_types": types}}}


def test_engines_that_have_not_registered_are_named_as_far_as_a_count_tells():
    engines = [engine(r, ("x",), {}, "dynamo.vllm") for r in ("prefill", "decode", "control")]
    engines.append(replace(engines[1], name="decode-1", replica=1))
    assert unregistered(engines, {}) == "; not registered: prefill-0, decode-0, decode-1"
    assert unregistered(engines, {"prefill": 1, "decode": 1}) == "; not registered: 1 of decode-0, decode-1"
    assert unregistered(engines, {"prefill": 1, "decode": 2}) == unregistered(engines, {"prefill": 1, "decode": 3}) == ""


def test_expected_workers_counts_engines_per_worker_type():
    engines = [engine(role, ("x",), {}, "dynamo.vllm") for role in ("prefill", "decode", "decode", "control")]
    assert expected_workers(engines) == {"prefill": 1, "decode": 2}
    assert expected_workers([engine("agg", ("x",), {}, "dynamo.vllm")]) == {"aggregated": 1}


@pytest.mark.parametrize(
    ("status", "body", "failure"),
    [
        (200, ready_body(prefill=1, decode=1), ""),
        (200, ready_body(prefill=1), "decode: 0 of 1"),
        (200, ready_body(prefill=2, decode=1), "prefill: 2 of 1"),
        (200, ready_body(prefill=1, decode=1, aggregated=1), "aggregated: 1, none was started"),
        (200, ready_body(prefill=1, decode=1, namespace="other"), "prefill: 0 of 1; decode: 0 of 1"),
        (503, ready_body(ready=False, decode=1), "prefill: 0 of 1"),
        (503, ready_body(ready=False, prefill=1, decode=1), "all workers are there, but the model is not ready (HTTP 503)"),
        (200, {"ready": True}, "HTTP 200 with an answer of another form"),
        (200, ["ready"], "HTTP 200 with an answer of another form"),
        (200, {"ready": True, "namespaces": {"ns": {"worker_types": {"prefill": {"workers": "many"}}}}}, "another form"),
    ],
)
def test_readiness_is_judged_by_its_counts(status, body, failure):
    found = judge_ready(status, body, "ns", EXPECTED)
    assert found.ready is (failure == "")
    assert failure in found.failure


def test_not_found_is_not_yet_and_then_ready():
    ready = json.dumps(ready_body(prefill=1, decode=1))
    answers = [respond(404, '{"error": "Model not found"}'), respond(200, "busy"), respond(200, ready)]
    with raw_server(answering(*answers)) as url:
        seen = [look(url, "a/b", "ns", EXPECTED) for _ in range(3)]
    assert [r.ready for r in seen] == [False, False, True]
    assert "no worker has registered" in seen[0].failure
    assert "not JSON" in seen[1].failure


def test_the_model_name_is_quoted():
    paths = []

    def answer(connection, head, done):
        paths.append(head.split()[1])
        connection.sendall(respond(404, "{}"))

    with raw_server(answer) as url:
        look(url, "google/gemma 4", "ns", EXPECTED)
    assert paths == [b"/v1/models/google%2Fgemma%204/ready"]


def test_readiness_is_written_for_the_archive(tmp_path):
    Readiness({"prefill": 1}, EXPECTED, False, "decode: 0 of 1").write(tmp_path / "gate.json")
    assert json.loads((tmp_path / "gate.json").read_text())["failure"] == "decode: 0 of 1"


def stream(*events: str) -> bytes:
    return b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nConnection: close\r\n\r\n" + "".join(e + "\n\n" for e in events).encode()


def chunk(content="", finish=None, **more):
    return "data: " + json.dumps({"choices": [{"index": 0, "delta": {"content": content}, "finish_reason": finish}], **more})


def ids(prefill, decode):
    return {"nvext": {"worker_id": {"prefill_worker_id": prefill, "decode_worker_id": decode}}}


DONE = "data: [DONE]"
TEXT = Proof(disaggregated=True, kv_load_failure_policy="fail", prediction=None, mixed_heads=False, patches=(), file_sha256={}, versions={})


@pytest.mark.parametrize(
    ("answer", "failure"),
    [
        (stream(chunk("AB12", **ids(1, 2)), chunk(finish="stop", **ids(1, 2)), DONE), None),
        (stream(chunk("AB12"), chunk(finish="stop"), DONE), None),
        (stream(chunk("AB12"), "event: error\n: handshake failed", DONE), "SSE error event: handshake failed"),
        (stream(chunk(), chunk(finish="stop"), DONE), "no text"),
        (stream(chunk(" \n"), chunk(finish="length"), DONE), "no text"),
        (stream(chunk("AB12"), chunk(finish="error"), DONE), "finish_reason error"),
        (stream(chunk("AB12")), "without [DONE]"),
        (stream(chunk("AB12", **ids(7, 7)), chunk(finish="stop"), DONE), "did not go through both roles"),
        (stream("data: <html>", DONE), "not JSON"),
        (respond(503, '{"message": "Model is not ready"}'), "HTTP 503"),
        (b"", "RemoteDisconnected"),
    ],
)
def test_the_first_completion_is_judged_by_its_text_and_its_stream(tmp_path, answer, failure):
    made = spec(tmp_path, (), (), proof=TEXT)
    with raw_server(answering(answer)) as url:
        found = first_completion(made, url, "seed", tmp_path / "gate.jsonl", threading.Event())
    row = json.loads((tmp_path / "gate.jsonl").read_text())
    assert row["failure"] == found
    assert (failure in found) if failure else found == ""


def test_a_completion_that_never_comes_is_a_hang(tmp_path):
    made = spec(tmp_path, (), (), proof=TEXT)
    made = type(made)(**{**vars(made), "deadlines": type(made.deadlines)(gate_s=0.3)})
    with raw_server(lambda connection, head, done: done.wait(30)) as url:
        assert "hang" in first_completion(made, url, "seed", tmp_path / "gate.jsonl", threading.Event())


def test_the_text_of_the_mocker_is_not_judged(tmp_path):
    made = spec(tmp_path, (), ())
    with raw_server(answering(stream(chunk(), chunk(finish="length"), DONE))) as url:
        assert first_completion(made, url, "seed", tmp_path / "gate.jsonl", threading.Event()) == ""
