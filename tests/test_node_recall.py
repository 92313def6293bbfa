"""Recall and agreement against a local server that misbehaves; each test is named after the public report it guards against."""

from __future__ import annotations

import contextlib
import json
import socket
import ssl
import subprocess
import threading
from pathlib import Path

import pytest

from pdlaunch.node import completion, http
from pdlaunch.node.contracts import ANSWER_KEYS
from pdlaunch.node.recall import RecallResult, run_recall
from pdlaunch.node.spec import RecallSpec
from tests.fakes import openai_server as fake
from tests.fakes import raw_server

SPEC = RecallSpec(prompts=4, prompt_tokens=300, when=("before", "during", "after"))


def recall(tmp_path: Path, behaviour: fake.Behaviour, spec: RecallSpec = SPEC, timeout_s: float = 10.0) -> RecallResult:
    with fake.openai_server(behaviour) as server:
        return run_recall(server.url, "m", spec, "before", "seed", tmp_path / "recall", timeout_s, threading.Event())


def test_right_answers_pass_and_every_raw_answer_is_kept(tmp_path: Path) -> None:
    result = recall(tmp_path, fake.right)
    assert (result.asked, result.correct, result.hangs, result.leaked, result.passed) == (4, 4, 0, 0, True)
    rows = [json.loads(line) for line in (tmp_path / "recall" / "before.jsonl").read_text().splitlines()]
    assert sorted(r["prompt"] for r in rows) == [0, 1, 2, 3]
    for row in rows:
        assert set(ANSWER_KEYS) <= set(row)
        assert row["content"] == row["code"]
        assert row["prompt_tokens"] > 0
        assert row["ttft_s"] is not None
        assert row["worker_ids"] == {"prefill_worker_id": 8021412609786401916, "decode_worker_id": 13736378885712228729}
    assert [r["depth"] for r in result.rows] == [0.0, 0.3333, 0.6667, 1.0]
    assert len({r["prompt_sha256"] for r in rows}) == 4


def test_prompts_are_greedy_streamed_and_new_for_every_run_and_time(tmp_path: Path) -> None:
    with fake.openai_server(fake.right) as server:
        for when, seed in (("before", "a"), ("after", "a"), ("before", "b")):
            run_recall(server.url, "m", SPEC, when, seed, tmp_path / seed, 10.0, threading.Event())  # type: ignore[arg-type]
        assert len(set(server.prompts)) == 12
        for body in server.bodies:
            assert (body["temperature"], body["stream"], body["max_tokens"]) == (0, True, 24)
            assert body["stream_options"] == {"include_usage": True}


def test_t1_noise_with_status_200_is_wrong(tmp_path: Path) -> None:
    result = recall(tmp_path, fake.noise)
    assert (result.correct, result.passed) == (0, False)
    assert all(r["status"] == 200 and not r["error"] and "is not in the answer" in r["why"] for r in result.rows)


def test_t3_the_answer_of_the_previous_prompt_is_recognised(tmp_path: Path) -> None:
    result = recall(tmp_path, fake.previous)
    assert (result.correct, result.leaked) == (0, 3)
    assert [r["why"] for r in result.rows[1:]] == [f"answered with the code of prompt {k}" for k in range(3)]


def test_t3_a_code_of_an_earlier_time_of_the_run_is_recognised(tmp_path: Path) -> None:
    with fake.openai_server(fake.right) as server:
        before = run_recall(server.url, "m", SPEC, "before", "seed", tmp_path, 10.0, threading.Event())
        server.behaviour = lambda reply: reply.say(before.rows[2]["code"])
        after = run_recall(server.url, "m", SPEC, "after", "seed", tmp_path, 10.0, threading.Event())
    assert (after.correct, after.leaked) == (0, 4)
    assert after.rows[0]["why"] == "answered with the code of prompt 2 of recall before"


def test_t3_reasoning_is_read_too(tmp_path: Path) -> None:
    assert recall(tmp_path, fake.code_in_reasoning_only).correct == 4
    assert recall(tmp_path, fake.corrupt_reasoning).correct == 0


def test_a_code_inside_a_longer_word_is_not_the_code(tmp_path: Path) -> None:
    assert recall(tmp_path, fake.code_as_part_of_word).correct == 0


