"""Options of the verb plan; launch.py loads this module only when it is called."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import click

from pdlaunch import cluster as clusters
from pdlaunch import job, modelcheck
from pdlaunch import recipe as recipes
from pdlaunch.errors import EXIT_VERDICT, PlanError
from pdlaunch.planner import command
from pdlaunch.planner.layers import Model
from pdlaunch.planner.pair import known_patches
from pdlaunch.planner.roleplan import Plan
from pdlaunch.planner.shape import MemoryFacts, RoleShape
from pdlaunch.yamlfile import LARGEST

ROOT = Path(__file__).resolve().parent.parent
FOLDER = click.Path(path_type=Path)


class _Number(click.FloatRange):
    """A range that neither nan nor inf is in: click's own comparisons let nan pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        number = super().convert(value, param, ctx)
        if not math.isfinite(number):
            self.fail(f"{number:g} is no finite number.", param, ctx)
        return number


COUNT = click.IntRange(1, LARGEST)
GIB = _Number(min=0)
_MEMORY = ("weights_gib", "non_torch_gib", "activation_gib", "graph_estimate_gib", "graph_actual_gib", "context_gib")
_SHAPE = (
    "pipeline_parallel",
    "data_parallel",
    "expert_parallel",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "kv_cache_dtype",
    "mamba_ssm_cache_dtype",
    "speculative_tokens",
    "backend",
    "gpu_memory_utilization",
)
"""Options that are fields of RoleShape under the same name."""


@click.command()
@click.option("--recipe", help="Name in recipes/, or a path.")
@click.option("--cluster", default="local", show_default=True, help="Name in clusters/, or a path.")
@click.option(
    "--set", "settings", multiple=True, metavar="KEY=VALUE", help="Override a key of the recipe, or of the cluster (cluster.KEY)."
)
@click.option("--config", type=FOLDER, help="A config.json or model folder instead of a recipe.")
@click.option("--tp", type=COUNT, help="With --config: tensor parallel of prefill, or of the one role.")
@click.option("--decode-tp", type=COUNT, help="With --config: tensor parallel of decode.")
@click.option("--pp", "pipeline_parallel", type=COUNT, help="With --config.")
@click.option("--dp", "data_parallel", type=COUNT, help="With --config.")
@click.option("--ep", "expert_parallel", is_flag=True, default=None, help="With --config: expert parallelism.")
@click.option("--max-model-len", type=COUNT)
@click.option("--max-num-batched-tokens", type=COUNT)
@click.option("--max-num-seqs", type=COUNT)
@click.option("--block-size", type=COUNT)
@click.option("--kv-cache-dtype")
@click.option("--ssm-dtype", "mamba_ssm_cache_dtype")
@click.option("--mtp", "speculative_tokens", type=click.IntRange(min=0), help="Speculative tokens.")
@click.option("--backend", help="Attention backend.")
@click.option("--no-prefix-caching", is_flag=True)
@click.option("--no-hybrid-manager", is_flag=True)
@click.option("--gpu", help="Name of a GPU, for its memory.")
@click.option("--gpu-memory-gib", type=_Number(min=0, min_open=True), help="Memory of one GPU as torch reports it.")
@click.option("--gpu-memory-utilization", type=_Number(min=0, min_open=True, max=1))
@click.option("--weights-gib", type=GIB, help="Weights of one rank.")
@click.option("--non-torch-gib", type=GIB)
@click.option("--activation-gib", type=GIB, help="Peak activation of the profiling run.")
@click.option("--graph-estimate-gib", type=GIB, help="What vLLM reserves for CUDA graphs.")
@click.option("--graph-actual-gib", type=GIB)
@click.option("--context-gib", type=GIB)
@click.option("--tokens", type=COUNT, help="Length of the priced request, prompt plus output; default: max_model_len.")
@click.option("--concurrency", type=COUNT, help="Requests in flight over the deployment.")
@click.option("--assume-gqa", is_flag=True, help="Price an unknown architecture as plain attention.")
@click.option("--search", type=COUNT, metavar="GPUS", help="Topologies within this many GPUs instead of one plan.")
@click.option("--by", type=click.Choice(["requests_per_gpu", "concurrency"]), default="requests_per_gpu", show_default=True)
@click.option("--run", help="Predicted against measured: an archived run (a folder, <recipe>/<name>, or last) or a worker log.")
@click.option("--results", type=FOLDER, default=ROOT / "results", help="With --run: folder of archived runs.")
@click.option("--svg", type=FOLDER, help="Write the picture.")
@click.option("--patch", type=FOLDER, help="Write the values that the plan proposes, as keys of a recipe: --set @FILE applies them.")
@click.option("--format", "form", type=click.Choice(["table", "json"]), default="table", show_default=True)
@click.pass_context
def plan(context: click.Context, /, **options: Any) -> None:
    """Heads per rank, KV price, block sizes, capacity per role, whether the pair can hand its cache over."""
    for name in ("svg", "patch"):
        if options[name] is not None and (options[name].exists() or options[name].is_symlink()):
            raise PlanError(f"--{name} {options[name]} is there already", rule="a new file", hint="another name, or remove it")
    result, findings = _result(options)
    if options["svg"] is not None:
        if not isinstance(result, Plan):
            raise PlanError("--svg of something that is no plan", rule="a recipe, or --config with --tp")
        options["svg"].write_text(command.picture(result), encoding="utf-8")
    if options["patch"] is not None:
        if not isinstance(result, Plan) or result.emitted is None:
            raise PlanError("--patch of something that is no plan", rule="a recipe, or --config with --tp")
        options["patch"].write_text(result.emitted.yaml(), encoding="utf-8")
    if options["form"] == "json":
        click.echo(json.dumps(command.to_json(result), indent=1, ensure_ascii=False))
    else:
        from rich.console import Console

        command.render(result, Console())
    context.exit(EXIT_VERDICT if any(f.severity == "error" for f in findings) else 0)


