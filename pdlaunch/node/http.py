"""HTTP/1.1 over the standard library with one deadline for the whole exchange: connect, send, headers and body together.

urllib's timeout starts again with every byte that arrives, so a server that trickles holds its client for ever (a hang must be reported as
a hang). Here every read waits for the socket at most until the deadline and looks at a stop event ten times a second.
"""

from __future__ import annotations

import contextlib
import http.client
import io
import json
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

_POLL_S = 0.1
MAX_LINE_BYTES = 1 << 20
"""A line of a stream that is longer is not read to its end: no chunk of an answer is, and its pieces would be copied again and again."""
MAX_BODY_BYTES = 64 << 20


class HttpError(Exception):
    """No usable answer; the message is one line."""


class Hang(HttpError):
    """The deadline passed before the answer was complete."""


class Stopped(HttpError):
    """The stop event was set while the answer was awaited."""


class Unreachable(HttpError):
    """Refused, reset, closed in the middle, or not HTTP."""


@dataclass(frozen=True)
class Response:
    status: int
    headers: dict[str, str]
    """Names in lower case."""
    body: bytes

    @property
    def text(self) -> str:
        return self.body.decode("utf-8", errors="replace")

    def json(self) -> Any:
        """The body as JSON; Unreachable when it is something else."""
        try:
            return json.loads(self.body)
        except ValueError:
            raise Unreachable(f"the body is not JSON: {self.text[:200]!r}") from None


@dataclass(frozen=True)
class SseEvent:
    """One server-sent event; event is '' unless the server named it ('error' in a stream of Dynamo that failed)."""

    event: str
    data: str
    comment: str = ""


class _DeadlineReader(io.RawIOBase):
    """The receiving side of a socket; raises Hang or Stopped instead of waiting longer than it may."""

    def __init__(self, sock: socket.socket, deadline: float, stop: threading.Event | None) -> None:
        self._sock, self._deadline, self._stop = sock, deadline, stop

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        while True:
            if self._stop is not None and self._stop.is_set():
                raise Stopped("stopped while waiting for the answer")
            left = self._deadline - time.monotonic()
            if left <= 0:
                raise Hang("no complete answer before the deadline")
            pending = getattr(self._sock, "pending", None)  # bytes that TLS has decrypted already: the socket itself may stay silent
            ready = bool(pending and pending()) or bool(select.select([self._sock], [], [], min(left, _POLL_S))[0])
            if ready:
                self._sock.settimeout(min(left, _POLL_S))
                with contextlib.suppress(TimeoutError):  # half a TLS record: look at the deadline again
                    return self._sock.recv_into(buffer)


class _Readable:
    """What http.client.HTTPResponse asks of a socket."""

    def __init__(self, reader: _DeadlineReader) -> None:
        self._reader = reader

    def makefile(self, mode: str) -> io.BufferedReader:
        return io.BufferedReader(self._reader)


