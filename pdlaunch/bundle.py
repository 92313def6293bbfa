"""Job -> bundle folder, complete or absent. `sbatch BUNDLE/job.sbatch` needs nothing of this repository."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import re
import shlex
import shutil
import stat
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pdlaunch.errors import BundleError
from pdlaunch.job import Job
from pdlaunch.node.contracts import write_json
from pdlaunch.node.spec import NodeSlot, to_json
from pdlaunch.recipe import Recipe

SCHEMA_VERSION = 1
HASHED_MODEL_FILE_BYTES = 64 * 1024 * 1024
"""Larger model files are listed with their size only: hashing tens of gigabytes would make submitting take minutes."""
TERM_BEFORE_END_S = 120
"""The batch step gets TERM so long before the time limit, or a quarter of the limit before, to archive the run as INCOMPLETE."""
_UNITS_MIB = {"M": 1, "G": 1024, "T": 1024 * 1024}


def render(job: Job, out: Path) -> Path:
    """Write the bundle to `out`, which must not exist; returns its absolute path. BundleError when it exists or cannot be written."""
    out = Path(os.path.abspath(out))  # noqa: PTH100 - links in the path are kept
    if out.exists() or out.is_symlink():
        raise BundleError(f"{out} is there already", rule="a bundle is written once", hint="give another --out, or remove it")
    temporary = out.with_name(f".{out.name}.{os.getpid()}.tmp")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        temporary.mkdir()
        _write(job, temporary, out)
        temporary.rename(out)
    except OSError as e:
        raise BundleError(
            f"the bundle cannot be written to {out}: {e.strerror or e} ({e.filename})", rule="a folder that can be written, with free space"
        ) from e
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return out


def _write(job: Job, folder: Path, final: Path) -> None:
    write_json(folder / "spec.json", to_json(job.spec))
    shutil.copyfile(job.recipe.source.path, folder / "recipe.yaml")
    shutil.copyfile(job.cluster.source.path, folder / "cluster.yaml")
    _copy_node(job.context.repository / "pdlaunch" / "node", folder / "node")
    for name, text in scripts(job, final).items():
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(stat.S_IRWXU | stat.S_IRGRP | stat.S_IXGRP | stat.S_IROTH | stat.S_IXOTH)
    write_json(folder / "manifest.json", manifest(job, folder))


def _copy_node(source: Path, target: Path) -> None:
    target.mkdir()
    for path in sorted(source.rglob("*")):
        if "__pycache__" in path.parts or not path.is_file():
            continue
        copy = target / path.relative_to(source)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)


def scripts(job: Job, final: Path) -> dict[str, str]:
    """job.sbatch and submit.sh; a local run has neither."""
    if job.cluster.launcher == "local":
        return {}
    import jinja2

    loader = jinja2.FileSystemLoader(job.context.repository / "slurm")
    env = jinja2.Environment(
        loader=loader, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True, autoescape=False
    )
    env.filters["shellquote"] = shlex.quote
    env.filters["comment"] = lambda text: re.sub(r"[\r\n]+", " ", str(text))
    values = {
        "recipe": job.recipe.name,
        "cluster": job.cluster.name,
        "repeat_command": job.spec.run.repeat_command,
        "bundle_dir": str(final),
        "node_python": job.cluster.node_python,
        "components": [_directives(job, c, final) for c in job.placement.components],
    }
    return {name: env.get_template(f"{name}.j2").render(values) for name in ("job.sbatch", "submit.sh")}


def job_name(recipe: Recipe) -> str:
    return f"pdlaunch-{recipe.name}"


def _directives(job: Job, nodes: tuple[NodeSlot, ...], final: Path) -> list[str]:
    """#SBATCH options of one component. Slurm does not hand most options from one component to the next, so each has all of them."""
    slurm = job.cluster.slurm
    assert slurm is not None
    component = nodes[0].component
    out = [f"--job-name={job_name(job.recipe)}"]
    if component == 0:
        out += [
            f"--output={_directive_value(str(final).replace('%', '%%') + '/slurm-%j.out')}",
            "--open-mode=append",
            f"--signal=B:TERM@{min(TERM_BEFORE_END_S, job.recipe.time_limit_minutes * 15)}",
            "--no-requeue",
        ]
    out += [
        f"--{option}={_directive_value(value)}"
        for option in ("partition", "account", "qos", "reservation", "constraint", "comment")
        if (value := getattr(slurm, option))
    ]
    out += [f"--time={job.recipe.time_limit_minutes}", f"--nodes={len(nodes)}", "--ntasks-per-node=1"]
    if nodes[0].gpus and slurm.gres:
        out.append(f"--gres={slurm.gres}:{nodes[0].gpus}")
    first = 1 if component == 0 else 0
    offset = sum(len(c) for c in job.placement.components[:component])
    ranks = max(sum(1 for e in job.placement.engines for r in e.ranks if r.node == offset + i) for i in range(len(nodes)))
    if slurm.cpus_per_engine_rank:
        out.append(f"--cpus-per-task={ranks * slurm.cpus_per_engine_rank + first * slurm.service_cpus}")
    if slurm.mem_per_engine_rank:
        out.append(f"--mem={ranks * _mib(slurm.mem_per_engine_rank) + first * _mib(slurm.service_mem)}M")
    if slurm.exclusive:
        out.append("--exclusive")
    return out + list(slurm.directives)


