"""What the verb `plan` calls. Values in, a result object out; then `render`, `to_json` or `picture`.

The verb in four calls:

    model, roles = model_of(config, assume_gqa=...), roles_of(options)          # --config
    roles = {role: laid_over(modelcheck.role_shape(recipe, role, cluster), options) for role in ...}   # --recipe
    result = plan(model, roles, tokens=..., patches=..., concurrency=...)       # or find(...) for --search, measured(...) for --run
    render(result, Console()) or click.echo(json.dumps(to_json(result)))

Options (name of the option -> key in `options`; None means not given):
  --recipe NAME, --cluster NAME, --set K=V    shapes of a recipe's roles, its model config and its patches
  --config PATH                               a HF config.json or model folder instead of a recipe
  --tp N, --decode-tp N                       tp, decode_tp: with --config; one role named "engine" without --decode-tp
  --pp N, --dp N, --ep                        pipeline_parallel, data_parallel, expert_parallel
  --max-model-len, --max-num-batched-tokens, --max-num-seqs, --block-size, --kv-cache-dtype, --dtype,
  --mamba-ssm-cache-dtype, --backend, --speculative-tokens, --gpu-memory-utilization    keys of the same names, with underscores
  --prefix-caching/--no-prefix-caching, --hybrid-manager/--no-hybrid-manager, --async-scheduling/--no-async-scheduling
  --gpu NAME | --gpu-memory-gib X             gpu, gpu_memory_gib: memory of one GPU (names: shape.GPU_MEMORY_GIB)
  --kv-cache-memory-gib X                     kv_cache_memory_gib: bytes for KV, past the ledger
  --weights-gib, --non-torch-gib, --peak-activation-gib, --graph-estimate-gib, --graph-actual-gib, --cuda-context-gib    ledger rows
  --tokens N                                  length of the priced request, prompt plus output; default max_model_len
  --concurrency N                             requests in flight over the deployment
  --assume-gqa                                price an unknown architecture as plain attention
  --search GPUS [--by requests_per_gpu|concurrency]
  --run PATH                                  predicted against measured for an archived run or a worker log
  --patch FILE                                write result.emitted.yaml()
  --svg FILE                                  write picture(result)
  --format table|json
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pdlaunch.errors import PlanError

from .config import load_config
from .families import read_model
from .layers import Model
from .roleplan import Plan, plan_pair
from .shape import GIB, GPU_MEMORY_GIB, RoleShape
from .topology import Candidate, PairCandidate, search, search_pairs

if TYPE_CHECKING:
    from rich.console import Console

    from .runplan import MeasuredEngine


@dataclasses.dataclass(frozen=True)
class Search:
    """Result of a search: candidates of each role, and pairs when there are two roles."""

    model: Model
    gpus: int
    tokens: int
    roles: dict[str, list[Candidate]]
    pairs: list[PairCandidate]


@dataclasses.dataclass(frozen=True)
class Run:
    """Result of reading a run or a log."""

    path: Path
    engines: list[MeasuredEngine]


Result = Plan | Search | Run


def model_of(config: Path, *, assume_gqa: bool = False) -> Model:
    return read_model(load_config(config), str(config), assume_gqa=assume_gqa)


def gpu_memory(name: str) -> float:
    """GiB of a GPU by name, case and dashes aside. PlanError with the known names."""
    key = name.lower().replace("nvidia", "").strip(" -")
    if key not in GPU_MEMORY_GIB:
        rule = f"known: {', '.join(sorted(GPU_MEMORY_GIB))}"
        raise PlanError(f"unknown GPU {name!r}", rule=rule, hint="--gpu-memory-gib with what torch reports")
    return GPU_MEMORY_GIB[key]


def checkpoint_bytes(folder: Path) -> int | None:
    """Bytes of weights that a model folder's safetensors index states, or of its one safetensors file; None when neither is there."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        return int(json.loads(index.read_text(encoding="utf-8"))["metadata"]["total_size"])
    single = folder / "model.safetensors"
    return single.stat().st_size if single.is_file() else None


