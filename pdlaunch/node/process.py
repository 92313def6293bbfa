"""Child processes in groups of their own: start, watch, and stop by a deadline. The only module here that starts or signals anything.

A child's leader is never reaped before its group is empty or killed, so a group id that is signalled is always still ours.
"""

from __future__ import annotations

import contextlib
import functools
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .procfs import descendants, die_with_parent, group_members

TAIL_LINES = 40
_POLL_S = 0.05


class StageFailed(Exception):
    """A stage of the run ended badly. The message is complete: process, node, exit code, log path and last lines where there are any."""


class StopRequested(Exception):
    """The run was asked to stop (SIGTERM of scancel, of a time limit or of preemption; SIGINT)."""


@dataclass(frozen=True)
class Exit:
    """How a child ended. code: 128 + signal for a signal, as a shell says it. asked: we asked it to. killed: it had to be killed."""

    code: int
    asked: bool
    killed: bool


class Child:
    """A process in a new session, whose output goes to a log file (or to a pipe of the caller). Raises StageFailed when it cannot start."""

    def __init__(
        self, name: str, argv: Sequence[str], env: dict[str, str], log: Path, *, node: str = "", stdin: int = subprocess.DEVNULL,
        stdout: int | None = None, cwd: Path | None = None, parent_death: int = signal.SIGKILL,
    ) -> None:
        self.name, self.argv, self.log, self.node = name, list(argv), log, node or os.uname().nodename
        self.asked = self.killed = False
        self._exit: Exit | None = None
        log.parent.mkdir(parents=True, exist_ok=True)
        try:
            with log.open("ab") as out:
                self.popen = subprocess.Popen(
                    self.argv, env=env, stdin=stdin, stdout=out if stdout is None else stdout, stderr=subprocess.STDOUT, cwd=cwd,
                    start_new_session=True, preexec_fn=functools.partial(die_with_parent, parent_death))
        except OSError as e:
            raise StageFailed(f"{name} on {self.node} could not be started: {e}\n  command: {self.argv[0]}") from e

    @property
    def pid(self) -> int:
        return self.popen.pid

    def poll(self) -> Exit | None:
        """How the leader ended, or None while it runs; does not reap."""
        if self._exit is None and self.popen.returncode is None:
            info = os.waitid(os.P_PID, self.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if info is not None:
                code = info.si_status if info.si_code == os.CLD_EXITED else 128 + info.si_status
                self._exit = Exit(code, self.asked, self.killed)
        return self._exit

    def wait(self, timeout_s: float, stop: threading.Event | None = None) -> Exit | None:
        """Wait for the leader's end; None when the time passed or stop was set."""
        deadline = time.monotonic() + timeout_s
        while (ended := self.poll()) is None and time.monotonic() < deadline and not (stop is not None and stop.is_set()):
            time.sleep(min(_POLL_S, max(0.0, deadline - time.monotonic())))
        return ended

    def terminate(self) -> None:
        """TERM to the leader alone: an engine's leader takes its own workers down in order."""
        self.asked = True
        if self.poll() is None:
            os.kill(self.pid, signal.SIGTERM)

    def kill_group(self, wait_s: float = 5.0) -> None:
        """KILL to whatever is left of the group, then reap the leader."""
        if self.popen.returncode is not None:
            return
        if self.poll() is None:
            self.killed = True
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        deadline = time.monotonic() + wait_s
        while group_members(self.pid) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
        if self.poll() is not None:
            self.popen.wait()
            if self.popen.stdin is not None:
                with contextlib.suppress(OSError):
                    self.popen.stdin.close()

    def stop(self, grace_s: float) -> Exit | None:
        """TERM, wait at most grace_s, KILL the rest of the group. None only when not even KILL ended the leader."""
        self.terminate()
        self.wait(grace_s)
        self.kill_group()
        return self.poll()

    def failure(self, what: str = "ended") -> str:
        """Message of a death: node, exit code, log path and last lines."""
        ended = self.poll()
        code = "unknown" if ended is None else str(ended.code)
        return f"{self.name} on {self.node} {what} with exit code {code}\n  log: {self.log}\n{indent(tail(self.log))}"


def kill_descendants() -> list[int]:
    """KILL to every process below this one, and their ids: only for a process that adopts orphans and has nothing left to run."""
    left = descendants(os.getpid())
    for pid in left:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    return left


def tail(path: Path, lines: int = TAIL_LINES) -> str:
    """The last lines of a text file, of which at most 64 KiB are read; a missing file says so."""
    try:
        with path.open("rb") as f:
            f.seek(max(0, path.stat().st_size - 65536))
            text = f.read().decode("utf-8", errors="replace")
    except OSError as e:
        return f"(no log: {e.strerror})"
    return "\n".join(text.splitlines()[-lines:]) or "(the log is empty)"


def indent(text: str, by: str = "  | ") -> str:
    return "\n".join(by + line for line in text.splitlines())


def wait_until(
    ready: Callable[[], bool], what: str, deadline_s: float, *, check: Callable[[], None], stop: threading.Event,
    poll_s: float = 0.1, waiting_for: Callable[[], str] = lambda: "",
) -> float:
    """Poll ready() until it is true; returns the seconds waited.

    check() is called before each poll and raises when a watched child has died. Raises StageFailed at the deadline, with waiting_for() as
    what was missing, and StopRequested as soon as stop is set.
    """
    began = time.monotonic()
    while True:
        if stop.is_set():
            raise StopRequested(f"while waiting for {what}")
        check()
        if ready():
            return time.monotonic() - began
        if time.monotonic() - began > deadline_s:
            missing = waiting_for()
            raise StageFailed(f"{what}: not there after {deadline_s:g} s" + (f"; {missing}" if missing else ""))
        stop.wait(poll_s)


def stop_together(children: Sequence[Child], grace_s: float) -> None:
    """TERM to all, one common wait, KILL to the groups of those that stayed."""
    for child in children:
        child.terminate()
    deadline = time.monotonic() + grace_s
    for child in children:
        child.wait(max(0.0, deadline - time.monotonic()))
    for child in children:
        child.kill_group()