def _mib(text: str) -> int:
    return int(text[:-1]) * _UNITS_MIB[text[-1]]


def _directive_value(text: str) -> str:
    """Quoted as sbatch reads #SBATCH lines: double quotes, backslash escapes."""
    if re.fullmatch(r"[A-Za-z0-9_./:,@%+=&|*-]+", text):
        return text
    return '"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"'


def sha256_of(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb") as f:
        while block := f.read(1 << 20):
            digest.update(block)
    return digest.hexdigest()


def manifest(job: Job, folder: Path) -> dict[str, Any]:
    """Hashes of every file of the bundle, the patches and the model, the launcher's versions, and the command that repeats the run."""
    files = {str(p.relative_to(folder)): sha256_of(p) for p in sorted(folder.rglob("*")) if p.is_file()}
    run = job.spec.run
    return {
        "schema": SCHEMA_VERSION,
        "recipe": run.recipe,
        "cluster": run.cluster,
        "created_utc": run.created_utc,
        "git_commit": run.git_commit,
        "git_dirty_sha256": run.git_dirty_sha256,
        "repeat_command": run.repeat_command,
        "overrides": run.overrides,
        "image": job.environment.image,
        "versions_asked": vars(job.recipe.versions),
        "launcher": {"python": platform.python_version(), **{name: version(name) for name in ("click", "jinja2", "pyyaml")}},
        "patches": _patch_hashes(job),
        "model": model_files(job),
        "files": files,
    }


def require_whole(folder: Path) -> None:
    """BundleError unless every file is as it was rendered: manifest.json is archived with the run, and must not say what did not run."""
    try:
        files = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))["files"]
        wrong = [
            f"{name} is {'changed' if (folder / name).is_file() else 'missing'}"
            for name, sha256 in files.items()
            if not (folder / name).is_file() or sha256_of(folder / name) != sha256
        ]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        wrong = [f"manifest.json cannot be read: {e!r}"]
    if wrong:
        raise BundleError(
            f"{folder} is not as it was rendered: {'; '.join(wrong[:5])}{' ...' if len(wrong) > 5 else ''}",
            rule="a bundle is submitted as it was rendered, and its manifest is archived with the run",
            hint="change the recipe or the cluster file and render it again",
        )


def _patch_hashes(job: Job) -> dict[str, str]:
    folder = job.context.repository / "patches"
    return {name: sha256_of(folder / f"{name}.patch") for name in job.recipe.patches if (folder / f"{name}.patch").is_file()}


def model_files(job: Job) -> dict[str, Any]:
    """Files of the model folder: sha256, or only the size of the big ones; empty when the folder is not visible here."""
    folder = Path(job.paths.model)
    if not job.cluster.models_visible or not folder.is_dir():
        return {}
    out: dict[str, Any] = {}
    for path in sorted(p for p in folder.iterdir() if p.is_file()):
        size = path.stat().st_size
        out[path.name] = {"bytes": size} if size > HASHED_MODEL_FILE_BYTES else {"bytes": size, "sha256": sha256_of(path)}
    return out
