"""A headless Chromium over its debugging pipe, with the standard library: loads a page, keeps what the console and the network saw, takes
pictures."""

from __future__ import annotations

import base64
import contextlib
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0


@dataclass
class Page:
    """One open page. console: errors, warnings and exceptions in words. requests: every URL asked for."""

    process: subprocess.Popen[bytes]
    to: int
    fro: int
    session: str = ""
    console: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _next: int = 0
    _buffer: bytes = b""
    _events: list[dict[str, Any]] = field(default_factory=list)

    def _receive(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._buffer:
            left = deadline - time.monotonic()
            if left <= 0 or not select.select([self.fro], [], [], left)[0]:
                raise TimeoutError(f"chromium did not answer within {DEADLINE_S} s")
            data = os.read(self.fro, 1 << 20)
            if not data:
                raise RuntimeError(f"chromium left with {self.process.poll()}")
            self._buffer += data
        line, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(line)
        if "method" in message:
            self._note(message)
        return message

    def _note(self, message: dict[str, Any]) -> None:
        method, params = message["method"], message.get("params", {})
        self._events.append(message)
        if method == "Runtime.exceptionThrown":
            self.console.append(json.dumps(params["exceptionDetails"])[:600])
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.console.append(f"{params['type']}: {[a.get('value') for a in params['args']]}")
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.console.append(f"{params['entry']['level']}: {params['entry']['text']}")
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        self._next += 1
        body: dict[str, Any] = {"id": self._next, "method": method, "params": params}
        if self.session:
            body["sessionId"] = self.session
        os.write(self.to, json.dumps(body).encode() + b"\0")
        deadline = time.monotonic() + DEADLINE_S
        while True:
            message = self._receive(deadline)
            if message.get("id") == self._next:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                result: dict[str, Any] = message["result"]
                return result

    def wait_for(self, method: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not any(e["method"] == method for e in self._events):
            self._receive(deadline)

    def view(self, width: int, height: int, *, dark: bool = False, phone: bool = False) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def open(self, path: Path) -> None:
        self._events.clear()
        self.call("Page.navigate", url=path.resolve().as_uri())
        self.wait_for("Page.loadEventFired")

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        found = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(json.dumps(found["exceptionDetails"])[:600])
        return found["result"].get("value")

    def picture(self, out: Path, *, whole: bool = True) -> Path:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        out.write_bytes(base64.b64decode(shot["data"]))
        return out


def executable() -> str:
    found = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if found is None:
        raise FileNotFoundError("no chromium on PATH: install the distribution's chromium package")
    return found


@contextlib.contextmanager
def chromium(profile: Path) -> Iterator[Page]:
    """A page in a fresh browser with its own profile folder; the whole process group ends with the block."""
    child_in, to = os.pipe()
    fro, child_out = os.pipe()
    flags = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-extensions",
             "--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe")  # fmt: skip
    shell = f'exec "$@" 3<&{child_in} 4>&{child_out}'
    process = subprocess.Popen(
        ["bash", "-c", shell, "bash", executable(), *flags, f"--user-data-dir={profile}", "about:blank"],
        pass_fds=(child_in, child_out),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    os.close(child_in)
    os.close(child_out)
    page = Page(process, to, fro)
    try:
        target = page.call("Target.createTarget", url="about:blank")["targetId"]
        page.session = page.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            page.call(f"{domain}.enable")
        yield page
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait(timeout=30)
        os.close(to)
        os.close(fro)
