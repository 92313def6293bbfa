from __future__ import annotations

import socket
import threading

import pytest

from pdlaunch.node.http import Exchange, Hang, HttpError, Stopped, Unreachable, get, post_json
from pdlaunch.node.ports import Ports
from tests.fakes.raw_server import answering, raw_server, respond

CHUNKED = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(text: str) -> bytes:
    return f"{len(text.encode()):x}\r\n".encode() + text.encode() + b"\r\n"


@pytest.fixture
def closed_port() -> object:
    ports = Ports("test_node_http")
    yield ports.reserve()
    ports.close()


@pytest.mark.parametrize("status", [200, 404, 500, 503])
def test_every_status_is_an_answer(status):
    with raw_server(answering(respond(status, '{"a": 1}'))) as url:
        answer = get(url, timeout_s=10)
    assert (answer.status, answer.json()) == (status, {"a": 1})


def test_json_body_of_another_kind_is_named():
    with raw_server(answering(respond(200, "<html>busy</html>"))) as url, pytest.raises(Unreachable, match=r"not JSON.*html"):
        get(url, timeout_s=10).json()


def test_post_sends_json_with_its_length():
    seen = []

    def answer(connection, head, done):
        seen.append(head)
        connection.sendall(respond(200, "{}"))

    with raw_server(answer) as url:
        post_json(f"{url}/a?b=c", {"x": "ä"}, timeout_s=10)
    assert seen[0].startswith(b"POST /a?b=c HTTP/1.1\r\n")
    assert b"Content-Length: 15\r\n" in seen[0]


def test_a_refused_connection_is_unreachable(closed_port):
    with pytest.raises(Unreachable, match="refused"):
        get(f"http://127.0.0.1:{closed_port}/", timeout_s=10)


def silent(connection: socket.socket, head: bytes, done: threading.Event) -> None:
    done.wait(30)


def trickle_head(connection: socket.socket, head: bytes, done: threading.Event) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\n")
    while not done.wait(0.05):
        connection.sendall(b"X-More: 1\r\n")


def trickle_body(connection: socket.socket, head: bytes, done: threading.Event) -> None:
    connection.sendall(CHUNKED)
    while not done.wait(0.05):
        connection.sendall(chunk(": still alive\n\n"))


@pytest.mark.parametrize("answer", [silent, trickle_head, trickle_body])
def test_a_server_that_never_ends_is_a_hang(answer):
    with raw_server(answer) as url, pytest.raises(Hang, match="before the deadline"):
        get(url, timeout_s=0.6)


def test_a_stop_ends_the_wait():
    stop = threading.Event()
    stop.set()
    with raw_server(silent) as url, pytest.raises(Stopped):
        get(url, timeout_s=60, stop=stop)


@pytest.mark.parametrize(
    "garbage",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n",
        b"",
        b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nshort",
        CHUNKED + b"zz\r\nnothing",
        CHUNKED + chunk("data: a") + b"5\r\nda",
    ],
)
def test_garbage_and_cut_off_answers_are_unreachable(garbage):
    with raw_server(answering(garbage)) as url, pytest.raises(Unreachable):
        get(url, timeout_s=10)


def test_events_are_read_as_they_come():
    first_seen = threading.Event()

    def answer(connection, head, done):
        connection.sendall(CHUNKED + chunk('data: {"a"') + chunk(": 1}\n\n"))
        first_seen.wait(10)
        connection.sendall(chunk("event: error\ndata: it\ndata: broke\n\n: note\n\ndata: [DONE]\n\n") + b"0\r\n\r\n")

    with raw_server(answer) as url, Exchange("POST", url, body={}, timeout_s=10) as exchange:
        events = exchange.events()
        assert next(events).data == '{"a": 1}'
        first_seen.set()
        rest = list(events)
    assert [(e.event, e.data, e.comment) for e in rest] == [("error", "it\nbroke", ""), ("", "", "note"), ("", "[DONE]", "")]


def test_a_stream_that_is_cut_off_raises():
    with (
        raw_server(answering(CHUNKED + chunk("data: a\n\n"))) as url,
        Exchange("GET", url, timeout_s=10) as exchange,
        pytest.raises(HttpError),
    ):
        list(exchange.events())


def test_only_http_urls():
    with pytest.raises(ValueError, match="not an http"):
        get("ftp://127.0.0.1/", timeout_s=1)
