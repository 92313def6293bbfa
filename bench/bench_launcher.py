"""The launcher's own cost: user time of the command line, and what a real run spent outside engines, recall and load.

Goals: `--help` under 0.15 s, `render` of any shipped recipe under 0.4 s of user time; job start -> first engine process under 2 s;
readiness noticed within 1 s; stop within 10 s; everything that the launcher adds under 5 s. Ratios are against a bare `python -c pass`
of the same run.
"""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
REPETITIONS = 5


def user_s(argv: list[str]) -> float:
    """Median user CPU seconds of argv over REPETITIONS runs."""
    times = []
    for _ in range(REPETITIONS):
        before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime
        subprocess.run(argv, cwd=ROOT, check=True, capture_output=True)
        times.append(resource.getrusage(resource.RUSAGE_CHILDREN).ru_utime - before)
    return statistics.median(times)


def command_line() -> None:
    bare = user_s([sys.executable, "-c", "pass"])
    rows = [("python -c pass", bare), ("launch.py --help", user_s([sys.executable, "launch.py", "--help"]))]
    clusters = {"gemma4": "example"}
    with tempfile.TemporaryDirectory() as folder:
        for recipe in sorted((ROOT / "recipes").glob("*.yaml")):
            cluster = clusters.get(recipe.stem.split("-")[0], "local")
            if recipe.stem.startswith("gpu-"):
                cluster = "local-gpu"
            argv = [sys.executable, "launch.py", "check", "--recipe", recipe.stem, "--cluster", cluster]
            if subprocess.run(argv, cwd=ROOT, capture_output=True, check=False).returncode:
                print(f"{'check ' + recipe.stem:32} not priced here: its model or environment is not on this machine")
                continue
            argv[2:3] = ["render", "--force", "--out", f"{folder}/{recipe.stem}"]
            rows.append((f"render {recipe.stem}", user_s(argv)))
    for name, seconds in rows:
        print(f"{name:32} {seconds:6.3f} s user  {seconds / bare:5.1f} x bare python")


def last_run() -> None:
    """Stage times of the newest complete run under results/, from its events.jsonl."""
    runs = sorted((ROOT / "results").glob("*/*/verdict.json"), key=lambda p: p.stat().st_mtime)
    for verdict in reversed(runs):
        if json.loads(verdict.read_text())["verdict"] == "INCOMPLETE":
            continue
        print(f"\nstages of {verdict.parent.relative_to(ROOT)}")
        evidence = json.loads((verdict.parent / "evidence.json").read_text())["values"]
        for name, value in evidence.items():
            if name.startswith("time."):
                print(f"{name:44} {value['value']:9.3f} {value['unit']}")
        return
    print("\nno complete run under results/: `make run` makes one")


if __name__ == "__main__":
    command_line()
    last_run()
