"""What the verb `plan` (pdlaunch/verb_plan.py) calls: values in, a result object out; then `render`, `to_json` or `picture`.

model = model_of(config)
roles = {role: with_memory(shape, gpu_memory_gib, facts) ...}     # shapes of a recipe, or RoleShape(...) from options
result = plan(model, roles, tokens=..., patches=..., concurrency=...)
result = find(model, roles, gpus, by=...)                         # --search GPUS
result = measured(path, config)                                   # --run PATH
result.emitted.yaml()                                             # --patch FILE: values for the recipe
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

    from .logs import Compared
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
    """Result of reading a run or a log. transfers: bytes handed over by window, predicted and measured."""

    path: Path
    engines: list[MeasuredEngine]
    transfers: list[Compared] = dataclasses.field(default_factory=list)


Result = Plan | Search | Run


def model_of(config: Path, *, assume_gqa: bool = False) -> Model:
    """The model of a config.json or model folder, with the size of the checkpoint that lies beside it, if one does."""
    model = read_model(load_config(config), str(config), assume_gqa=assume_gqa)
    size = checkpoint_bytes(config if config.is_dir() else config.parent)
    return model if size is None else dataclasses.replace(model, checkpoint_bytes=size)


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
    """The shape with what is given of its GPU; rows that are not given stay as they are."""
    given = {f.name: value for f in dataclasses.fields(facts) if (value := getattr(facts, f.name)) is not None}
    memory = dataclasses.replace(shape.memory, **given)
    return shape.with_changes(gpu_memory_gib=gpu_memory_gib or shape.gpu_memory_gib, memory=memory)


def _counted(**numbers: int | None) -> None:
    for name, value in numbers.items():
        if value is not None and value < 1:
            raise PlanError(f"{name} is {value}", rule="at least 1")


def plan(
    model: Model,
    roles: Mapping[str, RoleShape],
    *,
    tokens: int | None = None,
    patches: frozenset[str] = frozenset(),
    concurrency: int | None = None,
) -> Plan:
    """Plan one role, or prefill and decode. tokens: default is the shortest max_model_len of the roles. PlanError for a number below 1."""
    _counted(tokens=tokens, concurrency=concurrency)
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
    _counted(tokens=tokens, gpus=gpus)
    length = tokens or min(shape.max_model_len for shape in roles.values())
    found = {role: search(model, shape, gpus, length, by=by) for role, shape in roles.items()}
    pairs: list[PairCandidate] = []
    if "prefill" in found and "decode" in found:
        pairs = search_pairs(model, found["prefill"], found["decode"], gpus, patches, (roles["prefill"], roles["decode"]))
    return Search(model, gpus, length, found, pairs)


def measured(path: Path, config: Path | None = None) -> Run:
    """Predicted against measured for an archived run or a log. config: instead of the run's model_config.json or the model's folder."""
    from .logs import read_transfers
    from .runplan import read_run

    return Run(path, read_run(path, None if config is None else load_config(config)), read_transfers(path))


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
