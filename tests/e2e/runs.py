"""Starts launch.py as a person does and reads what it left."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.envs import ROOT, launcher_python

DEADLINE_S = 2000


@dataclass(frozen=True)
class Run:
    """One archived run and how its command ended."""

    folder: Path
    exit_code: int
    output: str

    def verdict(self) -> dict[str, Any]:
        return dict(json.loads((self.folder / "verdict.json").read_text()))

    def evidence(self, name: str) -> Any:
        values = json.loads((self.folder / "evidence.json").read_text())["values"]
        return values[name]["value"] if name in values else None

    def stages(self) -> list[tuple[str, str]]:
        lines = (self.folder / "events.jsonl").read_text().splitlines()
        return [(line["stage"], line["state"]) for line in map(json.loads, lines)]

    def tmp_dir(self) -> Path:
        """The temporary folder that the run had."""
        first = (self.folder / "events.jsonl").read_text().splitlines()[0]
        return Path(json.loads(first)["tmp_dir"])

    def explain(self) -> str:
        """What a failing test shows: the verdict and the end of the output."""
        path = self.folder / "verdict.json"
        return f"{path.read_text() if path.exists() else 'no verdict.json'}\n--- exit {self.exit_code}, output:\n{self.output[-6000:]}"


def launch_argv(*arguments: str) -> list[str]:
    return [str(launcher_python()), str(ROOT / "launch.py"), *arguments]


def launch(*arguments: str, env: dict[str, str] | None = None, deadline_s: float = 120) -> subprocess.CompletedProcess[str]:
    """Run a command of launch.py to its end."""
    return subprocess.run(launch_argv(*arguments), cwd=ROOT, env={**os.environ, **(env or {})}, capture_output=True, text=True,
                          timeout=deadline_s, check=False)


def only_run(results: Path, recipe: str) -> Path:
    (folder,) = [path for path in (results / recipe).iterdir() if path.is_dir()]
    return folder


def run_here(recipe: str, results: Path, *settings: str) -> Run:
    """`launch.py --recipe RECIPE --cluster local --local`, archived below results."""
    arguments = ["submit", "--recipe", recipe, "--cluster", "local", "--local", "--out", str(results / f"bundle-{recipe}"),
                 "--set", f"cluster.results_dir={results}"]
    for setting in settings:
        arguments += ["--set", setting]
    done = launch(*arguments, deadline_s=DEADLINE_S)
    output = done.stdout + done.stderr
    assert (results / recipe).is_dir(), output[-4000:]
    return Run(only_run(results, recipe), done.returncode, output)


class Started:
    """launch.py in a process group of its own, running a recipe; output: where its lines go, a file by default."""

    def __init__(self, recipe: str, results: Path, *settings: str, output: int | None = None) -> None:
        self.recipe, self.results, self.log = recipe, results, results / "output.txt"
        argv = launch_argv("submit", "--recipe", recipe, "--cluster", "local", "--local", "--out", str(results / f"bundle-{recipe}"))
        for setting in (f"cluster.results_dir={results}", *settings):
            argv += ["--set", setting]
        with self.log.open("w") as out:
            self.child = subprocess.Popen(argv, cwd=ROOT, stdout=out if output is None else output, stderr=subprocess.STDOUT,
                                          stdin=subprocess.DEVNULL, start_new_session=True)

    def event(self, stage: str) -> dict[str, Any] | None:
        """The first event of a stage that the run has written."""
        for path in (self.results / self.recipe).glob("*/events.jsonl"):
            for line in path.read_text().splitlines():
                if f'"stage": "{stage}"' in line:
                    return dict(json.loads(line))
        return None

    def wait_for(self, stage: str) -> None:
        end = time.monotonic() + DEADLINE_S
        while self.event(stage) is None:
            assert self.child.poll() is None and time.monotonic() < end, f"{stage} was not reached:\n{self.log.read_text()[-4000:]}"
            time.sleep(0.05)

    def end(self, deadline_s: float) -> Run:
        """Wait for the command; it is killed at the deadline, and the run then ends by itself."""
        try:
            code = self.child.wait(deadline_s)
        finally:
            if self.child.poll() is None:
                self.child.kill()
                self.child.wait(10)
        return Run(only_run(self.results, self.recipe), code, self.log.read_text())


def interrupt_at(recipe: str, results: Path, stage: str, signum: int = signal.SIGINT) -> tuple[Run, float]:
    """Start a run, send signum when `stage` begins; the run and the seconds from the signal to the end of the command."""
    started = Started(recipe, results)
    started.wait_for(stage)
    sent = time.monotonic()
    started.child.send_signal(signum)
    run = started.end(60)
    return run, time.monotonic() - sent


def processes_with(text: str) -> list[str]:
    """Command lines and environments of living processes that mention text: what a stopped run must not leave."""
    found = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdigit() or int(folder.name) == os.getpid():
            continue
        try:
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
            state = (folder / "stat").read_text().rsplit(")", 1)[1].split()[0]
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if text in line and state != "Z":
            found.append(f"{folder.name}: {line[:200]}")
    return found


def shared_memory() -> set[str]:
    return {path.name for path in Path("/dev/shm").iterdir()}