_ENGINE_KEYS = (
    "pipeline_parallel",
    "data_parallel",
    "expert_parallel",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "kv_cache_dtype",
    "dtype",
    "mamba_ssm_cache_dtype",
    "backend",
    "speculative_tokens",
    "gpu_memory_utilization",
    "prefix_caching",
    "hybrid_manager",
    "async_scheduling",
)
_LEDGER_KEYS = ("weights_gib", "non_torch_gib", "peak_activation_gib", "graph_estimate_gib", "graph_actual_gib", "cuda_context_gib")


def laid_over(shape: RoleShape, options: Mapping[str, Any]) -> RoleShape:
    """The shape with the options that were given: engine arguments, GPU memory and ledger rows."""
    changes: dict[str, Any] = {key: options[key] for key in _ENGINE_KEYS if options.get(key) is not None}
    if options.get("gpu") is not None and options.get("gpu_memory_gib") is not None:
        raise PlanError("both --gpu and --gpu-memory-gib", rule="give one of them")
    if options.get("gpu") is not None:
        changes["gpu_memory_gib"] = gpu_memory(options["gpu"])
    elif options.get("gpu_memory_gib") is not None:
        changes["gpu_memory_gib"] = options["gpu_memory_gib"]
    if options.get("kv_cache_memory_gib") is not None:
        changes["kv_cache_memory_bytes"] = int(options["kv_cache_memory_gib"] * GIB)
    known = {key: options[key] for key in (*_LEDGER_KEYS, "weights_total_bytes") if options.get(key) is not None}
    return shape.with_changes(memory=dataclasses.replace(shape.memory, **known), **changes)


def roles_of(options: Mapping[str, Any]) -> dict[str, RoleShape]:
    """Shapes without a recipe: prefill and decode when decode_tp is given, else one role named "engine"."""
    base = laid_over(RoleShape(), options)
    tp, decode_tp = options.get("tp") or 1, options.get("decode_tp")
    if decode_tp is None:
        return {"engine": base.with_changes(tensor_parallel=tp)}
    return {"prefill": base.with_changes(tensor_parallel=tp), "decode": base.with_changes(tensor_parallel=decode_tp)}


def plan(
    model: Model,
    roles: Mapping[str, RoleShape],
    *,
    tokens: int | None = None,
    patches: frozenset[str] = frozenset(),
    concurrency: int | None = None,
) -> Plan:
    """Plan one role, or prefill and decode. tokens: default is the shortest max_model_len of the roles."""
    return plan_pair(model, roles, tokens or min(shape.max_model_len for shape in roles.values()), patches, concurrency)


def find(
    model: Model,
    roles: Mapping[str, RoleShape],
    gpus: int,
    *,
    tokens: int | None = None,
    by: str = "requests_per_gpu",
    patches: frozenset[str] = frozenset(),
) -> Search:
    """Search over topologies of every role within the GPU budget, and over pairs of prefill and decode."""
    length = tokens or min(shape.max_model_len for shape in roles.values())
    found = {role: search(model, shape, gpus, length, by=by) for role, shape in roles.items()}
    pairs: list[PairCandidate] = []
    if "prefill" in found and "decode" in found:
        pairs = search_pairs(model, found["prefill"], found["decode"], gpus, patches)
    return Search(model, gpus, length, found, pairs)


def measured(path: Path, config: Path | None = None) -> Run:
    """Predicted against measured for an archived run or a log. config: where the model's own folder is not here."""
    from .runplan import read_run

    return Run(path, read_run(path, None if config is None else load_config(config)))


def to_json(result: Result) -> dict[str, Any]:
    """The result as plain values (bytes, GiB, tokens, requests); the archive stores this."""
    from .export import exported

    return exported(result)


def render(result: Result, console: Console) -> None:
    """Tables on a terminal."""
    from . import report

    report.render(result, console)


def picture(result: Plan) -> str:
    """One SVG: the memory ladder of every role, and where one request's bytes go by kind of layer."""
    from .svg import drawn

    return drawn(result)
