"""Runs a bundle on this machine: the same node/ in the same folder layout, as a child process group of its own."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import IO

from pdlaunch.errors import SubmitError
from pdlaunch.node.output import say
from pdlaunch.node.procfs import PROC, adopt_orphans, descendants
from pdlaunch.node.spec import load_spec

LAST_RESORT_S = 30.0
"""From the first signal to the KILL of a supervisor that has not ended. It needs at most 10 s itself; a KILL costs evidence."""
LISTENS_S = 10.0
"""A signal that comes earlier is handed on when the supervisor listens, at the latest after this time."""
SWEEP_S = 12.0
"""Wrappers of engines end by themselves when their supervisor is gone, and remove their shared memory; worker.DEFAULT_GRACE_S is 8 s."""
_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def new_run_dir(bundle: Path) -> Path:
    """results_dir/<recipe>/<utc>-local-<6 hex>; its parent must be writable, itself must not exist."""
    spec = load_spec(bundle / "spec.json")
    stamp = datetime.now(UTC).strftime("%Y%m%dT%H%M%SZ")
    return Path(spec.run.results_dir) / spec.run.recipe / f"{stamp}-local-{secrets.token_hex(3)}"


def run(bundle: Path, run_dir: Path, node_python: str, output: IO[str] | None = None, watch: Callable[[], None] | None = None) -> int:
    """Run the bundle to its verdict; returns the supervisor's exit code (130 after Ctrl-C).

    output: where its plain lines go; None: this process's standard output. watch: called about four times a second.
    A first signal is handed on, and the supervisor archives the run as INCOMPLETE. If it is killed, that is done here.
    """
    command = [node_python, "-B", "-u", "-m", "node", "run", "--spec", str(bundle / "spec.json"), "--run-dir", str(run_dir)]
    command += ["--launcher", str(os.getpid())]
    ours = set(descendants(os.getpid()))
    adopt_orphans()  # what a killed supervisor leaves becomes ours, and can be swept
    with _handed_on(run_dir) as asked:
        try:
            child = asked.child = subprocess.Popen(
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
        while True:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = child.wait(0.25)
                break
            if watch is not None:
                watch()
            asked.hand_on()
            if asked.signum and time.monotonic() > asked.when + LAST_RESORT_S:
                os.killpg(child.pid, signal.SIGKILL)
        if code < 0:
            how = f"interrupted by {asked.signum.name}; the" if asked.signum else "the"
            _salvage(run_dir, f"{how} supervisor was killed by {signal.Signals(-code).name}", ours)
    if watch is not None:
        watch()
    return 130 if asked.signum and code < 0 else code if code >= 0 else 3


@dataclass
class _Asked:
    """The first INT, TERM or HUP of this process: handed on once, when the supervisor listens (it says so with its first event)."""

    events: Path
    child: subprocess.Popen[bytes] | None = None
    signum: signal.Signals | None = None
    when: float = 0.0
    done: bool = False

    def on_signal(self, signum: int, frame: FrameType | None) -> None:
        if self.signum is None:
            self.signum, self.when = signal.Signals(signum), time.monotonic()

    def hand_on(self) -> None:
        if self.child is None or self.signum is None or self.done:
            return
        if self.events.exists() or time.monotonic() > self.when + LISTENS_S:
            self.done = True
            self.child.send_signal(self.signum)


@contextlib.contextmanager
def _handed_on(run_dir: Path) -> Iterator[_Asked]:
    asked = _Asked(run_dir / "events.jsonl")
    before = {}
    for signum in _SIGNALS:
        if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:  # nohup
            before[signum] = signal.signal(signum, asked.on_signal)
    try:
        yield asked
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def _salvage(run_dir: Path, ended: str, ours: set[int]) -> None:
    """After a supervisor that was killed: end what it left, remove its temporary folders, and judge what it wrote.

    ours: processes below this one that were there before the run.
    """
    from pdlaunch.node import afterwards, finish
    from pdlaunch.node.deployment import redactor_of
    from pdlaunch.node.services import clean_log

    say(f"{ended}; {run_dir} is judged from the files that are there", sys.stderr)
    folders = _temporary_folders(run_dir, set(descendants(os.getpid())) - ours)
    _sweep(ours)
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)
    if (run_dir / "manifest.json").exists():
        return
    try:
        spec = load_spec(run_dir / "spec.json")
        for log in (run_dir / "logs").glob("*.log"):
            clean_log(log, redactor_of(spec))
        say(finish.judge(run_dir, ended).line)
        finish.write_manifest(spec, run_dir, ended)
        say(f"archive: {run_dir}")
        say(f"page: {afterwards.page(spec, run_dir, threading.Event())}")
    except (OSError, ValueError) as e:
        say(f"{run_dir}: cannot be archived: {e}", sys.stderr)


def _sweep(ours: set[int]) -> None:
    deadline = time.monotonic() + SWEEP_S
    while (left := set(descendants(os.getpid())) - ours) and time.monotonic() < deadline + 5.0:
        if time.monotonic() > deadline:
            for pid in left:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        time.sleep(0.1)


def _temporary_folders(run_dir: Path, pids: set[int]) -> set[Path]:
    """pdl-* folders that the run made: its first event names its own, the environment of its processes those of its tools."""
    named = set()
    with contextlib.suppress(OSError, ValueError, KeyError, IndexError):
        first = (run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()[0]
        named.add(Path(json.loads(first)["tmp_dir"]))
    for pid in pids:
        with contextlib.suppress(OSError):
            for entry in (PROC / str(pid) / "environ").read_bytes().split(b"\0"):
                if entry.startswith(b"TMPDIR="):
                    named.add(Path(os.fsdecode(entry.removeprefix(b"TMPDIR="))))
    return {p for p in named if p.name.startswith("pdl-") and p.is_dir() and not p.is_symlink() and p.stat().st_uid == os.getuid()}
