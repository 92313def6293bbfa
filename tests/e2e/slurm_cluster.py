"""A real Slurm on loopback for the tests: munged, slurmctld and two slurmd with eight fake GPUs each, in one private folder.

Nothing listens beyond 127.0.0.1, nothing is configured system-wide, and stop() ends every daemon by the pid that start() saw.
The fake GPUs are character devices (mknod needs root), so that Slurm sets CUDA_VISIBLE_DEVICES as it does for real ones.
"""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from pathlib import Path

GPUS_PER_NODE = 8
NODES = ("node1", "node2")


def _daemon(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path="/usr/sbin:/sbin")
    if found is None:
        raise FileNotFoundError(f"{name} is missing: run `make setup-test`")
    return found


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for s in sockets:
        s.bind(("127.0.0.1", 0))
    ports: list[int] = [s.getsockname()[1] for s in sockets]
    for s in sockets:
        s.close()
    return ports


@dataclass
class SlurmCluster:
    folder: Path
    cpus_per_node: int = 16
    memory_mib_per_node: int = 60000
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def env(self) -> dict[str, str]:
        """What sbatch, squeue, scontrol and srun need to reach this cluster and no other."""
        return {"SLURM_CONF": str(self.folder / "slurm.conf")}

    def start(self) -> None:
        for name in ("state", "log", *NODES):
            (self.folder / name).mkdir(parents=True)
        for i in range(GPUS_PER_NODE):
            os.mknod(self.folder / f"nvidia{i}", 0o666 | 0o020000, os.makedev(1, 3))
        self._start_munged()
        self._write_configuration()
        self._spawn("slurmctld", [_daemon("slurmctld"), "-D", "-f", str(self.folder / "slurm.conf")])
        for node in NODES:
            self._spawn(node, [_daemon("slurmd"), "-D", "-N", node, "-f", str(self.folder / "slurm.conf")])
        self._wait("the nodes to be idle", self._nodes_idle, 60)

    def _start_munged(self) -> None:
        key = self.folder / "munge.key"
        key.write_bytes(os.urandom(1024))
        key.chmod(0o400)
        socket_path = self.folder / "munge.socket"
        self._spawn("munged", [
            _daemon("munged"), "--foreground", "--force", "-S", str(socket_path), f"--key-file={key}",
            f"--pid-file={self.folder / 'munged.pid'}", f"--log-file={self.folder / 'log' / 'munged.log'}",
            f"--seed-file={self.folder / 'munged.seed'}"])
        self._wait("munged's socket", socket_path.exists, 20)

    def _write_configuration(self) -> None:
        host = socket.gethostname()
        controller, first, second = free_ports(3)
        f = self.folder
        (f / "cgroup.conf").write_text("CgroupPlugin=cgroup/v1\nCgroupAutomount=no\n")
        (f / "gres.conf").write_text(f"NodeName=node[1-2] Name=gpu File={f}/nvidia[0-{GPUS_PER_NODE - 1}] Flags=nvidia_gpu_env\n")
        nodes = "\n".join(
            f"NodeName={name} NodeHostname={host} NodeAddr=127.0.0.1 Port={port} CPUs={self.cpus_per_node} "
            f"RealMemory={self.memory_mib_per_node} Gres=gpu:{GPUS_PER_NODE} State=UNKNOWN"
            for name, port in zip(NODES, (first, second), strict=True))
        (f / "slurm.conf").write_text(f"""\
ClusterName=pdlaunchtest
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={controller}
SlurmctldPidFile={f}/slurmctld.pid
SlurmdPidFile={f}/%n/slurmd.pid
SlurmdSpoolDir={f}/%n
StateSaveLocation={f}/state
SlurmctldLogFile={f}/log/slurmctld.log
SlurmdLogFile={f}/log/%n.log
SlurmUser={os.environ.get('USER') or 'root'}
AuthType=auth/munge
AuthInfo=socket={f}/munge.socket
CredType=cred/munge
CommunicationParameters=NoInAddrAny,NoCtldInAddrAny
SlurmdParameters=config_overrides
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
DefMemPerNode=1000
GresTypes=gpu
ReturnToService=2
KillWait=30
MessageTimeout=30
SlurmdTimeout=300
SchedulerParameters=sched_interval=1,batch_sched_delay=0,bf_interval=1
MaxJobCount=100
MinJobAge=600
JobCompType=jobcomp/none
AccountingStorageType=accounting_storage/none
{nodes}
PartitionName=gpu Nodes=node[1-2] Default=YES MaxTime=02:00:00 State=UP PreemptMode=off
""")

    def _spawn(self, name: str, argv: list[str]) -> None:
        with (self.folder / "log" / f"{name}.out").open("wb") as out:
            options = {"stdout": out, "stderr": subprocess.STDOUT, "stdin": subprocess.DEVNULL, "start_new_session": True}
            self.processes.append(subprocess.Popen(argv, **options))  # type: ignore[call-overload]

    def _wait(self, what: str, ready: object, deadline_s: float) -> None:
        end = time.monotonic() + deadline_s
        while not ready():  # type: ignore[operator]
            dead = [p.args for p in self.processes if p.poll() is not None]
            if dead or time.monotonic() > end:
                tails = {p.name: p.read_text(errors="replace")[-1500:] for p in sorted((self.folder / "log").iterdir())}
                self.stop()
                raise RuntimeError(f"waited for {what}; ended early: {dead}; logs: {tails}")
            time.sleep(0.1)

    def _nodes_idle(self) -> bool:
        answer = self.command("sinfo", "-h", "-o", "%t %D", check=False)
        return answer.returncode == 0 and answer.stdout.split() == ["idle", str(len(NODES))]

    def command(self, *argv: str, check: bool = True, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        return subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, text=True, check=check, timeout=timeout_s)

    def stop(self) -> None:
        """Cancel what runs, then end the daemons in reverse order; each has ten seconds before it is killed."""
        if len(self.processes) > 1:
            self.command("scancel", "--me", check=False)
            self.command("scancel", "--full", "--signal=KILL", "--me", check=False)
        for process in reversed(self.processes):
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                try:
                    process.wait(10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait(10)
        self.processes.clear()
