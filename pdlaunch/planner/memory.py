"""The memory ladder as a ledger that closes: from the GPU's total to the bytes that the KV cache gets.

vllm v1/worker/gpu_worker.py determine_available_memory: the share is ceil(total * utilization) of the TOTAL, and consumption is
measured from a snapshot taken after the CUDA context and NCCL exist. So the context is never subtracted from the share; it sits in
the part outside it. A ladder that subtracts the context again is off by exactly the context.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import ceil

from .layers import Model
from .shape import GIB, RoleShape
from .weights import rank_bytes


@dataclass(frozen=True, slots=True)
class Row:
    """gib: signed contribution to the running sum, None when unknown. source: measured, computed, given, default or unknown.
    inside: the row explains a part of another row and is not added."""

    name: str
    gib: float | None
    source: str
    note: str = ""
    inside: bool = False


@dataclass(frozen=True, slots=True)
class Ledger:
    """rows add up to kv_gib: the sum of the rows that are not `inside`. kv_bytes: what vLLM would hand to the cache.
    complete: every row is known; otherwise kv_bytes is an upper bound."""

    rows: tuple[Row, ...]
    kv_bytes: int
    complete: bool

    @property
    def kv_gib(self) -> float:
        return self.kv_bytes / GIB


def _known(value: float | None, measured: bool) -> str:
    if value is None:
        return "unknown"
    return "measured" if measured else "given"


def ledger(model: Model, shape: RoleShape) -> Ledger | None:
    """The ledger of one rank, or None when neither GPU memory nor a KV size is given."""
    if shape.kv_cache_memory_bytes is not None:
        row = Row("KV cache, given", shape.kv_cache_memory_bytes / GIB, "given", "kv_cache_memory bypasses the share of the GPU")
        return Ledger((row,), shape.kv_cache_memory_bytes, True)
    if shape.gpu_memory_gib is None:
        return None
    facts = shape.memory
    total = shape.gpu_memory_gib * GIB
    share = ceil(total * shape.gpu_memory_utilization)
    weights = facts.weights_gib * GIB if facts.weights_gib is not None else rank_bytes(model, shape)
    weight_source = _known(facts.weights_gib, facts.measured) if facts.weights_gib is not None else "computed"
    counted = "counted from the config" if model.checkpoint_bytes is None else "the checkpoint's size, spread by a count"
    weight_note = "of one rank" if facts.weights_gib is not None else f"of one rank, {counted}"
    taken = {
        "non-torch memory": (facts.non_torch_gib, "growth after the first snapshot"),
        "peak activation": (facts.peak_activation_gib, "one profiling step of max_num_batched_tokens"),
        "CUDA-graph estimate": (facts.graph_estimate_gib, "reserved before capture; charged whether graphs need it or not"),
    }
    rows = [
        Row("GPU memory", total / GIB, "given", "as torch reports it"),
        Row(f"outside the share of {shape.gpu_memory_utilization:.0%}", (share - total) / GIB, "computed", "1 - gpu_memory_utilization"),
        Row("CUDA context", facts.cuda_context_gib, _known(facts.cuda_context_gib, facts.measured), _CONTEXT, inside=True),
        Row("weights", -weights / GIB, weight_source, weight_note),
    ]
    used = weights
    for name, (value, note) in taken.items():
        rows.append(Row(name, None if value is None else -value, _known(value, facts.measured), note))
        used += (value or 0.0) * GIB
    complete = all(value is not None for value, _ in taken.values())
    return Ledger(tuple(rows), max(0, int(share - used)), complete)


_CONTEXT = "inside the part outside the share: it exists before vLLM's first snapshot, so nothing subtracts it"


def kv_bytes(model: Model, shape: RoleShape) -> int | None:
    """Bytes for KV on one rank: given, or the end of the ledger (an upper bound while a row is unknown), or None."""
    book = ledger(model, shape)
    return None if book is None else book.kv_bytes


@dataclass(frozen=True, slots=True)
class GraphError:
    """How far vLLM's CUDA-graph estimate missed. error_gib > 0: reserved and never used, requests lost from the cache. error_gib < 0:
    graphs took more than reserved; no request is lost, but the difference comes out of the memory outside the share."""

    error_gib: float
    requests: float

    @property
    def meaning(self) -> str:
        if self.error_gib > 0:
            return f"over-reserved by {self.error_gib:.2f} GiB: {self.requests:.1f} requests per cache lost"
        if self.error_gib < 0:
            return f"under-reserved by {-self.error_gib:.2f} GiB: out-of-memory risk, {-self.requests:.1f} requests' worth"
        return "exact"


def graph_error(shape: RoleShape, request_bytes: int) -> GraphError | None:
    """The signed error in GiB and in requests at this rank's own price; None unless both sizes are known."""
    facts = shape.memory
    if facts.graph_estimate_gib is None or facts.graph_actual_gib is None:
        return None
    error = facts.graph_estimate_gib - facts.graph_actual_gib
    return GraphError(error, error * GIB / request_bytes)
