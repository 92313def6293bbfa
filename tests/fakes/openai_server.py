"""A local OpenAI-compatible server that answers recall prompts rightly or misbehaves in one named way; loopback only.

A behaviour is a function (server, body, number of the request) -> None that writes the whole answer, or the name of one of BEHAVIOURS.
"""

from __future__ import annotations

import http.server
import json
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

NOTE = re.compile(r"The access code for the (.+?) is (\w+)\.")
HANG_LIMIT_S = 60.0


def right_code(text: str) -> str:
    """The code that a recall prompt asks for: that of the note whose place stands in the prompt's last line; "" for any other prompt."""
    *_, question = text.splitlines() or [""]
    return next((code for place, code in NOTE.findall(text) if re.search(rf"\b{re.escape(place)}\b", question)), "")


class Reply:
    """Writes one answer; every method may be left out or called twice, which is what misbehaving means."""

    def __init__(self, handler: http.server.BaseHTTPRequestHandler, body: dict[str, Any], server: FakeOpenAI, number: int) -> None:
        self.handler, self.body, self.server, self.number = handler, body, server, number
        self.streaming = bool(body.get("stream"))
        self.prompt = "\n".join(str(m.get("content") or "") for m in body.get("messages", []))
        self.prompt_tokens = max(1, len(self.prompt) // 4)

    def head(self, status: int = 200, kind: str = "text/event-stream") -> None:
        self.handler.send_response(status)
        self.handler.send_header("Content-Type", kind)
        self.handler.send_header("Connection", "close")
        self.handler.end_headers()
        self.handler.wfile.flush()

    def raw(self, text: str) -> None:
        self.handler.wfile.write(text.encode())
        self.handler.wfile.flush()

    def chunk(self, delta: dict[str, Any], finish: str | None = None, **more: Any) -> None:
        self.raw(
            "data: "
            + json.dumps(
                {
                    "id": "x",
                    "object": "chat.completion.chunk",
                    "created": 1,
                    "model": self.body.get("model"),
                    "choices": [{"index": 0, "delta": delta, "finish_reason": finish}],
                    **more,
                }
            )
            + "\n\n"
        )

    def usage(self, completion_tokens: int) -> dict[str, int]:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": self.prompt_tokens + completion_tokens,
        }

    def end(self, completion_tokens: int) -> None:
        if (self.body.get("stream_options") or {}).get("include_usage"):
            self.raw(
                "data: "
                + json.dumps(
                    {
                        "id": "x",
                        "object": "chat.completion.chunk",
                        "created": 1,
                        "model": self.body.get("model"),
                        "choices": [],
                        "usage": self.usage(completion_tokens),
                    }
                )
                + "\n\n"
            )
        self.raw("data: [DONE]\n\n")

    def document(self, status: int, value: Any) -> None:
        self.head(status, "application/json")
        self.raw(json.dumps(value))

    def say(
        self,
        content: str = "",
        reasoning: str = "",
        *,
        finish: str = "stop",
        tool_calls: list[dict[str, Any]] | None = None,
        tokens: int | None = None,
    ) -> None:
        """A well-formed answer, streamed or not as asked, in pieces when streamed."""
        count = tokens if tokens is not None else max(1, len(content.split()) + len(reasoning.split()))
        calls = [{"index": i, "id": f"call-{i}", "type": "function", "function": c} for i, c in enumerate(tool_calls or [])]
        if not self.streaming:
            message: dict[str, Any] = {"role": "assistant", "content": content or None}
            message |= ({"reasoning_content": reasoning} if reasoning else {}) | ({"tool_calls": calls} if calls else {})
            self.document(
                200,
                {
                    "id": "x",
                    "object": "chat.completion",
                    "model": self.body.get("model"),
                    "created": 1,
                    "choices": [{"index": 0, "message": message, "finish_reason": finish}],
                    "usage": self.usage(count),
                },
            )
            return
        self.head()
        ids = {"nvext": {"worker_id": {"prefill_worker_id": 8021412609786401916, "decode_worker_id": 13736378885712228729}}}
        self.chunk({"role": "assistant"}, **ids)
        if reasoning:
            self.chunk({"reasoning_content": reasoning})
        half = len(content) // 2
        for part in (content[:half], content[half:]):
            if part:
                self.chunk({"content": part})
        for call in calls:
            text = call["function"]["arguments"]
            self.chunk({"tool_calls": [{**call, "function": {"name": call["function"]["name"], "arguments": text[:3]}}]})
            self.chunk({"tool_calls": [{"index": call["index"], "function": {"arguments": text[3:]}}]})
        self.chunk({}, finish, **ids)
        self.end(count)

    def words(self, count: int) -> None:
        """An answer of exactly `count` one-word tokens."""
        if not self.streaming:
            self.say(" ".join(["word"] * count), tokens=count)
            return
        self.head()
        for _ in range(count):
            self.chunk({"content": "word "})
        self.chunk({}, "length")
        self.end(count)


Behaviour = Callable[[Reply], None]


