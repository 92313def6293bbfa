"""Recipe + cluster -> Spec: resolve paths, place, build command lines, state what must be proved. Writes nothing."""

from __future__ import annotations

import shlex
from dataclasses import dataclass
from pathlib import Path

from pdlaunch import engine, modelcheck
from pdlaunch.cluster import Cluster, Environment, environment_for
from pdlaunch.errors import PatchError, RecipeError
from pdlaunch.flags import flag_list
from pdlaunch.node.spec import (
    SCHEMA_VERSION,
    AgreementSpec,
    Deadlines,
    LoadPhase,
    LoadSpec,
    ModelSpec,
    Proof,
    RecallSpec,
    RunInfo,
    SlurmSpec,
    Spec,
)
from pdlaunch.patching import expected_hashes
from pdlaunch.patchseries import Series, load_series
from pdlaunch.placement import Placement, place
from pdlaunch.planner.pair import PER_GROUP_PATCH, PER_REGION_PATCH
from pdlaunch.planner.rules import Finding
from pdlaunch.recipe import Recipe
from pdlaunch.recipe_rules import check_nixl_delay
from pdlaunch.yamlfile import nearest

LOG_PATTERNS = {
    PER_REGION_PATCH: {
        "active_line": r"NIXL per-region KV heads active: rank=(?P<rank>\d+/\d+)",
        "plan_line": r"NIXL per-region KV heads plan: engine=(?P<engine>\S+) rank=(?P<rank>\d+/\d+)",
    },
    PER_GROUP_PATCH: {
        "active_line": r"NIXL per-group KV pages active: rank=(?P<rank>\d+/\d+)",
        "plan_line": r"NIXL per-group KV pages plan: engine=(?P<engine>\S+) rank=(?P<rank>\d+/\d+)",
    },
}
"""Patch -> lines that its code logs (ACTIVE_LOG and PLAN_LOG of region_heads.py, group_pages.py), counted as proof that it served; of
stacked patches the topmost one that a recipe lists."""
DISTRIBUTIONS = {"dynamo": "ai-dynamo", "vllm": "vllm", "nixl": "nixl"}
_KEY_OF = {"vllm": "vllm", "nixl-cu12": "nixl"}
"""Distribution that patches of series.yaml belong to -> key of the recipe's versions."""


@dataclass(frozen=True)
class Context:
    """What does not come from the two files: where the repository is, when and from which commit this is rendered."""

    root: Path
    created_utc: str
    git_commit: str = ""
    git_dirty_sha256: str = ""
    run_locally: bool = False
    """--local: the bundle of a Slurm cluster is run on this machine."""
    files: Path | None = None
    """Where the repository's own files are read when that is not `root`, which is what rendered paths start with (golden bundles)."""

    @property
    def repository(self) -> Path:
        return self.files or self.root


@dataclass(frozen=True)
class Job:
    recipe: Recipe
    cluster: Cluster
    environment: Environment
    placement: Placement
    paths: engine.Paths
    spec: Spec
    context: Context
    warnings: tuple[Finding, ...]
    notes: tuple[Finding, ...]


def absolute(root: Path, path: str) -> str:
    """A path of a cluster file: relative ones start at the repository root; links are kept, a virtual environment's python is one."""
    return path if path.startswith("/") else str(root / path)


def _program(root: Path, name: str) -> str:
    """A name without a slash is looked up in PATH on the node."""
    return absolute(root, name) if "/" in name else name


def model_path(recipe: Recipe, cluster: Cluster, root: Path) -> str:
    return absolute(root, cluster.models.get(recipe.model.id, recipe.model.id))


def config_path(recipe: Recipe, cluster: Cluster, root: Path) -> Path:
    """The config.json that plans are made from."""
    if recipe.model.config:
        return Path(absolute(root, recipe.model.config))
    return Path(model_path(recipe, cluster, root)) / "config.json"


