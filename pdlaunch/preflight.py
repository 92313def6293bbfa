"""What must be true of this machine before a job is rendered, submitted or run here; nothing stays written."""

from __future__ import annotations

import contextlib
import shutil
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pdlaunch import mounts, nosecrets
from pdlaunch.errors import LaunchError, RecipeError, SubmitError, Where
from pdlaunch.job import Job
from pdlaunch.node.build import BuildFacts, build_faults
from pdlaunch.node.node_facts import distribution_versions, file_hashes, interface_address
from pdlaunch.node.ports import PortError, Ports
from pdlaunch.yamlfile import nearest


@dataclass(frozen=True)
class Finding:
    """One line of `doctor`: error is None when the check passed."""

    name: str
    observed: str
    error: LaunchError | None


def check_job(job: Job, *, submitting: bool = False) -> None:
    """Raise the first thing that is wrong: what `check`, `render` and `submit` ask. submitting: also what only the login node can tell."""
    for finding in findings(job, submitting=submitting):
        if finding.error is not None:
            raise finding.error


def findings(job: Job, *, submitting: bool = True) -> list[Finding]:
    checks: list[Callable[[Job], str]] = [_secrets, _model, _time_limit, _mounts]
    here = job.cluster.launcher == "local"
    if here:
        checks += [_node_python, _python, _aiperf, _control_plane, _port, _interface, _gpus]
    elif job.cluster.models_visible:
        checks += [_python, _aiperf]
    if here or submitting:
        checks += [_results, _disk]
    if submitting and not here:
        checks.append(_slurm)
    if _python in checks:
        checks.append(_build)
    out = []
    for check in checks:
        name = check.__name__.strip("_").replace("_", " ")
        try:
            out.append(Finding(name, check(job), None))
        except LaunchError as e:
            out.append(Finding(name, e.what, e))
    return out


def _secrets(job: Job) -> str:
    """Both files are copied into every bundle and archive: here their comments too. Values were looked at when they were read."""
    redactor = nosecrets.redactor()
    for source in (job.recipe.source, job.cluster.source):
        places = [(Where(source.path, n), line) for n, line in enumerate(source.path.read_text(encoding="utf-8").splitlines(), 1)]
        for where, text in places:
            if redactor.text(text) != text:
                raise nosecrets.refusal(where)
    return "none found"


def _model(job: Job) -> str:
    path = Path(job.paths.model)
    if not job.cluster.models_visible:
        return f"{path} (not visible here)"
    if not path.is_dir():
        key = "models" if job.recipe.model.id in job.cluster.models else None
        where = job.cluster.source.where(("models", job.recipe.model.id)) if key else job.recipe.source.where("model.id")
        raise RecipeError(
            f"the model folder {path} does not exist",
            where=where,
            rule="a folder with config.json, tokenizer and weights",
            hint=f"add {job.recipe.model.id} to models of {job.cluster.source.path}, or set models_visible: false there",
        )
    if not any((path / name).is_file() for name in ("tokenizer.json", "tokenizer.model", "tokenizer_config.json")):
        raise RecipeError(f"{path} has no tokenizer", where=job.recipe.source.where("model.id"), rule="the load tool needs the tokenizer")
    return str(path)


def _time_limit(job: Job) -> str:
    limit = job.cluster.slurm.max_time_minutes if job.cluster.slurm and job.cluster.launcher == "slurm" else 0
    if limit and job.recipe.time_limit_minutes > limit:
        raise RecipeError(
            f"time_limit_minutes {job.recipe.time_limit_minutes}",
            where=job.recipe.source.where("time_limit_minutes"),
            rule=f"at most {limit} ({job.cluster.source.where('slurm.max_time_minutes')})",
            hint="fewer or shorter load phases",
        )
    return f"{job.recipe.time_limit_minutes} minutes"


def _mounts(job: Job) -> str:
    return mounts.check(job)


def _executable(path: str, job: Job, key: str, hint: str) -> str:
    found = shutil.which(path) or shutil.which(path, path="/usr/sbin:/sbin")
    if found is None:
        raise RecipeError(f"{path} cannot be started", where=job.cluster.source.where(key), rule="an executable file", hint=hint)
    return found


def _node_python(job: Job) -> str:
    return _executable(job.cluster.node_python, job, "node_python", "Python 3.10 or newer of this machine")


def _python(job: Job) -> str:
    if job.environment.image:
        return job.environment.image
    at = job.cluster.environments.index(job.environment)
    where = job.cluster.source.where(("environments", at, "python"))
    if shutil.which(job.paths.python) is None:
        raise RecipeError(
            f"the engine environment {job.paths.python} does not exist",
            where=where,
            rule="Python of an engine environment",
            hint="`make setup` for .envs/engine-*, benchmarks/gpu/ for .envs/gpu-*, else correct the path",
        )
    return job.paths.python


