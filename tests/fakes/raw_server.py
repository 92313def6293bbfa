"""A TCP server on loopback whose answer is written byte by byte by the test, for what a proper HTTP server cannot be made to do."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Answer = Callable[[socket.socket, bytes, threading.Event], None]


@contextmanager
def raw_server(answer: Answer) -> Iterator[str]:
    """http://127.0.0.1:PORT of a server that calls answer(connection, request head, done) for each connection; done is set at the end."""
    done = threading.Event()
    listener = socket.create_server(("127.0.0.1", 0))
    threads: list[threading.Thread] = []

    def one(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            head = b""
            while b"\r\n\r\n" not in head and (piece := connection.recv(65536)):
                head += piece
            answer(connection, head, done)

    def accept() -> None:
        while not done.is_set():
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threads.append(threading.Thread(target=one, args=(connection,), daemon=True))
            threads[-1].start()

    acceptor = threading.Thread(target=accept, daemon=True)
    acceptor.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        done.set()
        with contextlib.suppress(OSError):
            listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        acceptor.join(timeout=5)
        for thread in threads:
            thread.join(timeout=5)


def respond(status: int, body: str, kind: str = "application/json") -> bytes:
    """A whole HTTP answer."""
    payload = body.encode()
    head = f"HTTP/1.1 {status} X\r\nContent-Type: {kind}\r\nContent-Length: {len(payload)}\r\nConnection: close\r\n\r\n"
    return head.encode() + payload


def answering(*answers: bytes) -> Answer:
    """One answer per connection, the last one again and again."""
    left = list(answers)

    def answer(connection: socket.socket, head: bytes, done: threading.Event) -> None:
        connection.sendall(left.pop(0) if len(left) > 1 else left[0])

    return answer
