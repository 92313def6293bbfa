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


def interrupt_at(recipe: str, results: Path, stage: str, signum: int = signal.SIGINT) -> tuple[Run, float]:
    """Start a run, send signum when `stage` begins; the run and the seconds from the signal to the end of the command."""
    argv = launch_argv("submit", "--recipe", recipe, "--cluster", "local", "--local", "--out", str(results / f"bundle-{recipe}"),
                       "--set", f"cluster.results_dir={results}")
    log = results / "output.txt"
    with log.open("w") as out:
        child = subprocess.Popen(argv, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL)
        try:
            end = time.monotonic() + DEADLINE_S
            while not _reached(results / recipe, stage):
                assert child.poll() is None and time.monotonic() < end, f"{stage} was not reached:\n{log.read_text()[-4000:]}"
                time.sleep(0.05)
            sent = time.monotonic()
            child.send_signal(signum)
            code = child.wait(60)
            took_s = time.monotonic() - sent
        finally:
            if child.poll() is None:
                child.kill()
                child.wait(10)
    return Run(only_run(results, recipe), code, log.read_text()), took_s


def _reached(recipe_results: Path, stage: str) -> bool:
    return any(f'"stage": "{stage}"' in path.read_text() for path in recipe_results.glob("*/events.jsonl"))


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
