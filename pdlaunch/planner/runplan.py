"""Predicted against measured: one engine's own words beside what the planner says of the same shape."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pdlaunch.errors import PlanError

from .capacity import Layout, capacity
from .config import load_config
from .families import read_model
from .logs import Compared, EngineRecord, read_records, rounded_kv_gib, shape_of, stated
from .memory import Row
from .roleplan import RolePlan, plan_role
from .shape import GIB, RoleShape


@dataclass(frozen=True)
class MeasuredEngine:
    """One engine of a run. plan: the planner's view of the shape it ran with, None when the model's config is not to be had (problem
    says so). rows: predicted against measured. ledger: the measured ladder, whose last row is its residual."""

    record: EngineRecord
    shape: RoleShape
    plan: RolePlan | None
    rows: tuple[Compared, ...]
    ledger: tuple[Row, ...]
    problem: str = ""

    @property
    def verdict(self) -> Literal["exact", "differs", "unknown"]:
        """exact: every value that is both predicted and stated agrees, to the digits that the engine states. unknown: there is none."""
        if all(row.residual is None for row in self.rows):
            return "unknown"
        return "exact" if all(row.agrees for row in self.rows) else "differs"

    @property
    def exact(self) -> bool:
        return self.verdict == "exact"


def measured_ledger(record: EngineRecord) -> tuple[Row, ...]:
    """The ladder from vLLM's own lines: share - consumed - peak = KV, with the residual against "Available KV cache memory".

    Two digits each, so a residual of up to 0.02 GiB is rounding. Empty when the closing line ("Free memory on device") is missing.
    """
    share, consumed, peak = (record.fact(name) for name in ("share_gib", "consumed_gib", "peak_gib"))
    if share is None or consumed is None or peak is None:
        return ()
    weights, estimate = record.fact("weights_gib"), record.fact("graph_estimate_gib")
    total, free, kv = record.fact("total_gib"), record.fact("free_gib"), record.fact("kv_gib")
    rows = [
        Row("GPU memory", total, "measured", record.facts["total_gib"].source),
        Row("outside the share", share - total, "computed"),
        Row("CUDA context and start-up", total - free, "measured", "inside the part outside the share; never subtracted", inside=True),
    ]
    if weights is None:
        rows.append(Row("weights and non-torch", -consumed, "measured", record.facts["consumed_gib"].source))
    else:
        rows.append(Row("weights", -weights, "measured", record.facts["weights_gib"].source))
        rows.append(Row("non-torch memory", -(consumed - weights), "computed", "consumed minus weights"))
    if estimate is None:
        rows.append(Row("peak activation", -peak, "measured", record.facts["peak_gib"].source))
    else:
        rows.append(Row("peak activation", -(peak - estimate), "computed", "vLLM's figure minus the graph estimate it contains"))
        rows.append(Row("CUDA-graph estimate", -estimate, "measured", record.facts["graph_estimate_gib"].source))
    if kv is not None:
        rows.append(Row("residual", kv - (share - consumed - peak), "computed", "Available KV cache memory minus the sum above"))
    return tuple(rows)


HALF_DIGIT_GIB = 0.00501  # a log rounds GiB to two digits


def _predicted(layout: Layout, kv_bytes: int) -> dict[str, float]:
    cache = capacity(layout, kv_bytes)
    return {"num_blocks": cache.num_blocks, "tokens": cache.tokens, "concurrency": cache.concurrency}


def _compare(record: EngineRecord, plan: RolePlan | None) -> tuple[Compared, ...]:
    middle: dict[str, float] = {}
    low, high = middle, middle
    if plan is not None:
        middle = {"block_size": plan.layout.choice.block_size}
        if plan.capacity is not None and plan.book is not None:
            middle |= _predicted(plan.layout, plan.book.kv_bytes)
            slack = 0 if rounded_kv_gib(record) is None else int(HALF_DIGIT_GIB * GIB)
            low, high = (middle | _predicted(plan.layout, plan.book.kv_bytes + sign * slack) for sign in (-1, 1))
    said = stated(record)
    rows = []
    for name in ("block_size", "num_blocks", "tokens", "concurrency"):
        if name not in middle and name not in said:
            continue
        value, source = said.get(name, (None, ""))
        digits = 0.00501 if name == "concurrency" and "cache_config_info" not in source else 0.0
        ends = (None, None) if name not in low else (low[name] - digits, high[name] + digits)
        rows.append(Compared(name, middle.get(name), value, source, *ends))
    return tuple(rows)


def _config_of(record: EngineRecord, config: Mapping[str, Any] | None) -> Mapping[str, Any]:
    if config is not None:
        return config
    if record.model_path is None:
        raise PlanError("the model is not named in the log", rule="a plan needs the model's config.json", hint="--config FILE")
    return load_config(Path(record.model_path))


def read_engine(record: EngineRecord, config: Mapping[str, Any] | None = None) -> MeasuredEngine:
    """One record with its plan. config: a HF config for models whose folder is not here."""
    shape = shape_of(record)
    plan, problem = None, ""
    try:
        plan = plan_role(read_model(_config_of(record, config)), record.role, shape, shape.max_model_len)
    except PlanError as error:
        problem = str(error)
    return MeasuredEngine(record, shape, plan, _compare(record, plan), measured_ledger(record), problem)


def read_run(path: Path, config: Mapping[str, Any] | None = None) -> list[MeasuredEngine]:
    """All engines of an archived run, or the one of a log file. PlanError when the path holds neither, or says nothing of a cache.

    config: a HF config; without one it is the run's own model_config.json where there is one, else that of the model folder the run names.
    """
    if config is None:
        kept = [folder / "model_config.json" for folder in (path, path / "run") if (folder / "model_config.json").is_file()]
        config = load_config(kept[0]) if kept else None
    engines = [read_engine(record, config) for record in read_records(path)]
    if not any(engine.record.facts or engine.record.metric for engine in engines):
        raise PlanError(f"{path} says nothing of a KV cache", rule="logs of vLLM 0.31.0, or vllm:cache_config_info")
    return engines