def _result(options: dict[str, Any]) -> tuple[command.Result, list[Any]]:
    if options["run"] is not None:
        return command.measured(_run_path(options["run"], options["results"]), options["config"]), []
    model, roles, patches = _of_config(options) if options["config"] is not None else _of_recipe(options)
    memory = options["gpu_memory_gib"] or (command.gpu_memory(options["gpu"]) if options["gpu"] else None)
    facts = MemoryFacts(
        **{
            ("peak_activation_gib" if n == "activation_gib" else "cuda_context_gib" if n == "context_gib" else n): options[n]
            for n in _MEMORY
        }
    )
    roles = {role: command.with_memory(shape, memory, facts) for role, shape in roles.items()}
    if options["search"] is not None:
        found = command.find(model, roles, options["search"], tokens=options["tokens"], by=options["by"], patches=patches)
        return found, []
    planned = command.plan(model, roles, tokens=options["tokens"], patches=patches, concurrency=options["concurrency"])
    return planned, planned.findings


def _run_path(name: str, results: Path) -> Path:
    """A log file or a folder that holds run/, as it is; every other name is found as `verify` finds it, and is refused when it changed
    since it was archived. At the end of a job plan.json is made before the manifest."""
    from pdlaunch import archive, runread

    direct = Path(name)
    if direct.is_file() or (direct / "run" / "spec.json").is_file():
        return direct
    return runread.unchanged(archive.find(name, results)).run


def _of_recipe(options: dict[str, Any]) -> tuple[Model, dict[str, RoleShape], frozenset[str]]:
    if options["recipe"] is None:
        raise click.UsageError("give --recipe, --config or --run")
    settings = options["settings"]
    recipe = recipes.load(
        recipes.find(options["recipe"], ROOT / "recipes", "recipe"), tuple(s for s in settings if not s.startswith("cluster."))
    )
    if recipe.backend == "mocker":
        raise PlanError(f"{recipe.name} runs the mocker", where=recipe.source.where("backend"), rule="the mocker has no cache to price")
    of_cluster = tuple(s.removeprefix("cluster.") for s in settings if s.startswith("cluster."))
    cluster = clusters.load(recipes.find(options["cluster"], ROOT / "clusters", "cluster"), of_cluster)
    model = command.model_of(job.config_path(recipe, cluster, ROOT), assume_gqa=options["assume_gqa"])
    roles: dict[str, RoleShape] = {
        role: modelcheck.role_shape(recipe, role, cluster) for role in recipe.engines.present() if role != "control"
    }
    for finding in modelcheck.unpriced_backends(recipe, cluster):
        click.echo(f"warning: {finding.message}", err=True)
    return model, roles, known_patches(recipe.patches)


def _of_config(options: dict[str, Any]) -> tuple[Model, dict[str, RoleShape], frozenset[str]]:
    config = options["config"] / "config.json" if options["config"].is_dir() else options["config"]
    if options["recipe"] is not None:
        raise click.UsageError("give --recipe or --config, one of them")
    given = {name: options[name] for name in _SHAPE if options[name] is not None}
    shape = RoleShape(
        tensor_parallel=options["tp"] or 1,
        prefix_caching=not options["no_prefix_caching"],
        hybrid_manager=not options["no_hybrid_manager"],
        **given,
    )
    model = command.model_of(config, assume_gqa=options["assume_gqa"])
    if options["decode_tp"] is None:
        return model, {"agg": shape}, frozenset()
    return model, {"prefill": shape, "decode": shape.with_changes(tensor_parallel=options["decode_tp"])}, frozenset()