def build(recipe: Recipe, cluster: Cluster, context: Context) -> Job:
    """Everything that is derived from the two files; a LaunchError child says what does not fit."""
    engine.check(recipe, cluster)
    if recipe.backend == "mocker":
        environment = min(cluster.environments, key=lambda e: len(e.patches), default=None)
        if environment is None:
            raise RecipeError("no environments", where=cluster.source.where("environments"), rule="at least one")
    else:
        series = load_series(context.repository / "patches" / "series.yaml")
        _check_patches(recipe, series)
        check_nixl_delay(recipe)
        environment = environment_for(cluster, recipe.patches, recipe.source)
    checked = modelcheck.check(recipe, cluster, config_path(recipe, cluster, context.repository))
    placement = place(recipe, cluster)
    python = cluster.container.python if environment.image and cluster.container else absolute(context.root, environment.python)
    paths = engine.Paths(
        python=python,
        model=model_path(recipe, cluster, context.root),
        aiperf=absolute(context.root, cluster.aiperf),
        etcd=_program(context.root, cluster.etcd),
        nats=_program(context.root, cluster.nats),
    )
    spec = Spec(
        schema=SCHEMA_VERSION,
        run=_run(recipe, cluster, context),
        model=ModelSpec(recipe.model.id, paths.model, recipe.model.served_name),
        nodes=placement.nodes,
        services=engine.services(recipe, cluster, paths),
        engines=engine.engines(recipe, cluster, placement, paths),
        slurm=_slurm(cluster, environment),
        deadlines=Deadlines(**vars(recipe.deadlines), load_phase_s=max((p.timeout_s for p in recipe.load), default=3600.0)),
        recall=None if recipe.recall is None else RecallSpec(**vars(recipe.recall)),
        agreement=None if recipe.agreement is None else AgreementSpec(**vars(recipe.agreement)),
        behaviour=recipe.behaviour,
        load=LoadSpec(paths.aiperf, paths.model, tuple(LoadPhase(**vars(p)) for p in recipe.load)) if recipe.load else None,
        proof=_proof(recipe, checked, context.repository),
        page_smoke=checked.page_smoke,
        network_interface=cluster.network.interface,
        http_port=cluster.network.http_port,
        gpu_telemetry_url=cluster.gpu_telemetry_url,
    )
    return Job(recipe, cluster, environment, placement, paths, spec, context, (*_other_rules(recipe), *checked.warnings), checked.notes)


def _check_patches(recipe: Recipe, series: Series) -> None:
    """RecipeError on a patch that series.yaml does not know, or whose package the recipe serves in another version."""
    known = {patch.name: patch for patch in series.patches}
    serving = recipe_versions(recipe)
    for i, name in enumerate(recipe.patches):
        where = recipe.source.where(("patches", i))
        if name not in known:
            raise RecipeError(
                f"unknown patch {name!r}",
                where=where,
                rule=f"patches of patches/series.yaml: {', '.join(known)}",
                hint=nearest(name, known),
            )
        patch = known[name]
        package = next((d for d in patch.distributions if d in serving), None)
        if package is None or serving[package] == patch.version:
            continue
        other = name.replace(patch.version, serving[package])
        key = f"versions.{_KEY_OF[package]}"
        raise RecipeError(
            f"{name} is for {_KEY_OF[package]} {patch.version}, and {key} is {serving[package]}",
            where=where,
            rule="a patch and the version of its package agree",
            hint=f"{key}: {patch.version}" + (f"; {other} is the patch for {serving[package]}" if other in known else ""),
        )


def recipe_versions(recipe: Recipe) -> dict[str, str]:
    """Distribution, as series.yaml names it -> version that the recipe serves, without a local part."""
    return {distribution: getattr(recipe.versions, key).partition("+")[0] for distribution, key in _KEY_OF.items()}


def _other_rules(recipe: Recipe) -> list[Finding]:
    """A warning for each version whose flags and rules are not those that everything here is checked against."""
    known = flag_list("dynamo.vllm").versions
    found = []
    for key, distribution in (("vllm", "vllm"), ("dynamo", "ai-dynamo")):
        version = getattr(recipe.versions, key).partition("+")[0]
        if version != known[distribution]:
            message = f"versions.{key} is {version}: flags, shapes and transfers are checked by the rules of {known[distribution]}"
            found.append(Finding("warning", "other-version", message, f"versions.{key}: {known[distribution]}"))
    return found


