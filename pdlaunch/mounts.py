"""What a step inside the site's container sees: the node and the step use the same absolute paths, so these must be mounted as they are."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from pdlaunch.errors import RecipeError
from pdlaunch.job import Job

_OPTION = "--container-mounts="


@dataclass(frozen=True)
class Mount:
    """SRC:DST[:FLAG+FLAG] of pyxis; SRC alone is mounted where it is."""

    source: PurePosixPath
    target: PurePosixPath
    flags: frozenset[str]


def parse(words: tuple[str, ...]) -> list[Mount]:
    found = []
    for word in (one for entry in words for one in entry.split(",") if one):
        source, _, rest = word.partition(":")
        target, _, flags = rest.partition(":")
        found.append(Mount(PurePosixPath(source), PurePosixPath(target or source), frozenset(flags.split("+")) - {""}))
    return found


def fault(mounts: list[Mount], path: str, *, written: bool = False) -> str:
    """Why this path of the node is not the same folder in the container, or cannot be written there; '' when it is."""
    at = PurePosixPath(os.path.normpath(path))
    above = [m for m in mounts if at.is_relative_to(m.target)]
    if not above:
        return f"{path} is below none of the mounted folders"
    mount = max(above, key=lambda m: len(m.target.parts))
    real = mount.source / at.relative_to(mount.target)
    if real != at:
        return f"{path} is {real} of the node when it is seen from the container"
    return f"{path} is mounted read-only" if written and "ro" in mount.flags else ""


def of_job(job: Job) -> list[Mount] | None:
    """None: no step runs in a container."""
    container = job.cluster.container
    if job.cluster.launcher == "local" or container is None or not job.environment.image:
        return None
    return parse((*container.mounts, *(a.removeprefix(_OPTION) for a in container.args if a.startswith(_OPTION))))


def check(job: Job) -> str:
    """RecipeError when engines in the container would not find the model, or could not write where the run is archived.

    aiperf runs on the node itself, and what container.control_plane takes from the image is not known here.
    """
    mounts = of_job(job)
    if mounts is None:
        return "no container"
    model = job.recipe.model.id
    key = ("models", model)
    places = [("the model", job.paths.model, key if model in job.cluster.models else "models", False)]
    places.append(("results_dir", job.spec.run.results_dir, "results_dir", True))
    for what, path, where, written in places:
        if why := fault(mounts, path, written=written):
            raise _error(job, f"{what}: {why}", where)
    return ", ".join(sorted({str(m.target) for m in mounts})) + ": model and results are below them"


def check_bundle(job: Job, folder: Path) -> None:
    """RecipeError when engines in the container would not find the bundle, whose code they run. Links are followed, as the node does."""
    mounts = of_job(job)
    if mounts is not None and (why := fault(mounts, str(folder.resolve()))):
        raise _error(job, f"the bundle: {why}", "container.mounts", "; or another --out")


def _error(job: Job, what: str, where: str | tuple[str, ...], more: str = "") -> RecipeError:
    container = job.cluster.container
    mounts = ", ".join(container.mounts) if container else ""
    return RecipeError(
        what,
        where=job.cluster.source.where(where),
        rule=f"below a folder that container.mounts has at the same path on both sides: {mounts or 'none'}",
        hint=f"add SRC:SRC to container.mounts of {job.cluster.source.path}{more}",
    )
