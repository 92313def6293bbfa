"""The wrapper of one engine rank, on the rank's own node: facts, ports, the engine, its log, and nothing left behind.

Under Slurm it is the task of an srun step, so it is the only one that can see the node. The supervisor talks to it through its standard
input, which srun forwards: a line `stop SECONDS` asks for an orderly stop, the end of the input means that the supervisor is gone. (TERM to
srun kills the step at once, with exit code 137, so it is not used.) SIGTERM from Slurm stops it as well.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import gpus
from .contracts import utc_now, write_json
from .fabric import read_counters
from .folders import remove_abandoned, temporary
from .node_facts import (
    SHOWN_ENVIRONMENT,
    disk_free_gib,
    distribution_versions,
    engine_environment,
    file_hashes,
    interface_address,
    site_packages,
)
from .output import say
from .ports import PortError, Ports
from .process import Child, Exit, StageFailed, StopRequested, kill_descendants
from .procfs import SHM, adopt_orphans, command_line, descendants, die_with_parent, every_pid, shm_held_by
from .redact import Redactor, plain
from .spec import EngineRank, EngineSpec, Spec, fill, load_spec, placeholders_in

EXIT_NOT_STARTED = 4
"""Exit code of a wrapper that refused to start its engine; its log says why."""
DEFAULT_GRACE_S = 8.0
KILL_SLACK_S = 1.0
"""Of a grace period, what is kept for KILL, the facts afterwards and the removal of files."""
TEARDOWN_S = 1.0
_TICK_S = 0.1
_SHM_PATTERNS = ("psm_", "sem.mp-", "sem.loky", "nixl", "ucx_", "vllm")
_PER_RANK_PORTS = ("side_channel_port", "kv_events_port")


@dataclass(frozen=True)
class Task:
    """What the supervisor asks of one wrapper."""

    spec: Spec
    engine: EngineSpec
    rank: int
    run_dir: Path
    values: dict[str, str]
    """Placeholders that the supervisor knows: head_ip, the ports of the services, namespace, run_dir, bundle_dir."""
    node_ip: str
    tmp_parent: Path | None = None
    """Where the private folder is made; None: TMPDIR of this node."""

    @property
    def part(self) -> EngineRank:
        return self.engine.ranks[self.rank]

    @property
    def process(self) -> str:
        return process_name(self.engine, self.rank)


def process_name(engine: EngineSpec, rank: int) -> str:
    return engine.name if rank == 0 else f"{engine.name}.r{rank}"


@dataclass
class Control:
    """Whether a stop was asked for, by a signal or by the supervisor, and the time that is left for it."""

    requested: bool = False
    grace_s: float = DEFAULT_GRACE_S
    why: str = ""
    _buffer: bytes = b""
    _open: bool = True

    def listen(self) -> None:
        for signum in (signal.SIGTERM, signal.SIGINT):
            signal.signal(signum, self._on_signal)

    def _on_signal(self, signum: int, frame: Any) -> None:
        self._request(signal.Signals(signum).name, DEFAULT_GRACE_S)

    def _request(self, why: str, grace_s: float) -> None:
        if not self.requested:
            self.requested, self.why, self.grace_s = True, why, grace_s

    def poll(self, wait_s: float = 0.0) -> bool:
        """Look at standard input for at most wait_s; true when a stop was asked for."""
        if not self._open:
            time.sleep(wait_s)
            return self.requested
        ready, _, _ = select.select([0], [], [], wait_s)
        if ready:
            data = os.read(0, 4096)
            self._open = bool(data)
            self._buffer += data
            *lines, self._buffer = self._buffer.split(b"\n")
            for line in lines:
                word, _, seconds = line.decode("ascii", errors="replace").partition(" ")
                if word == "stop":
                    self._request("asked by the supervisor", float(seconds or DEFAULT_GRACE_S))
            if not data:
                self._request("the supervisor is gone", DEFAULT_GRACE_S)
        return self.requested


@dataclass
class ShmWatch:
    """Names in /dev/shm that processes of ours were seen to hold: the only ones that may be removed at the end."""

    before: set[str] = field(default_factory=lambda: set(_shm_names()))
    ours: set[str] = field(default_factory=set)
    _judged: set[str] = field(default_factory=set)

    def look(self, root: int, again: bool = False) -> None:
        """Scan the memory maps below root when a name has appeared that was not judged yet (or anyway)."""
        new = _shm_names() - self.before - self._judged
        if new or again:
            self.ours |= shm_held_by(descendants(root)) - self.before
            self._judged |= new & self.ours

    def remove_left(self) -> list[str]:
        """Remove ours that still exist and that nobody holds any more."""
        left = {n for n in self.ours & _shm_names() if n.startswith(_SHM_PATTERNS)}
        if left:
            left -= shm_held_by(every_pid())
        for name in left:
            with contextlib.suppress(FileNotFoundError):
                (SHM / name).unlink()
        return sorted(left)


def _shm_names() -> set[str]:
    try:
        return {p.name for p in SHM.iterdir()}
    except OSError:
        return set()


class LogPump(threading.Thread):
    """Copies an engine's output to its log line by line, without escape sequences and without secrets."""

    def __init__(self, source: IO[bytes], log: Path, redactor: Redactor) -> None:
        super().__init__(name="log-pump", daemon=True)
        self._source, self._log, self._redactor = source, log, redactor

    def run(self) -> None:
        with self._log.open("a", encoding="utf-8") as out:
            for raw in self._source:
                out.write(self._redactor.text(plain(raw.decode("utf-8", errors="replace").rstrip("\r\n"))) + "\n")
                out.flush()


