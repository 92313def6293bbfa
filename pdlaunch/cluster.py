"""What a person writes in clusters/<name>.yaml: the facts of one site. No secrets: this file is archived with every run."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from pdlaunch import yamlfile
from pdlaunch.errors import RecipeError
from pdlaunch.recipe import NAME
from pdlaunch.yamlfile import Document, key

_NOWHERE = Document(Path(), {}, {})


@dataclass(frozen=True, kw_only=True)
class Nodes:
    """How many nodes a job may take, and what each has."""

    max: int = key(minimum=1)
    """Nodes that one job may take."""
    gpus_per_node: int = key(minimum=0, maximum=64)
    """GPUs of each node; 0: engines take no GPUs and are not counted."""


@dataclass(frozen=True, kw_only=True)
class Environment:
    """A place where the engines are installed, with exactly these patches applied."""

    patches: tuple[str, ...]
    """Names of patches/series.yaml, in any order; an empty list is the stock installation."""
    python: str = ""
    """Python of a virtual environment on every node; relative paths are relative to the repository root."""
    image: str = ""
    """Container image for pyxis/enroot: a .sqsh path or registry#name:tag."""


@dataclass(frozen=True, kw_only=True)
class Network:
    """Which addresses the job uses."""

    interface: str = ""
    """Network interface whose address the nodes use; empty: Slurm's NodeAddr, or loopback for a local run."""
    http_port: int = key(0, minimum=0, maximum=65535)
    """Port of the frontend; 0: a free one."""


@dataclass(frozen=True, kw_only=True)
class Slurm:
    """How jobs and steps are asked for."""

    partition: str = ""
    """--partition."""
    account: str = ""
    """--account."""
    qos: str = ""
    """--qos."""
    reservation: str = ""
    """--reservation."""
    constraint: str = ""
    """--constraint."""
    comment: str = ""
    """--comment, for sites that reap jobs whose GPUs idle while weights load. The launcher adds its own receipt mark to it."""
    gres: str = key("gpu", pattern=r"|[a-z0-9_]+(:[A-Za-z0-9_.-]+)?")
    """Generic resource of a GPU, as in gpu or gpu:b300; empty: no GPUs are asked for."""
    exclusive: bool = False
    """--exclusive: whole nodes, for sites that demand it; the unused GPUs are then not free for other jobs."""
    max_time_minutes: int = key(0, minimum=0)
    """The partition's limit; 0: not known, Slurm's own refusal is shown."""
    mem_per_engine_rank: str = key("", pattern=r"|\d+[MGT]")
    """--mem of an engine step, as in 100G; needed on clusters that schedule memory."""
    cpus_per_engine_rank: int = key(0, minimum=0)
    """--cpus-per-task of an engine step; 0: not asked for."""
    service_mem: str = key("8G", pattern=r"\d+[MGT]")
    """Memory for etcd, NATS, the frontend and AIPerf on the first node; counted when mem_per_engine_rank is set."""
    service_cpus: int = key(4, minimum=1)
    """CPUs for the same; counted when cpus_per_engine_rank is set."""
    srun_args: tuple[str, ...] = ()
    """Added to every srun."""
    directives: tuple[str, ...] = ()
    """#SBATCH lines of the site that have no key here, as in --licenses=x."""


