"""What the verb `plan` calls. Values in, a result object out; then `render`, `to_json` or `pictures`.

Options of the verb (each maps to one argument below):
  --recipe NAME, --cluster NAME, --set K=V   the shapes of a recipe's roles (pdlaunch.modelcheck.role_shape), its model config and patches
  --config PATH                              a HF config.json or model folder instead of a recipe
  --tp, --decode-tp N                        with --config: tensor parallel of prefill (or of the one role) and of decode
  --pp, --dp N, --ep                         with --config: pipeline, data and expert parallelism
  --max-model-len, --max-num-batched-tokens, --block-size, --kv-cache-dtype, --ssm-dtype, --mtp N, --backend, --no-prefix-caching,
  --no-hybrid-manager                        with --config: engine arguments of both roles
  --gpu NAME | --gpu-memory-gib X            memory of one GPU (names: shape.GPU_MEMORY_GIB)
  --gpu-memory-utilization X                 default 0.92
  --weights-gib X, --non-torch-gib X, --activation-gib X, --graph-estimate-gib X, --graph-actual-gib X, --context-gib X   ledger rows
  --tokens N                                 length of the priced request, prompt plus output; default max_model_len
  --concurrency N                            requests in flight over the deployment
  --assume-gqa                               price an unknown architecture as plain attention
  --search GPUS [--by requests_per_gpu|concurrency]   topologies instead of one plan
  --run PATH                                 predicted against measured for an archived run or a worker log
  --patch FILE                               write the emitted values as YAML
  --svg FILE                                 write the picture
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
from .shape import GPU_MEMORY_GIB, MemoryFacts, RoleShape
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


def with_memory(shape: RoleShape, gpu_memory_gib: float | None, facts: MemoryFacts) -> RoleShape:
    """The shape with what is known of its GPU."""
    return shape.with_changes(gpu_memory_gib=gpu_memory_gib or shape.gpu_memory_gib, memory=facts)


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
