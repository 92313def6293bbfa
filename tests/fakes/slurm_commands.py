"""sbatch, squeue, sacct and scancel that fail in the ways that a real slurmctld cannot be made to fail on demand.

install(folder, plan) writes them as executables; each call is appended to folder/calls.jsonl and answered by plan["sbatch"] and so on:
{"rc", "out", "err", "sleep_s"}, a list of such answers for successive calls, or absent for rc 0 and no output.
"""

from __future__ import annotations

import json
import stat
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -I
import json, sys, time
from pathlib import Path
folder = Path({folder!r})
name = Path(sys.argv[0]).name
key = "test_only" if name == "sbatch" and "--test-only" in sys.argv else name
calls = folder / "calls.jsonl"
before = [json.loads(x) for x in calls.read_text().splitlines()] if calls.exists() else []
with calls.open("a") as f:
    f.write(json.dumps({{"key": key, "argv": sys.argv[1:]}}) + "\\n")
answer = json.loads((folder / "plan.json").read_text()).get(key, {{}})
if isinstance(answer, list):
    answer = answer[min(sum(c["key"] == key for c in before), len(answer) - 1)]
time.sleep(answer.get("sleep_s", 0))
sys.stdout.write(answer.get("out", ""))
sys.stderr.write(answer.get("err", ""))
sys.exit(answer.get("rc", 0))
"""


def install(folder: Path, plan: dict[str, Any]) -> Path:
    """Write the commands and their plan; returns the folder to put into PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "plan.json").write_text(json.dumps(plan), encoding="utf-8")
    for name in ("sbatch", "squeue", "sacct", "scancel"):
        path = folder / name
        path.write_text(_PROGRAM.format(python=sys.executable, folder=str(folder)), encoding="utf-8")
        path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return folder


def calls(folder: Path) -> list[dict[str, Any]]:
    path = folder / "calls.jsonl"
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
