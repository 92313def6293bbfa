"""etcd, NATS and the frontend on the head node: started with the spec's command lines, ready when they answer their own protocol."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Callable
from pathlib import Path

from .allocation import Host, step_argv
from .http import HttpError, get
from .node_facts import engine_environment
from .process import Child, StageFailed
from .redact import Redactor, plain
from .spec import ServiceSpec, Spec, fill

_PROBE_TIMEOUT_S = 2.0


def start_service(spec: Spec, service: ServiceSpec, values: dict[str, str], head: Host, tmp_dir: Path) -> Child:
    """Start one service with placeholders filled; in the cluster's container through srun when the spec says so."""
    env, _ = engine_environment(os.environ, {k: fill(v, values) for k, v in service.env.items()}, tmp_dir, service.container)
    argv = [fill(word, values) for word in service.argv]
    if service.container:
        if spec.slurm is None:
            raise StageFailed(f"{service.name} is to run in a container, but the spec has no Slurm part to start it")
        slurm_env = {k: v for k, v in os.environ.items() if k.startswith(("SLURM_", "SBATCH_", "SRUN_"))}
        env, argv = {**slurm_env, **env}, step_argv(spec.slurm, head, "SLURM_HET_SIZE" in os.environ, 0, argv, service=True)
    log = Path(values["run_dir"]) / "logs" / f"{service.name}.log"
    return Child(service.name, argv, env, log, node=head.name, cwd=tmp_dir)


def readiness(service: ServiceSpec, values: dict[str, str]) -> Callable[[], bool]:
    """The probe of a service; false while nobody answers, or something else does."""
    host = values["head_ip"]
    if service.ready == "etcd_health":
        return lambda: etcd_healthy(f"http://{host}:{values['etcd_client_port']}")
    if service.ready == "tcp":
        return lambda: nats_greets(host, int(values["nats_port"]))
    return lambda: answers_200(f"http://{host}:{values['http_port']}/live")


def etcd_healthy(url: str) -> bool:
    """Whether {"health": "true"} comes from /health (a string in etcd 3.4)."""
    try:
        answer = get(f"{url}/health", timeout_s=_PROBE_TIMEOUT_S)
        found = answer.json()
    except HttpError:
        return False
    return answer.status == 200 and isinstance(found, dict) and str(found.get("health")).lower() == "true"


def nats_greets(host: str, port: int) -> bool:
    """Whether the server sends its INFO line, which NATS does before the client says anything."""
    try:
        with socket.create_connection((host, port), timeout=_PROBE_TIMEOUT_S) as s:
            s.settimeout(_PROBE_TIMEOUT_S)
            line = s.makefile("rb").readline(65536)
    except OSError:
        return False
    word, _, body = line.partition(b" ")
    try:
        return word == b"INFO" and "server_id" in json.loads(body)
    except ValueError:
        return False


def answers_200(url: str) -> bool:
    try:
        return get(url, timeout_s=_PROBE_TIMEOUT_S).status == 200
    except HttpError:
        return False


def clean_log(path: Path, redactor: Redactor) -> None:
    """Rewrite a finished log without escape sequences and secrets: services write their logs themselves."""
    if path.exists():
        text = path.read_text(encoding="utf-8", errors="replace")
        cleaned = redactor.text(plain(text))
        if cleaned != text:
            path.write_text(cleaned, encoding="utf-8")
