"""Which hosts the job has, what their addresses are, and how a command is started on one of them."""

from __future__ import annotations

import ipaddress
import os
import secrets
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from .node_facts import interface_address
from .process import StageFailed
from .spec import NodeSlot, SlurmSpec, Spec

Run = Callable[[Sequence[str]], str]
COMMAND_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class Host:
    slot: NodeSlot
    name: str
    """NodeName of Slurm; the host name for a local run."""
    address: str


def run_command(argv: Sequence[str]) -> str:
    """Standard output alone: Slurm and its plugins write `srun: Step created ...` and the like on standard error (trap T16)."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as e:
        raise StageFailed(f"{' '.join(argv)}: {e}") from e
    if done.returncode != 0:
        raise StageFailed(f"{' '.join(argv)} ended with {done.returncode}: {done.stderr.strip()[:400]}")
    return done.stdout


def job_id(environment: Mapping[str, str]) -> str:
    """SLURM_JOB_ID (of the first component of a heterogeneous job), or local-<6 hex>."""
    return environment.get("SLURM_JOB_ID") or f"local-{secrets.token_hex(3)}"


def local_hosts(spec: Spec) -> list[Host]:
    address = interface_address(spec.network_interface) if spec.network_interface else "127.0.0.1"
    return [Host(slot, socket.gethostname(), address) for slot in spec.nodes]


def slurm_hosts(spec: Spec, environment: Mapping[str, str] = os.environ, run: Run = run_command) -> list[Host]:
    """Hosts of the allocation, in the order of spec.nodes: from SLURM_JOB_NODELIST[_HET_GROUP_k] and scontrol, nothing else.

    Raises StageFailed when the allocation has other nodes than the spec, or a node has no usable address.
    """
    names: dict[int, list[str]] = {}
    for component in sorted({slot.component for slot in spec.nodes}):
        variable = f"SLURM_JOB_NODELIST_HET_GROUP_{component}" if "SLURM_HET_SIZE" in environment else "SLURM_JOB_NODELIST"
        if not environment.get(variable):
            raise StageFailed(f"{variable} is not set: this is not the batch step of the job that spec.json describes")
        names[component] = run(["scontrol", "show", "hostnames", environment[variable]]).split()
        wanted = sum(slot.component == component for slot in spec.nodes)
        if len(names[component]) != wanted:
            raise StageFailed(f"{variable}={environment[variable]} has {len(names[component])} nodes; the spec places engines on {wanted}")
    hosts = []
    for slot in spec.nodes:
        name = names[slot.component][slot.index]
        hosts.append(Host(slot, name, node_address(name, run)))
    if spec.network_interface:
        hosts[0] = Host(hosts[0].slot, hosts[0].name, interface_address(spec.network_interface))
    return hosts


def node_address(name: str, run: Run = run_command) -> str:
    """IP address of a node from the NodeAddr field of `scontrol show node`; a host name there is resolved."""
    for word in run(["scontrol", "show", "node", name, "--oneliner"]).split():
        key, _, value = word.partition("=")
        if key == "NodeAddr":
            try:
                return str(ipaddress.ip_address(value))
            except ValueError:
                return _resolve(value)
    raise StageFailed(f"scontrol show node {name} names no NodeAddr")


def _resolve(name: str) -> str:
    try:
        found = socket.getaddrinfo(name, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError as e:
        raise StageFailed(f"the address of node {name} cannot be resolved: {e}; set network.interface in the cluster file") from e
    return str(found[0][4][0])


def step_argv(slurm: SlurmSpec, host: Host, heterogeneous: bool, gpus: int, command: Sequence[str], *, service: bool = False,
              container: bool = True) -> list[str]:
    """The srun line that starts one command on one node of the job.

    An engine rank gets its own share (--exact: with --overlap two steps of one node would be given the same GPUs); a service shares the
    node with them and has no GPU.
    """
    argv = ["srun", *([f"--het-group={host.slot.component}"] if heterogeneous else []),
            "--nodes=1", "--ntasks=1", f"--nodelist={host.name}", "--kill-on-bad-exit=1"]
    if service:
        argv += ["--overlap", *(["--gres=none"] if slurm.gres else [])]
    else:
        argv.append("--exact")
        if slurm.mem_per_engine_rank:
            argv.append(f"--mem={slurm.mem_per_engine_rank}")
        if slurm.cpus_per_engine_rank:
            argv.append(f"--cpus-per-task={slurm.cpus_per_engine_rank}")
        if slurm.gres:
            argv.append(f"--gres={slurm.gres}:{gpus}" if gpus else "--gres=none")
    return [*argv, *slurm.srun_args, *(slurm.container_args if container else ()), *command]
