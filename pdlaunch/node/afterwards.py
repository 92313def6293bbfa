"""What launch.py adds to a run when it can be seen from the node: the plan against what was measured, and the page.

Neither decides anything, and a bundle works without them: where launch.py or its Python is not visible, they are left out and an event
says so.
"""

from __future__ import annotations

import os
import shutil
import threading
from pathlib import Path

from .process import Child, StageFailed
from .spec import Spec

PLAN_S = 30.0
PAGE_S = 60.0
STOP_S = 2.0
INTERRUPTED = "the run was interrupted"


def model_config(spec: Spec, run_dir: Path) -> bool:
    """Keep the model's config.json as model_config.json: the geometry that every later reading of the run needs."""
    source = Path(spec.model.path) / "config.json"
    if not source.is_file():
        return False
    shutil.copyfile(source, run_dir / "model_config.json")
    return True


def visible(spec: Spec) -> bool:
    return bool(spec.run.tool_argv) and all(Path(word).is_file() for word in spec.run.tool_argv)


def plan(spec: Spec, run_dir: Path, stop: threading.Event) -> str:
    """Write plan.json (`launch.py plan --run`); the reason why not, or ''. Before the manifest, which names it.

    Nothing is written for a bundle that knows no launch.py, nor for the mocker, which has no cache to price.
    """
    if not spec.run.tool_argv or all(engine.kind == "dynamo.mocker" for engine in spec.engines):
        return ""
    log = run_dir / "plan.log"
    reason = _run(spec, ["plan", "--run", str(run_dir), "--format", "json"], log, PLAN_S, stop)
    if not reason:
        log.replace(run_dir / "plan.json")
    return reason


def page(spec: Spec, run_dir: Path, stop: threading.Event, deadline_s: float = PAGE_S) -> str:
    """Write <run>.html beside the run folder, whose files are closed by then; its path, or 'none; ' and the reason."""
    log = run_dir.with_name(f".{run_dir.name}.report.log")
    reason = _run(spec, ["report", str(run_dir), "--force", "--include-invalid"], log, deadline_s, stop)
    log.unlink(missing_ok=True)
    return f"none; {reason}" if reason else str(run_dir.with_name(f"{run_dir.name}.html"))


def _run(spec: Spec, arguments: list[str], log: Path, deadline_s: float, stop: threading.Event) -> str:
    """0 and 1 are answers of launch.py (1: residuals, or a run that is not VALID); anything else is a reason."""
    if not visible(spec):
        return "launch.py is not visible from this node"
    if stop.is_set():
        return INTERRUPTED
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTHON")}
    try:
        child = Child(f"launch.py {arguments[0]}", [*spec.run.tool_argv, *arguments], env, log)
    except StageFailed as e:
        return str(e)
    ended = child.wait(deadline_s, stop)
    if ended is None:
        child.stop(STOP_S)
        if stop.is_set():
            return INTERRUPTED
        return f"launch.py {arguments[0]} did not end within {deadline_s:.0f} s"
    child.kill_group()
    if ended.code not in (0, 1):
        return f"launch.py {arguments[0]} ended with {ended.code}: {log.read_text(encoding='utf-8', errors='replace')[-500:]}"
    return ""