def _build(job: Job) -> str:
    """Versions and patched files of the engine environment, as every node will prove them again at run time."""
    folder = Path(job.paths.python).parent.parent
    if job.environment.image or not (folder / "lib").is_dir():
        return "seen on the nodes only"
    packages = sorted(folder.glob("lib/python3.*/site-packages"))
    found = {"role": "agg", "versions": distribution_versions(packages), "file_sha256": file_hashes(job.spec.proof.file_sha256, packages)}
    faults = build_faults(BuildFacts({"the environment": found}, job.spec.proof))
    if faults:
        raise RecipeError(
            f"{folder} is not what the recipe names: {'; '.join(faults[:3])}",
            where=job.recipe.source.where("versions"),
            rule="versions and patches of the recipe are those of the environment",
            hint=f"python launch.py patch status --python {job.paths.python}",
        )
    return f"{len(job.spec.proof.file_sha256)} files and {len(job.spec.proof.versions)} versions as the recipe names them"


def _aiperf(job: Job) -> str:
    return _executable(job.paths.aiperf, job, "aiperf", "make setup installs it") if job.recipe.load else "not needed"


def _control_plane(job: Job) -> str:
    return ", ".join(
        _executable(path, job, key, "make setup installs etcd and nats-server")
        for key, path in (("etcd", job.paths.etcd), ("nats", job.paths.nats))
    )


def _port(job: Job) -> str:
    port = job.cluster.network.http_port
    if not port:
        return "a free port is chosen"
    try:
        with socket.socket() as s:
            s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            s.bind(("", port))
        with contextlib.closing(Ports("check")) as ports:
            ports.take(port, "http_port")
    except (OSError, PortError) as e:
        raise SubmitError(
            f"port {port} cannot be used: {e.strerror if isinstance(e, OSError) else e}",
            where=job.cluster.source.where("network.http_port"),
            rule="a port that nobody listens on",
            hint="http_port: 0 chooses a free one",
        ) from None
    return str(port)


def _interface(job: Job) -> str:
    name = job.cluster.network.interface
    if not name:
        return "loopback"
    try:
        return f"{name} {interface_address(name)}"
    except OSError as e:
        have = [found for _, found in socket.if_nameindex()]
        raise SubmitError(
            f"the network interface {name} has no IPv4 address here: {e.strerror}",
            where=job.cluster.source.where("network.interface"),
            rule=f"an interface of this machine: {', '.join(have)}",
            hint=nearest(name, have) or "leave it empty for loopback",
        ) from None


def gpus_seen() -> list[str]:
    """One line for each GPU of this machine; NoGpu says why there is none."""
    from pdlaunch.node.gpus import run_smi

    return run_smi(["nvidia-smi", "--query-gpu=index,name,memory.used", "--format=csv,noheader"]).strip().splitlines()


def _gpus(job: Job) -> str:
    wanted = sum(node.gpus for node in job.spec.nodes)
    if job.cluster.device == "cpu" or not wanted:
        return "not needed"
    from pdlaunch.node.gpus import NoGpu

    try:
        rows = gpus_seen()
    except NoGpu as e:
        raise SubmitError(str(e), where=job.cluster.source.where("device"), rule="device: cuda needs GPUs of this machine") from None
    highest = max((gpu for engine in job.spec.engines for rank in engine.ranks for gpu in rank.gpus), default=-1)
    if len(rows) <= highest:
        raise SubmitError(
            f"the engines are placed on GPUs 0 to {highest}, and this machine has {len(rows)}",
            where=job.cluster.source.where("nodes.gpus_per_node"),
            rule="gpus_per_node is at most the number of GPUs",
            hint=f"--set cluster.nodes.gpus_per_node={len(rows)}",
        )
    return "; ".join(rows)


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path


def folder_fault(path: Path) -> str:
    """Why files cannot be written below path, which need not exist; or ''. By making a folder: /proc and some network file systems
    grant access and then refuse it."""
    if path.exists() and not path.is_dir():
        return f"{path} is not a folder"
    nearest = _existing(path)
    try:
        with tempfile.TemporaryDirectory(prefix=".pdlaunch-", dir=nearest):
            return ""
    except OSError as e:
        return f"{path} cannot be {'written' if nearest == path else 'made'}: no folder can be made in {nearest}: {e.strerror or e}"


def _results(job: Job) -> str:
    path = Path(job.spec.run.results_dir)
    if fault := folder_fault(path):
        raise SubmitError(
            fault,
            where=job.cluster.source.where("results_dir"),
            rule="a folder that every node can write",
            hint="set results_dir to such a folder",
        )
    return str(path)


def _disk(job: Job) -> str:
    path = Path(job.spec.run.results_dir)
    free_gib = shutil.disk_usage(_existing(path)).free / 2**30
    if free_gib < job.cluster.min_free_gib:
        raise SubmitError(
            f"{free_gib:.2f} GiB free at {path}",
            where=job.cluster.source.where("min_free_gib"),
            rule=f"at least {job.cluster.min_free_gib:g} GiB",
            hint="remove old runs, or set results_dir to another disk",
        )
    return f"{free_gib:.1f} GiB free"


def _slurm(job: Job) -> str:
    from pdlaunch.slurm import require_slurm

    require_slurm()
    return str(shutil.which("sbatch"))