@pytest.mark.parametrize(
    ("behaviour", "why"),
    [
        (fake.sse_error, "Remote KV load failed"),
        (fake.sse_error_data, "KV load failure"),
        (fake.right_then_sse_error, "decode failed"),
        (fake.finish_error, "finish_reason error"),
        (fake.http_500, "HTTP 500"),
        (fake.cut, "without [DONE]"),
        (fake.no_done, "without [DONE]"),
        (fake.empty, "empty answer"),
        (fake.not_json, "not JSON"),
        (fake.wrong_shape, "shape of a chat completion"),
    ],
)
def test_every_broken_answer_is_a_failure_with_its_reason(tmp_path: Path, behaviour: fake.Behaviour, why: str) -> None:
    result = recall(tmp_path, behaviour)
    assert (result.correct, result.hangs, len(result.rows)) == (0, 0, 4)
    assert all(why in r["why"] for r in result.rows), [r["why"] for r in result.rows]


def test_nobody_listens(tmp_path: Path) -> None:
    with fake.openai_server(fake.right) as server:
        url = server.url
    result = run_recall(url, "m", SPEC, "before", "seed", tmp_path, 5.0, threading.Event())
    assert result.correct == 0
    assert all(r["status"] == 0 and "refused" in r["why"] for r in result.rows)


@pytest.mark.parametrize("behaviour", [fake.hang, fake.hang_mid_stream, fake.drip])
def test_t15_a_hang_is_reported_as_a_hang(tmp_path: Path, behaviour: fake.Behaviour) -> None:
    result = recall(tmp_path, behaviour, timeout_s=0.4)
    assert (result.correct, result.hangs, len(result.rows)) == (0, 2, 4)
    assert all(r["error"].startswith("hang") for r in result.rows[:2])
    assert all("2 requests before it hung" in r["why"] for r in result.rows[2:])


def test_a_stop_ends_the_check_at_once_and_keeps_what_was_asked(tmp_path: Path) -> None:
    stop = threading.Event()

    def second_hangs(reply: fake.Reply) -> None:
        if reply.number == 1:
            stop.set()
            fake.hang(reply)
        else:
            fake.right(reply)

    with fake.openai_server(second_hangs) as server:
        result = run_recall(server.url, "m", SPEC, "before", "seed", tmp_path, 60.0, stop)
    assert (result.correct, result.hangs, result.stopped, len(result.rows)) == (1, 0, True, 2)
    assert "stopped" in result.rows[1]["why"]


@pytest.mark.parametrize("behaviour", [fake.refuses_extras, fake.wants_max_completion_tokens, fake.no_usage])
def test_any_openai_compatible_endpoint_will_do(tmp_path: Path, behaviour: fake.Behaviour) -> None:
    assert recall(tmp_path, behaviour).passed


def test_what_an_endpoint_refuses_is_left_out_of_the_next_request(tmp_path: Path) -> None:
    with fake.openai_server(fake.refuses_extras) as server:
        run_recall(server.url + "/v1/", "m", SPEC, "before", "seed", tmp_path, 10.0, threading.Event(), headers={"X-Key": "k"})
        assert len(server.bodies) == 4 + 2


def test_a_real_400_is_reported_not_repeated_for_ever(tmp_path: Path) -> None:
    result = recall(tmp_path, lambda reply: reply.document(400, {"error": {"message": "prompt is too long"}}))
    assert all("prompt is too long" in r["why"] for r in result.rows)


def test_requests_run_side_by_side_when_asked(tmp_path: Path) -> None:
    together = threading.Barrier(4, timeout=20)

    def wait_for_all(reply: fake.Reply) -> None:
        together.wait()
        fake.right(reply)

    spec = RecallSpec(prompts=4, prompt_tokens=300, when=("during",), concurrency=4)
    assert recall(tmp_path, wait_for_all, spec, timeout_s=30).passed


@pytest.mark.parametrize("url", ["host:8000", "ftp://host", "http://", ""])
def test_a_url_that_is_none_is_refused_before_anything_is_written(tmp_path: Path, url: str) -> None:
    with pytest.raises(ValueError, match="is not an http"):
        run_recall(url, "m", SPEC, "before", "seed", tmp_path / "recall", 5.0, threading.Event())
    assert list(tmp_path.iterdir()) == []