def fill_values(task: Task, ports: Ports, tmp_dir: Path, control: Control) -> dict[str, str]:
    """Every placeholder that this rank uses; ports are reserved, and the rendezvous comes from rank 0's file."""
    used = set().union(*(placeholders_in(t) for t in (*task.part.argv, *task.engine.env.values(), task.spec.gpu_telemetry_url)))
    values = {**task.values, "tmp_dir": str(tmp_dir), "node_ip": task.node_ip}
    for name in sorted(used & {"system_port", "serve_port", *_PER_RANK_PORTS}):
        values[name] = str(ports.reserve(max(1, task.engine.data_parallel) if name in _PER_RANK_PORTS else 1))
    if used & {"master_ip", "master_port"}:
        if task.rank == 0:
            values["master_ip"], values["master_port"] = task.node_ip, str(ports.reserve())
        else:
            values["master_ip"], values["master_port"] = rendezvous(task, control)
    return values


def rendezvous(task: Task, control: Control) -> tuple[str, str]:
    """(address, port) that rank 0 of this engine wrote; StageFailed at the deadline for engines."""
    path = task.run_dir / "nodes" / f"{task.engine.name}.json"
    deadline = time.monotonic() + task.spec.deadlines.engines_s
    while not path.exists():
        if control.poll(_TICK_S):
            raise StopRequested(control.why)
        if time.monotonic() > deadline:
            raise StageFailed(f"rank 0 of {task.engine.name} has not written {path} after {task.spec.deadlines.engines_s:g} s")
    facts = json.loads(path.read_text(encoding="utf-8"))
    return facts["node_ip"], str(facts["ports"]["master_port"])


def metrics_url(task: Task, values: dict[str, str]) -> str:
    port = values.get("serve_port" if task.engine.kind == "vllm.serve" else "system_port")
    return "" if port is None or task.rank > 0 else f"http://{task.node_ip}:{port}/metrics"


def facts_before(task: Task, values: dict[str, str], tmp_dir: Path) -> dict[str, Any]:
    folders = site_packages()
    fabric, fabric_error = read_counters()
    used = [k for k in values if k.endswith("_port") and k not in task.values]
    return {
        "process": task.process, "role": task.engine.role, "rank": task.rank, "node": task.part.node, "host": socket.gethostname(),
        "node_ip": task.node_ip, "pid": os.getpid(), "engine_pid": None, "metrics_url": metrics_url(task, values),
        "ports": {k: int(values[k]) for k in used},
        "python": {"executable": sys.executable, "version": sys.version.split()[0], "site_packages": [str(f) for f in folders]},
        "versions": distribution_versions(folders), "file_sha256": file_hashes(task.spec.proof.file_sha256, folders),
        "fabric_before": fabric, "fabric_error": fabric_error, "disk_free_gib": disk_free_gib([task.run_dir, tmp_dir, SHM]),
        "started_utc": utc_now(), "exit": None,
    }


