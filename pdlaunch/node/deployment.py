"""The deployment of one job: hosts, ports, services and engines, from the first process to the last."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from .allocation import Host, local_hosts, slurm_hosts
from .contracts import write_json
from .engines import RunningRank, missing_facts, remove_empty_wrapper_logs, start_rank, stop_ranks
from .folders import temporary
from .gate import Readiness, control_ready, expected_workers, look, unregistered
from .ports import PortError, Ports
from .process import Child, StageFailed, indent, stop_together, tail, wait_until
from .redact import Redactor
from .services import clean_log, readiness, start_service
from .spec import Role, ServiceSpec, Spec

_STOP_ORDER: tuple[tuple[Role, ...], ...] = (("decode", "agg", "control"), ("prefill",))
_SERVICE_STOP_S = 2.0
_LATE_S, _LATE_AT_ONCE_S = 3.0, 0.5
_READY_POLL_S = 0.25
_TAIL_LINES_AT_DEADLINE = 8


def redactor_of(spec: Spec) -> Redactor:
    """Knows the secrets of this process's environment and of every environment that the spec gives."""
    return Redactor(spec.redact_keys, os.environ, *(e.env for e in spec.engines), *(s.env for s in spec.services))


class Deployment:
    """Everything that this job runs. say(text) is told once in a while what is waited for."""

    def __init__(
        self, spec: Spec, spec_path: Path, run_dir: Path, namespace: str, stop: threading.Event, say: Callable[[str], None]
    ) -> None:
        self.spec, self.spec_path, self.run_dir, self.stop_event, self.say = spec, spec_path, run_dir, stop, say
        self.redactor = redactor_of(spec)
        self.tmp_dir = temporary()
        self.ports = Ports(namespace)
        self.services: list[Child] = []
        self.ranks: list[RunningRank] = []
        self._stopping: set[int] = set()
        self._said = time.monotonic()
        self.hosts: list[Host] = []
        self.values = {"run_dir": str(run_dir), "bundle_dir": str(spec_path.parent), "namespace": namespace, "tmp_dir": str(self.tmp_dir)}

    @property
    def base_url(self) -> str:
        return f"http://{self.values['head_ip']}:{self.values['http_port']}"

    def control_url(self) -> str:
        """Address of the control engine; StageFailed when there is none."""
        for rank in self.ranks:
            facts = rank.facts()
            if rank.engine.role == "control" and rank.rank == 0 and facts is not None:
                return f"http://{facts['node_ip']}:{facts['ports']['serve_port']}"
        raise StageFailed("no control engine was started")

    def metrics_urls(self) -> dict[str, str]:
        """Process -> URL of /metrics, of the frontend and of every engine that has one."""
        found = {rank.process: (rank.facts() or {}).get("metrics_url", "") for rank in self.ranks}
        urls = {"frontend": f"{self.base_url}/metrics"} if self._has("frontend") else {}
        return urls | {process: url for process, url in found.items() if url}

    def _has(self, service: str) -> bool:
        return any(s.name == service for s in self.spec.services)

    def find_nodes(self) -> None:
        """Hosts, head address and the ports of the services. StageFailed when the allocation is another than the spec's."""
        self.hosts = slurm_hosts(self.spec) if self.spec.run.launcher == "slurm" else local_hosts(self.spec)
        self.values |= {"head_ip": self.hosts[0].address, "node_ip": self.hosts[0].address}
        try:
            for name in ("etcd_client_port", "etcd_peer_port", "nats_port"):
                self.values[name] = str(self.ports.reserve())
            wanted = self.spec.http_port
            self.values["http_port"] = str(self.ports.take(wanted, "http_port") if wanted else self.ports.reserve())
        except PortError as e:
            raise StageFailed(str(e)) from e
        write_json(self.run_dir / "nodes" / "head.json", {
            "process": "head", "host": self.hosts[0].name, "node_ip": self.hosts[0].address, "base_url": self.base_url,
            "ports": {k: int(v) for k, v in self.values.items() if k.endswith("_port")}})

    def start_services(self, names: Sequence[str]) -> list[ServiceSpec]:
        started = [s for s in self.spec.services if s.name in names]
        for service in started:
            self.services.append(start_service(self.spec, service, self.values, self.hosts[0], self.tmp_dir))
        return started

    def wait_services(self, services: Sequence[ServiceSpec], deadline_s: float) -> None:
        for service in services:
            probe = readiness(service, self.values)
            log = self.run_dir / "logs" / f"{service.name}.log"
            wait_until(probe, f"{service.name} to be ready", deadline_s, check=self.check, stop=self.stop_event, poll_s=0.05,
                       waiting_for=lambda log=log: f"last lines of {log}:\n{indent(tail(log))}")  # type: ignore[misc]

    def start_engines(self) -> None:
        for engine in self.spec.engines:
            for rank, part in enumerate(engine.ranks):
                self.ranks.append(start_rank(self.spec, self.spec_path, engine, rank, self.hosts[part.node], self.values))

    def wait_engines(self) -> Readiness:
        """Until every rank has written its facts, the frontend counts every worker, and control engines are healthy.

        gate.json is written then, and at the deadline, but not when the wait was cut short: counts of that moment say nothing.
        """
        expected = expected_workers(self.spec.engines)
        last = Readiness({}, expected, not expected, "")
        controls = [r for r in self.ranks if r.engine.role == "control" and r.rank == 0]

        def state() -> str:
            missing = missing_facts(self.ranks)
            if missing:
                return f"no facts from {', '.join(missing)}"
            return last.failure + unregistered(self.spec.engines, last.found) if last.failure else "the control engine is not healthy"

        def ready() -> bool:
            nonlocal last
            self._say_sometimes(lambda: f"waits for: {state()}")
            if missing_facts(self.ranks):
                return False
            if expected:
                last = look(self.base_url, self.spec.model.served_name, self.values["namespace"], expected, self.stop_event)
            return last.ready and all(control_ready(self.control_url(), self.stop_event) for _ in controls)

        def at_deadline() -> str:
            last.write(self.run_dir / "gate.json")
            tails = [f"{r.process} ({r.log}):\n{indent(tail(r.log, _TAIL_LINES_AT_DEADLINE))}" for r in self.ranks]
            return "\n".join([state(), *tails])

        wait_until(ready, "engines to be ready", self.spec.deadlines.engines_s, check=self.check, stop=self.stop_event,
                   poll_s=_READY_POLL_S, waiting_for=at_deadline)
        last.write(self.run_dir / "gate.json")
        return last

    def _say_sometimes(self, text: Callable[[], str]) -> None:
        if time.monotonic() - self._said > 10:
            self._said = time.monotonic()
            self.say(text())

    def check(self) -> None:
        """StageFailed when a service or an engine rank that should run has ended."""
        for child in self.services:
            if id(child) not in self._stopping and child.poll() is not None:
                raise StageFailed(child.failure())
        for rank in self.ranks:
            if id(rank.child) not in self._stopping and rank.child.poll() is not None:
                raise StageFailed(rank.failure())

    def log_bytes(self) -> dict[str, int]:
        """Process -> size of its log now."""
        return {p.name.removesuffix(".log"): p.stat().st_size for p in sorted((self.run_dir / "logs").glob("*.log"))}

    def stop(self, budget_s: float, at_once: bool) -> list[str]:
        """Stop everything within budget_s: decode, prefill, frontend, NATS, etcd, or all engines at once. Returns the killed processes.

        The first role has half of the time at most: a decode worker with failed transfers may not leave on TERM.
        """
        deadline = time.monotonic() + budget_s
        self._stopping = {id(c) for c in self.services} | {id(r.child) for r in self.ranks}
        rounds = [tuple(role for roles in _STOP_ORDER for role in roles)] if at_once else _STOP_ORDER
        for number, roles in enumerate(rounds, start=1):
            left = deadline - time.monotonic() - _SERVICE_STOP_S
            group = [r for r in self.ranks if r.engine.role in roles]
            if group:
                grace_s = max(1.0, left / 2 if number < len(rounds) else left - 2.0)
                stop_ranks(group, grace_s, _LATE_AT_ONCE_S if at_once and self.spec.run.launcher == "local" else _LATE_S)
        for name in ("frontend", "nats", "etcd"):
            stop_together([c for c in self.services if c.name == name], min(_SERVICE_STOP_S, max(0.5, deadline - time.monotonic())))
        return [c.name for c in (*(r.child for r in self.ranks), *self.services) if c.killed]

    def clean_up(self) -> None:
        """Temporary files, ports and secrets in logs; after stop()."""
        remove_empty_wrapper_logs(self.ranks)
        for path in [*(c.log for c in self.services), *(r.child.log for r in self.ranks)]:
            clean_log(path, self.redactor)
        self.ports.close()
        shutil.rmtree(self.tmp_dir, ignore_errors=True)