@dataclass(frozen=True, kw_only=True)
class Container:
    """How steps run inside a container through pyxis/enroot."""

    mounts: tuple[str, ...] = ()
    """--container-mounts, each SRC:DST[:flags]. Models, results and the bundle must be below them, at the same path on both sides."""
    python: str = "python3"
    """Python inside the image that has Dynamo and vLLM."""
    args: tuple[str, ...] = ()
    """Added to the container arguments, as in --container-writable or --no-container-mount-home."""
    control_plane: bool = False
    """true: etcd and nats-server are taken from the image too."""


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """One site, or one way to use it."""

    name: str = key(pattern=NAME)
    """Equals the file name without .yaml."""
    launcher: Literal["local", "slurm"]
    """local: processes of this machine. slurm: a batch job."""
    device: Literal["cpu", "cuda"]
    """What the engines compute on."""
    nodes: Nodes
    """Nodes of the site."""
    environments: tuple[Environment, ...]
    """Engine installations; the one whose patches equal the recipe's is used."""
    aiperf: str
    """The aiperf executable, in an environment of its own."""
    description: str = ""
    """One line for `launch.py list`."""
    etcd: str = "etcd"
    """The etcd executable."""
    nats: str = "nats-server"
    """The nats-server executable."""
    node_python: str = "python3"
    """Python (3.10 or newer, standard library only) that runs the bundle's node/ on the nodes."""
    models: dict[str, str] = key({})
    """Model id -> folder on the nodes."""
    models_visible: bool = True
    """false: model folders cannot be seen from where launch.py runs, so they are not checked."""
    results_dir: str = "results"
    """Where runs are archived; on Slurm a file system that every node sees. Relative: to the repository root."""
    network: Network = field(default_factory=Network)
    """Addresses and ports."""
    engine_env: dict[str, str] = key({})
    """Environment of every engine and of the frontend on this site (network devices, UCX, NCCL)."""
    engines_share_gpus: bool = False
    """true: engines of one run may share GPUs when there are too few (local proof runs; set gpu_memory_utilization accordingly)."""
    gpu_telemetry_url: str = ""
    """DCGM exporter sampled instead of nvidia-smi, as in http://%{node_ip}:9400/metrics."""
    min_free_gib: float = key(1.0, minimum=0)
    """Free space that the results folder must have."""
    slurm: Slurm | None = None
    """Needed with launcher: slurm."""
    container: Container | None = None
    """Needed when an environment has an image."""
    source: Document = field(default=_NOWHERE, compare=False, repr=False, metadata={"written": False})


def load(path: Path, settings: tuple[str, ...] = ()) -> Cluster:
    """Read, bind and check one cluster file; RecipeError on the first thing that is wrong."""
    document = yamlfile.override(yamlfile.read(path), settings, "cluster.")
    cluster = dataclasses.replace(yamlfile.bind(Cluster, document), source=document)
    if cluster.name != path.stem:
        raise RecipeError(
            f"name is {cluster.name!r} but the file is {path.name}",
            where=document.where("name"),
            rule="name equals the file name without .yaml",
            hint=f"write name: {path.stem}, or rename the file",
        )
    _check(cluster)
    return cluster


def load_archived(path: Path) -> Cluster:
    """The cluster.yaml of a bundle or a run, whose file name is not its name."""
    document = yamlfile.read(path)
    return dataclasses.replace(yamlfile.bind(Cluster, document), source=document)


def _check(cluster: Cluster) -> None:
    where = cluster.source.where
    if cluster.launcher == "slurm" and cluster.slurm is None:
        raise RecipeError(
            "launcher is slurm and there is no slurm section", where=where("launcher"), rule="launcher: slurm needs slurm: {...}"
        )
    if cluster.device == "cuda" and cluster.nodes.gpus_per_node == 0:
        raise RecipeError("device is cuda and gpus_per_node is 0", where=where("nodes.gpus_per_node"), rule="at least 1 with device: cuda")
    if cluster.engines_share_gpus and cluster.launcher != "local":
        raise RecipeError("engines_share_gpus with launcher slurm", where=where("engines_share_gpus"), rule="only with launcher: local")
    seen: dict[frozenset[str], int] = {}
    for i, environment in enumerate(cluster.environments):
        at = ("environments", i)
        if bool(environment.python) == bool(environment.image):
            raise RecipeError(f"python {environment.python!r}, image {environment.image!r}", where=where(at), rule="exactly one of the two")
        if environment.image and (cluster.launcher == "local" or cluster.container is None):
            raise RecipeError(
                f"an image {environment.image!r}", where=where(at), rule="an image needs launcher: slurm and a container section"
            )
        names = frozenset(environment.patches)
        if names in seen:
            raise RecipeError(
                f"the same patches as environments[{seen[names]}]", where=where(at), rule="one environment for each set of patches"
            )
        seen[names] = i


def environment_for(cluster: Cluster, patches: tuple[str, ...], recipe: Document) -> Environment:
    """The environment that has exactly these patches; RecipeError with the command that makes one."""
    for environment in cluster.environments:
        if set(environment.patches) == set(patches):
            return environment
    have = "; ".join("[" + ", ".join(e.patches) + "]" for e in cluster.environments)
    names = " ".join(patches)
    make = f"launch.py patch apply --python PYTHON {names}, then add it" if names else "add a stock installation"
    raise RecipeError(
        f"{cluster.name} has no environment with exactly the patches [{', '.join(patches)}]",
        where=recipe.where("patches"),
        rule=f"environments of {cluster.source.path}: {have}",
        hint=f"{make} to environments of {cluster.source.path}",
    )
