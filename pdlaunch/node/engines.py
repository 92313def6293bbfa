"""Starts the wrapper of every engine rank on its node and learns its address and ports from the file that it writes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .allocation import Host, step_argv
from .process import Child, StageFailed, indent, tail
from .spec import EngineSpec, Spec
from .worker import process_name

PACKAGE_ROOT = Path(__file__).resolve().parents[len(__package__.split("."))]
"""Folder from which this package can be imported: the bundle, or the repository."""
_START_WRAPPER = ("import importlib, sys; sys.path.insert(0, sys.argv.pop(1)); "
                  "sys.exit(importlib.import_module(sys.argv.pop(1)).main(sys.argv[1:]))")
"""`-m` would need the working directory or PYTHONPATH: a container starts in a folder of its own, and its image may have set the latter."""
_KILL_AFTER_GRACE_S = 2.0


@dataclass
class RunningRank:
    """One engine rank: its wrapper (local), or the srun that holds the wrapper (Slurm)."""

    engine: EngineSpec
    rank: int
    child: Child
    log: Path
    facts_path: Path

    @property
    def process(self) -> str:
        return process_name(self.engine, self.rank)

    def facts(self) -> dict[str, Any] | None:
        """nodes/<process>.json once it is there; write_json renames, so it is never half a file."""
        try:
            found = json.loads(self.facts_path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            return None
        return found if isinstance(found, dict) else None

    def failure(self) -> str:
        """Message of a death: node, exit code, log path, last lines; the wrapper's own words where the engine never spoke."""
        ended = self.child.poll()
        code = "unknown" if ended is None else str(ended.code)
        spoken = self.log.exists() and self.log.stat().st_size > 0
        log = self.log if spoken else self.child.log
        return f"{self.process} on {self.child.node} ended with exit code {code}\n  log: {log}\n{indent(tail(log))}"


def start_rank(spec: Spec, spec_path: Path, engine: EngineSpec, rank: int, host: Host, values: dict[str, str]) -> RunningRank:
    """Start one rank's wrapper, with the engine's own Python so that it sees the engine's environment."""
    run_dir = Path(values["run_dir"])
    name = process_name(engine, rank)
    shared = json.dumps({k: v for k, v in values.items() if k not in ("tmp_dir", "node_ip")})
    command = [engine.python, "-B", "-u", "-c", _START_WRAPPER, str(PACKAGE_ROOT), f"{__package__}.worker", "--spec", str(spec_path),
               "--name", engine.name, "--rank", str(rank), "--run-dir", str(run_dir), "--values", shared, "--node-ip", host.address]
    if spec.run.launcher == "local" and "tmp_dir" in values:
        command += ["--tmp-parent", values["tmp_dir"]]
    if spec.run.launcher == "slurm":
        if spec.slurm is None:
            raise StageFailed("spec.run.launcher is slurm, but the spec has no slurm part")
        command = step_argv(spec.slurm, host, "SLURM_HET_SIZE" in os.environ, len(engine.ranks[rank].gpus), command)
    child = Child(name, command, dict(os.environ), run_dir / "logs" / f"{name}.wrapper.log", node=host.name, stdin=subprocess.PIPE,
                  cwd=PACKAGE_ROOT, parent_death=15)
    return RunningRank(engine, rank, child, run_dir / "logs" / f"{name}.log", run_dir / "nodes" / f"{name}.json")


def missing_facts(ranks: Sequence[RunningRank]) -> list[str]:
    return [r.process for r in ranks if not r.facts_path.exists()]


def stop_ranks(ranks: Sequence[RunningRank], grace_s: float, late_s: float = 3.0) -> None:
    """Ask every wrapper to stop its engine within grace_s; one that does not end has late_s after a TERM, then it is killed."""
    for rank in ranks:
        rank.child.asked = True
        if rank.child.poll() is None and rank.child.popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                rank.child.popen.stdin.write(f"stop {grace_s:.1f}\n".encode())
                rank.child.popen.stdin.flush()
    deadline = time.monotonic() + grace_s + _KILL_AFTER_GRACE_S
    for rank in ranks:
        rank.child.wait(max(0.0, deadline - time.monotonic()))
    late = [r for r in ranks if r.child.poll() is None]
    for rank in late:
        rank.child.terminate()  # srun kills its step; a local wrapper stops its engine by the end of the grace below
    deadline = time.monotonic() + late_s
    for rank in late:
        rank.child.wait(max(0.0, deadline - time.monotonic()))
    for rank in ranks:
        rank.child.kill_group()


def remove_empty_wrapper_logs(ranks: Sequence[RunningRank]) -> None:
    for rank in ranks:
        if rank.child.log.exists() and rank.child.log.stat().st_size == 0:
            rank.child.log.unlink()
