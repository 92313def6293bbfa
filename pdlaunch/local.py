"""Runs a bundle on this machine: the same node/ in the same folder layout, as a child process group of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

from pdlaunch.errors import SubmitError
from pdlaunch.node.spec import load_spec

STOP_S = 10.0
"""From the first signal to the end of the supervisor; then its process group is killed."""
_FORWARDED = {signal.SIGINT: signal.SIGINT, signal.SIGTERM: signal.SIGTERM, signal.SIGHUP: signal.SIGTERM}


def new_run_dir(bundle: Path) -> Path:
    """results_dir/<recipe>/<utc>-local-<6 hex>; its parent must be writable, itself must not exist."""
    spec = load_spec(bundle / "spec.json")
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path(spec.run.results_dir) / spec.run.recipe / f"{stamp}-local-{secrets.token_hex(3)}"


def run(bundle: Path, run_dir: Path, node_python: str, output: IO[str] | None = None, watch: Callable[[], None] | None = None) -> int:
    """Run the bundle to its verdict; returns the supervisor's exit code (130 after Ctrl-C).

    output: where its plain lines go; None: this process's standard output. watch: called about four times a second.
    A first signal is handed on, and the supervisor then has STOP_S to archive the run as INCOMPLETE.
    """
    command = [node_python, "-B", "-u", "-m", "node", "run", "--spec", str(bundle / "spec.json"), "--run-dir", str(run_dir)]
    try:
        child = subprocess.Popen(
            command,
            cwd=bundle,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )
    except OSError as e:
        raise SubmitError(
            f"{node_python} cannot be started: {e.strerror}", rule="node_python of the cluster file: Python 3.10 or newer"
        ) from e
    with _handed_on(child) as signalled:
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(0.25)
                break
            if watch is not None:
                watch()
            if signalled and time.monotonic() > signalled[0] + STOP_S:
                os.killpg(child.pid, signal.SIGKILL)
    if watch is not None:
        watch()
    return 130 if signalled and code < 0 else code if code >= 0 else 3


@contextlib.contextmanager
def _handed_on(child: subprocess.Popen[bytes]) -> Iterator[list[float]]:
    """Hand the first INT, TERM or HUP on to the child; the list then holds the time of it."""
    signalled: list[float] = []

    def hand_on(signum: int, frame: FrameType | None) -> None:
        if not signalled:
            signalled.append(time.monotonic())
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(_FORWARDED[signal.Signals(signum)])

    before = {signum: signal.signal(signum, hand_on) for signum in _FORWARDED}
    try:
        yield signalled
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