def right(reply: Reply) -> None:
    """The right code to a recall prompt; exactly the tokens asked for to any other prompt."""
    limit = reply.body.get("max_completion_tokens") or reply.body.get("max_tokens") or 16
    code = right_code(reply.prompt)
    if code:
        reply.say(code)
    else:
        reply.words(limit)


def noise(reply: Reply) -> None:
    reply.say("the the of lantern lantern 77 attic", finish="length")


def previous(reply: Reply) -> None:
    """The right answer to the prompt before this one (vllm#52234)."""
    text = reply.server.prompts[reply.number - 1] if reply.number else "no prompt before"
    reply.say(right_code(text))


def code_in_reasoning_only(reply: Reply) -> None:
    reply.say("", f"The note says {right_code(reply.prompt)}")


def corrupt_reasoning(reply: Reply) -> None:
    reply.say("", "kettle kettle 9 9 the of under")


def code_as_part_of_word(reply: Reply) -> None:
    reply.say(f"X{right_code(reply.prompt)}Y")


def sse_error(reply: Reply) -> None:
    reply.head()
    reply.chunk({"role": "assistant"})
    reply.raw('event: error\n: "Remote KV load failed"\n\n')


def sse_error_data(reply: Reply) -> None:
    reply.head()
    reply.raw('data: {"error": {"message": "KV load failure", "code": 500}}\n\ndata: [DONE]\n\n')


def right_then_sse_error(reply: Reply) -> None:
    reply.head()
    reply.chunk({"content": right_code(reply.prompt)})
    reply.raw('event: error\ndata: {"message": "decode failed"}\n\n')


def finish_error(reply: Reply) -> None:
    reply.say(right_code(reply.prompt), finish="error")


def http_500(reply: Reply) -> None:
    reply.document(500, {"message": "Failed to generate completions", "type": "Internal Server Error", "code": 500})


def http_503(reply: Reply) -> None:
    reply.document(503, {"message": "Service temporarily unavailable", "code": 503})


def hang(reply: Reply) -> None:
    reply.server.release.wait(HANG_LIMIT_S)


def hang_mid_stream(reply: Reply) -> None:
    reply.head()
    reply.chunk({"content": right_code(reply.prompt)[:3]})
    reply.server.release.wait(HANG_LIMIT_S)


def drip(reply: Reply) -> None:
    """Bytes for ever, never a whole line: a timeout per read would never end."""
    reply.head()
    reply.raw("data: ")
    while not reply.server.release.wait(0.05):
        reply.raw("x")


def cut(reply: Reply) -> None:
    reply.head()
    reply.chunk({"content": right_code(reply.prompt)})


def empty(reply: Reply) -> None:
    reply.say("")


def no_done(reply: Reply) -> None:
    reply.head()
    reply.chunk({"content": right_code(reply.prompt)}, "stop")


def not_json(reply: Reply) -> None:
    reply.head(200, "application/json")
    reply.raw("<html>it works</html>")


def wrong_shape(reply: Reply) -> None:
    reply.head()
    reply.raw('data: {"choices": ["text"]}\n\ndata: [DONE]\n\n')


def no_usage(reply: Reply) -> None:
    reply.head()
    reply.chunk({"content": right_code(reply.prompt)}, "stop")
    reply.raw("data: [DONE]\n\n")


def refuses_extras(reply: Reply) -> None:
    """A server that knows none of the optional keys."""
    for key in ("nvext", "stream_options", "logprobs", "return_tokens_as_token_ids"):
        if key in reply.body:
            reply.document(400, {"error": {"message": f"Unsupported parameter(s): `{key}`"}})
            return
    right(reply)


def half_errors(reply: Reply) -> None:
    http_500(reply) if reply.number % 2 else right(reply)


def short_output(reply: Reply) -> None:
    reply.words(2)


def wants_max_completion_tokens(reply: Reply) -> None:
    if "max_tokens" in reply.body:
        reply.document(400, {"error": {"message": "Unsupported parameter: 'max_tokens'. Use 'max_completion_tokens' instead."}})
    else:
        right(reply)


class FakeOpenAI(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, behaviour: Behaviour) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.behaviour = behaviour
        self.bodies: list[dict[str, Any]] = []
        self.prompts: list[str] = []
        self.release = threading.Event()
        self.lock = threading.Lock()
        self.metrics = "# nothing\n"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that leaves early is part of the tests."""


class _Handler(http.server.BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: FakeOpenAI

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""

    def do_GET(self) -> None:
        if self.path == "/metrics":
            text, kind = self.server.metrics, "text/plain"
        else:
            text, kind = json.dumps({"object": "list", "data": [{"id": "m", "object": "model"}]}), "application/json"
        self.send_response(200)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text.encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.close_connection = True
        with self.server.lock:
            number = len(self.server.bodies)
            self.server.bodies.append(body)
            reply = Reply(self, body, self.server, number)
            self.server.prompts.append(reply.prompt)
        self.server.behaviour(reply)


@contextmanager
def openai_server(behaviour: Behaviour) -> Iterator[FakeOpenAI]:
    server = FakeOpenAI(behaviour)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.release.set()
        server.shutdown()
        server.server_close()
        thread.join()