def _run(recipe: Recipe, cluster: Cluster, context: Context) -> RunInfo:
    return RunInfo(
        recipe=recipe.name,
        cluster=cluster.name,
        launcher=cluster.launcher,
        device=cluster.device,
        results_dir=absolute(context.root, cluster.results_dir),
        created_utc=context.created_utc,
        repeat_command=repeat_command(recipe, cluster, context),
        git_commit=context.git_commit,
        git_dirty_sha256=context.git_dirty_sha256,
        overrides=_overrides(recipe, cluster),
        tool_argv=(absolute(context.root, ".envs/launcher/bin/python"), absolute(context.root, "launch.py")),
    )


def repeat_command(recipe: Recipe, cluster: Cluster, context: Context) -> str:
    """The command that repeats the run, to be typed in a checkout of git_commit."""
    words = [
        "python",
        "launch.py",
        "--recipe",
        _name_or_path(recipe.source.path, context.repository / "recipes"),
        "--cluster",
        _name_or_path(cluster.source.path, context.repository / "clusters"),
    ]
    if context.run_locally:
        words.append("--local")
    for key, value in _overrides(recipe, cluster).items():
        words += ["--set", f"{key}={value}"]
    return shlex.join(words)


def _overrides(recipe: Recipe, cluster: Cluster) -> dict[str, str]:
    """Dotted key as it is written after --set -> value; keys of the cluster file start with cluster."""
    both = [*recipe.source.overrides.items(), *((f"cluster.{key}", value) for key, value in cluster.source.overrides.items())]
    return {key.replace("[", ".").replace("]", ""): value for key, value in both}


def _name_or_path(path: Path, folder: Path) -> str:
    return path.stem if path.parent.resolve() == folder.resolve() else str(path)


def _slurm(cluster: Cluster, environment: Environment) -> SlurmSpec | None:
    slurm = cluster.slurm
    if slurm is None or cluster.launcher == "local":
        return None
    container: tuple[str, ...] = ()
    if environment.image and cluster.container:
        container = (f"--container-image={environment.image}",)
        if cluster.container.mounts:
            container += (f"--container-mounts={','.join(cluster.container.mounts)}",)
        container += cluster.container.args
    return SlurmSpec(
        gres=slurm.gres if cluster.nodes.gpus_per_node else "",
        srun_args=slurm.srun_args,
        container_args=container,
        mem_per_engine_rank=slurm.mem_per_engine_rank,
        cpus_per_engine_rank=slurm.cpus_per_engine_rank,
    )


def _proof(recipe: Recipe, checked: modelcheck.ModelCheck, root: Path) -> Proof:
    mocker = recipe.backend == "mocker"
    versions = {DISTRIBUTIONS[k]: getattr(recipe.versions, k) for k in (("dynamo",) if mocker else DISTRIBUTIONS)}
    return Proof(
        disaggregated=recipe.disaggregated,
        kv_load_failure_policy=engine.KV_LOAD_FAILURE_POLICY if recipe.disaggregated and not mocker else "",
        prediction=checked.prediction,
        mixed_heads=checked.mixed_heads,
        patches=recipe.patches,
        file_sha256={} if mocker else _file_hashes(recipe, root),
        versions=versions,
        log_patterns={name: regex for patch, lines in LOG_PATTERNS.items() if patch in recipe.patches for name, regex in lines.items()},
        text_checked=not mocker,
    )


def _file_hashes(recipe: Recipe, root: Path) -> dict[str, str]:
    """What the patched files, and those that no listed patch may have touched, must hash to where the engines run."""
    series = load_series(root / "patches" / "series.yaml")
    try:
        return expected_hashes(series, recipe.patches, series.serving_versions | recipe_versions(recipe))
    except PatchError as e:
        raise PatchError(e.what, where=recipe.source.where("patches"), rule=e.rule, hint=e.hint) from None