def check_gpus(task: Task, env: dict[str, str], facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The GPUs of this rank, noted in facts; StageFailed when one of them is not free. Nothing is killed: it is not ours."""
    if task.spec.run.device == "cpu":
        facts |= {"gpus": [], "gpu_processes": [], "gpu_error": "device cpu: no GPU is used"}
        return []
    found, processes, error = gpus.inventory()
    mine = gpus.assigned(found, env.get("CUDA_VISIBLE_DEVICES"))
    facts |= {"gpus": mine, "gpu_processes": processes, "gpu_error": error}
    if error:
        return []
    if len(mine) < len(task.part.gpus):
        raise StageFailed(f"{task.process} needs {len(task.part.gpus)} GPUs, {len(mine)} are visible on {facts['host']}"
                          f" (CUDA_VISIBLE_DEVICES={env.get('CUDA_VISIBLE_DEVICES')})")
    taken = gpus.leftovers(mine, processes)
    if taken:
        raise StageFailed(f"GPUs of {task.process} on {facts['host']} are not free:\n  " + "\n  ".join(taken)
                          + "\n  next: end the job that holds them, or ask the site to clean the node; nothing was killed")
    return mine


def wait_for_leader(engine: Child, grace_s: float) -> bool:
    """TERM to the engine's leader and wait for its end; true when only the teardown of its interpreter was left to wait for.

    Dynamo 1.6.1 shuts its runtime and vLLM's EngineCore down in order, and the leader's Python then collects garbage, for 6 s on a busy
    machine. When all processes that the leader had are gone there is nothing left to lose, so it has TEARDOWN_S more.
    """
    workers = {pid for pid in descendants(engine.pid) if "resource_tracker" not in command_line(pid)}
    engine.terminate()
    deadline = time.monotonic() + grace_s
    while engine.poll() is None and time.monotonic() < deadline:
        if workers and not workers & set(descendants(engine.pid)):
            return engine.wait(min(TEARDOWN_S, max(0.0, deadline - time.monotonic()))) is None
        time.sleep(_TICK_S)
    return False


class Wrapper:
    """One engine from its facts to its removal."""

    def __init__(self, task: Task, control: Control) -> None:
        self.task, self.control = task, control
        self.log = task.run_dir / "logs" / f"{task.process}.log"
        self.facts_path = task.run_dir / "nodes" / f"{task.process}.json"
        self.redactor = Redactor(task.spec.redact_keys, os.environ, task.engine.env)
        self.shm = ShmWatch()
        self.facts: dict[str, Any] = {}

    def run(self, tmp_dir: Path, ports: Ports) -> int:
        task = self.task
        values = fill_values(task, ports, tmp_dir, self.control)
        own = {k: fill(v, values) for k, v in task.engine.env.items()}
        if task.spec.run.launcher == "local" and task.spec.run.device == "cuda":
            own["CUDA_VISIBLE_DEVICES"] = ",".join(str(g) for g in task.part.gpus)
        boxed = task.spec.slurm is not None and bool(task.spec.slurm.container_args)
        env, removed = engine_environment(os.environ, own, tmp_dir, boxed)
        argv = [fill(word, values) for word in task.part.argv]
        self.facts = facts_before(task, values, tmp_dir)
        shown = {k: v for k, v in env.items() if k in own or SHOWN_ENVIRONMENT.match(k)}
        self.facts |= {"argv": self.redactor.argv(argv), "environment": self.redactor.environment(shown), "removed_environment": removed}
        mine = check_gpus(task, env, self.facts)
        sampler = self._sampler(mine, values)
        if self.control.poll():
            raise StopRequested(self.control.why)
        engine = Child(task.process, argv, env, self.log, stdout=subprocess.PIPE, cwd=tmp_dir)
        self.facts["engine_pid"] = engine.pid
        write_json(self.facts_path, self.facts)
        assert engine.popen.stdout is not None
        pump = LogPump(engine.popen.stdout, self.log, self.redactor)
        pump.start()
        if sampler:
            sampler.start()
        ended = self._watch(engine)
        pump.join(timeout=2.0)
        if sampler:
            sampler.stop()
            self.facts["gpu_error"] = sampler.reason
        return 0 if ended.asked else ended.code or 1

    def _sampler(self, mine: list[dict[str, Any]], values: dict[str, str]) -> gpus.Sampler | None:
        if not mine:
            return None
        url = fill(self.task.spec.gpu_telemetry_url, values)
        path = self.task.run_dir / "gpu" / f"{self.task.process}.csv"
        return gpus.Sampler(path, (lambda: gpus.sample_dcgm(url)) if url else gpus.sample_smi, mine)

    def _watch(self, engine: Child) -> Exit:
        """Until the engine has ended, by itself or because a stop was asked for; then nothing of it is left."""
        torn_down = False
        while engine.poll() is None and not self.control.poll(_TICK_S):
            self.shm.look(os.getpid())
        if engine.poll() is None:
            self.shm.look(os.getpid(), again=True)
            torn_down = wait_for_leader(engine, max(1.0, self.control.grace_s - KILL_SLACK_S))
        engine.kill_group()
        strays = kill_descendants()
        self.control.poll()  # Slurm's TERM reaches the engine and its wrapper in any order
        code = (engine.poll() or Exit(137, True, True)).code
        ended = Exit(code, self.control.requested, engine.killed and not torn_down)
        self.facts["exit"] = {**vars(ended), "why": self.control.why, "utc": utc_now()}
        self.facts["removed"] = {"processes": strays}
        return ended

    def finish(self) -> None:
        """Facts of the end; called whatever happened."""
        if self.facts:
            fabric, _ = read_counters()
            removed = self.facts.setdefault("removed", {})
            removed["shm"] = self.shm.remove_left()
            self.facts["fabric_after"] = fabric
            write_json(self.facts_path, self.facts)


def wrap(task: Task) -> int:
    """Run one engine rank; the exit code is the engine's, 0 after a stop that was asked for, or EXIT_NOT_STARTED."""
    die_with_parent(signal.SIGTERM)
    adopt_orphans()
    control = Control()
    control.listen()
    wrapper = Wrapper(task, control)
    wrapper.log.parent.mkdir(parents=True, exist_ok=True)
    ports = Ports(f"{task.values['namespace']}/{task.process}")
    if task.tmp_parent is None:
        remove_abandoned()
    tmp_dir = temporary(task.tmp_parent)
    try:
        return wrapper.run(tmp_dir, ports)
    except (StageFailed, PortError) as e:
        say(str(e), sys.stderr)
        return EXIT_NOT_STARTED
    except StopRequested:
        return 0
    finally:
        wrapper.finish()
        ports.close()
        shutil.rmtree(tmp_dir, ignore_errors=True)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="worker", allow_abbrev=False)
    parser.add_argument("--spec", type=Path, required=True)
    parser.add_argument("--name", required=True)
    parser.add_argument("--rank", type=int, default=0)
    parser.add_argument("--run-dir", type=Path, required=True)
    parser.add_argument("--values", required=True, help="JSON object of placeholder values that the supervisor knows")
    parser.add_argument("--node-ip", required=True)
    parser.add_argument("--tmp-parent", type=Path, help="where the private folder is made; default: TMPDIR of this node")
    args = parser.parse_args(argv)
    spec = load_spec(args.spec)
    (engine,) = [e for e in spec.engines if e.name == args.name]
    node_ip = interface_address(spec.network_interface) if spec.network_interface else args.node_ip
    return wrap(Task(spec, engine, args.rank, args.run_dir, json.loads(args.values), node_ip, args.tmp_parent))
