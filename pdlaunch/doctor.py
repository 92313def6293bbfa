"""What this machine has and lacks for a cluster file: programs, environments and their patches, disk, GPUs."""

from __future__ import annotations

import platform
import shutil
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pdlaunch.cluster import Cluster
from pdlaunch.errors import LaunchError
from pdlaunch.job import absolute
from pdlaunch.node.gpus import NoGpu
from pdlaunch.preflight import folder_fault, gpus_seen


@dataclass(frozen=True)
class Line:
    what: str
    ok: bool
    found: str
    next_step: str = ""
    seen: bool = True
    """False: it lies on the nodes or in an image, so nothing could be looked at."""

    def row(self) -> dict[str, str]:
        state = "MISSING" if not self.ok else "ok" if self.seen else "not seen"
        return {"": state, "what": self.what, "found": self.found, "next": "" if self.ok else self.next_step}


def examine(cluster: Cluster, root: Path) -> list[Line]:
    return [*_programs(cluster, root), *_environments(cluster, root), *_models(cluster, root), _disk(cluster, root), _gpus(cluster)]


def _programs(cluster: Cluster, root: Path) -> Iterator[Line]:
    yield Line("launcher Python", sys.version_info >= (3, 11), platform.python_version(), "Python 3.11 or newer")
    yield _program("node_python", cluster.node_python, root, cluster)
    for key, path in (("etcd", cluster.etcd), ("nats", cluster.nats), ("aiperf", cluster.aiperf)):
        yield _program(key, path, root, cluster)
    if cluster.launcher == "slurm":
        for name in ("sbatch", "squeue", "scontrol", "scancel", "srun"):
            found = shutil.which(name)
            yield Line(name, found is not None, found or "not in PATH", "run on a machine with Slurm's commands, or use --local")


def _program(key: str, path: str, root: Path, cluster: Cluster) -> Line:
    full = absolute(root, path) if "/" in path else path
    found = shutil.which(full) or shutil.which(full, path="/usr/sbin:/sbin")
    far = cluster.launcher == "slurm" and not cluster.models_visible
    if found is None and far:
        return Line(key, True, f"{full} (on the nodes; not visible here)", seen=False)
    return Line(key, found is not None, found or f"{full} cannot be started", f"make setup, or correct {key} in {cluster.source.path}")


def _environments(cluster: Cluster, root: Path) -> Iterator[Line]:
    from pdlaunch import patching, patchseries

    series = patchseries.load_series(root / "patches" / "series.yaml")
    for environment in cluster.environments:
        name = f"environment [{', '.join(environment.patches)}]"
        if environment.image:
            yield Line(name, True, f"{environment.image} (an image; checked when the job runs)", seen=False)
            continue
        python = Path(absolute(root, environment.python))
        if not python.exists():
            far = cluster.launcher == "slurm" and not cluster.models_visible
            yield Line(name, far, f"{python} is not {'visible here' if far else 'there'}", "make setup", seen=not far)
            continue
        try:
            patching.verify(patching.site_packages_of(python), series, environment.patches)
        except LaunchError as e:
            yield Line(name, False, e.what, e.hint or "launch.py patch status")
        else:
            yield Line(name, True, f"{python}, patches verified")


def _models(cluster: Cluster, root: Path) -> Iterator[Line]:
    for model, path in cluster.models.items():
        folder = Path(absolute(root, path))
        if cluster.models_visible:
            yield Line(f"model {model}", (folder / "config.json").is_file(), str(folder), f"correct models in {cluster.source.path}")


def _disk(cluster: Cluster, root: Path) -> Line:
    path = Path(absolute(root, cluster.results_dir))
    there = path
    while not there.exists():
        there = there.parent
    if cluster.launcher == "slurm" and there == Path(path.anchor):
        return Line("disk for results", True, f"{path} does not exist on this machine", seen=False)
    if fault := folder_fault(path):
        return Line("disk for results", False, fault, f"correct results_dir in {cluster.source.path}")
    free_gib = shutil.disk_usage(there).free / 2**30
    return Line(
        "disk for results", free_gib >= cluster.min_free_gib, f"{free_gib:.1f} GiB free at {path}", f"at least {cluster.min_free_gib:g} GiB"
    )


def _gpus(cluster: Cluster) -> Line:
    if cluster.device == "cpu" or cluster.launcher == "slurm":
        return Line("GPUs", True, "not needed on this machine")
    try:
        rows = gpus_seen()
    except NoGpu as e:
        return Line("GPUs", False, str(e), "a cluster file with device: cpu, or look at the driver")
    wanted = cluster.nodes.gpus_per_node
    return Line("GPUs", len(rows) >= wanted, "; ".join(rows), f"gpus_per_node of {cluster.source.path} is {wanted}")