class Exchange:
    """One request whose answer can be read in pieces; a context manager that closes the connection.

    url: http, or https with a certificate that the system trusts. body: JSON when it is not bytes. timeout_s: for the whole exchange.
    Raises Hang, Stopped or Unreachable.
    """

    def __init__(
        self, method: str, url: str, *, body: Any = None, timeout_s: float, stop: threading.Event | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        self.url = url
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is not an http:// or https:// URL")
        deadline = time.monotonic() + timeout_s
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
            self._sock = _connected(parts.hostname, port, deadline)
        except TimeoutError:
            raise Hang(f"{method} {url}: no connection after {timeout_s:g} s") from None
        except OSError as e:
            raise Unreachable(f"{method} {url}: {e}") from e
        try:
            self._sock.settimeout(max(0.001, deadline - time.monotonic()))
            if parts.scheme == "https":
                self._sock = _encrypted(self._sock, parts.hostname)
            self._send(method, parts.netloc, f"{parts.path or '/'}{'?' + parts.query if parts.query else ''}", body, headers or {})
            reader: Any = _Readable(_DeadlineReader(self._sock, deadline, stop))
            self._response = http.client.HTTPResponse(reader, method=method, url=url)
            self._response.begin()
        except BaseException as e:
            self._sock.close()
            self._translate(e)
            raise
        self.status = self._response.status
        self.headers = {k.lower(): v for k, v in self._response.getheaders()}

    def _send(self, method: str, host: str, target: str, body: Any, headers: dict[str, str]) -> None:
        payload = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        lines = {"Host": host, "Connection": "close", "Accept": "*/*"}
        if body is not None:
            lines |= {"Content-Length": str(len(payload)), "Content-Type": "application/json"}
        lines |= headers
        head = "".join(f"{k}: {v}\r\n" for k, v in lines.items())
        self._sock.sendall(f"{method} {target} HTTP/1.1\r\n{head}\r\n".encode() + payload)

    def _translate(self, e: BaseException) -> None:
        if isinstance(e, TimeoutError):
            raise Hang(f"{self.url}: the request could not be sent before the deadline") from None
        if isinstance(e, Hang | Stopped):
            raise type(e)(f"{self.url}: {e}") from None
        if isinstance(e, OSError | http.client.HTTPException | ValueError):
            raise Unreachable(f"{self.url}: {type(e).__name__}: {e}") from e

    def read(self) -> bytes:
        """The whole body; Unreachable when it is cut off or larger than MAX_BODY_BYTES."""
        pieces, size = [], 0
        while piece := self._piece():
            pieces.append(piece)
            size += len(piece)
            if size > MAX_BODY_BYTES:
                raise Unreachable(f"{self.url}: the body is larger than {MAX_BODY_BYTES} bytes")
        return b"".join(pieces)

    def lines(self) -> Iterator[str]:
        """Lines of the body without their ends, as they arrive; Unreachable when the body is cut off."""
        rest = b""
        while piece := self._piece():
            *lines, rest = (rest + piece).split(b"\n")
            if len(rest) > MAX_LINE_BYTES:
                raise Unreachable(f"{self.url}: a line of the stream is longer than {MAX_LINE_BYTES} bytes")
            for line in lines:
                yield line.decode("utf-8", errors="replace").rstrip("\r")
        if rest:
            yield rest.decode("utf-8", errors="replace")

    def _piece(self) -> bytes:
        try:
            piece = self._response.read1(65536)
        except (OSError, http.client.HTTPException, HttpError, ValueError) as e:
            self._translate(e)
            raise
        if not piece and self._response.length:
            raise Unreachable(f"{self.url}: the body was cut off {self._response.length} bytes before its end")
        return piece

    def events(self) -> Iterator[SseEvent]:
        """Server-sent events of the body (WHATWG HTML 9.2); an event that the end of the stream cuts off is given as well."""
        event = ""
        data: list[str] = []
        comment: list[str] = []
        for line in self.lines():
            if not line:
                if event or data or comment:
                    yield SseEvent(event, "\n".join(data), "\n".join(comment))
                event, data, comment = "", [], []
                continue
            name, _, value = line.partition(":")
            value = value.removeprefix(" ")
            if name == "event":
                event = value
            elif name == "data":
                data.append(value)
            elif not name:
                comment.append(value)
        if event or data or comment:
            yield SseEvent(event, "\n".join(data), "\n".join(comment))

    def close(self) -> None:
        self._response.close()
        self._sock.close()

    def __enter__(self) -> Exchange:
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _connected(host: str, port: int, deadline: float) -> socket.socket:
    """A connection to the first address that answers; all of them share the deadline. TimeoutError, or the OSError of the last one."""
    failure: OSError = TimeoutError()
    for family, kind, protocol, _, address in socket.getaddrinfo(host, port, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(max(0.001, deadline - time.monotonic()))
            sock.connect(address)
        except OSError as e:
            sock.close()
            failure = e
        else:
            return sock
    raise failure


def _encrypted(sock: socket.socket, host: str) -> socket.socket:
    import ssl  # slow to import, and no part of a job needs it

    return ssl.create_default_context().wrap_socket(sock, server_hostname=host)


def get(url: str, *, timeout_s: float, stop: threading.Event | None = None) -> Response:
    """GET url; every status is an answer."""
    with Exchange("GET", url, timeout_s=timeout_s, stop=stop) as exchange:
        return Response(exchange.status, exchange.headers, exchange.read())


def post_json(url: str, body: Any, *, timeout_s: float, stop: threading.Event | None = None) -> Response:
    """POST body as JSON; every status is an answer."""
    with Exchange("POST", url, body=body, timeout_s=timeout_s, stop=stop) as exchange:
        return Response(exchange.status, exchange.headers, exchange.read())