def certificate(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) of 127.0.0.1 that only a client which is told to trusts."""
    cert, key = folder / "cert.pem", folder / "key.pem"
    subprocess.run(
        [
            "openssl",
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            str(key),
            "-out",
            str(cert),
            "-days",
            "2",
            "-subj",
            "/CN=127.0.0.1",
            "-addext",
            "subjectAltName=IP:127.0.0.1",
        ],
        check=True,
        capture_output=True,
        timeout=60,
    )
    return cert, key


def test_https_with_a_trusted_certificate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cert, key = certificate(tmp_path)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(cert, key)
    with fake.openai_server(fake.right) as server:
        server.socket = context.wrap_socket(server.socket, server_side=True)
        url = server.url.replace("http:", "https:")
        refused = run_recall(url, "m", SPEC, "before", "seed", tmp_path / "a", 10.0, threading.Event())
        monkeypatch.setenv("SSL_CERT_FILE", str(cert))
        assert run_recall(url, "m", SPEC, "before", "seed", tmp_path / "b", 10.0, threading.Event()).passed
        server.behaviour = fake.hang_mid_stream
        hung = run_recall(url, "m", SPEC, "before", "seed", tmp_path / "c", 0.5, threading.Event())
    assert refused.correct == 0
    assert "CERTIFICATE_VERIFY_FAILED" in refused.rows[0]["why"]
    assert hung.hangs == 2


def test_an_endless_line_does_not_outlive_the_deadline(tmp_path: Path) -> None:
    """Pieces come without an end of line, as fast as they are read; the line is given up at its limit."""
    sent = []

    def endless(reply: fake.Reply) -> None:
        reply.head()
        with contextlib.suppress(OSError):
            while True:
                reply.raw("data: " + "x" * 65536)
                sent.append(65536)

    result = recall(tmp_path, endless, RecallSpec(prompts=1, prompt_tokens=300, when=("before",)), timeout_s=30.0)
    assert (result.correct, result.hangs) == (0, 0)
    assert "longer than 1048576 bytes" in result.rows[0]["why"]
    assert sum(sent) < 50e6


def test_addresses_of_a_host_share_the_deadline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each of four addresses would have had the whole time; the second is asked with what the first one left, which is nothing."""
    asked: list[float] = []

    class Silent(socket.socket):
        def connect(self, address: object) -> None:
            asked.append(self.gettimeout() or 0.0)
            clock[0] += asked[-1]
            raise TimeoutError

    clock = [1000.0]
    monkeypatch.setattr(http.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(http.socket, "socket", Silent)
    found = [(socket.AF_INET, socket.SOCK_STREAM, 0, "", ("127.0.0.1", 9))] * 4
    monkeypatch.setattr(http.socket, "getaddrinfo", lambda *_, **__: found)
    with pytest.raises(http.Hang):
        http.get("http://many.example", timeout_s=3.0)
    assert sum(asked) == pytest.approx(3.0, abs=0.1)


def answered(*deltas: str) -> completion.Completion:
    """What one request brings when the server streams these deltas, given as JSON text."""
    chunks = "".join(f'data: {{"choices": [{{"delta": {delta}}}]}}\n\n' for delta in deltas)
    body = chunks + 'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\ndata: [DONE]\n\n'
    with raw_server.raw_server(raw_server.answering(raw_server.respond(200, body, "text/event-stream"))) as url:
        return completion.complete(url, {"model": "m"}, 10.0)


def test_halves_of_a_character_become_one_and_a_lone_half_is_no_crash(tmp_path: Path) -> None:
    found = answered(r'{"content": "a\ud83d"}', r'{"content": "\ude00b"}', r'{"reasoning_content": "x\ud800"}')
    assert (found.error, found.content, found.reasoning) == ("", "a\U0001f600b", "x\ufffd")
    (tmp_path / "row").write_text(found.content + found.reasoning, encoding="utf-8")


@pytest.mark.parametrize(
    "delta", ["[" * 100_000, '{"tool_calls": [{"index": 1000000000}]}', '{"tool_calls": [{"index": "x"}]}', '{"content": 5}']
)
def test_a_chunk_of_another_shape_is_an_error_of_the_answer(delta: str) -> None:
    assert answered(delta).error
