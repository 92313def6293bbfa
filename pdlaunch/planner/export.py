"""Results as plain JSON values."""

from __future__ import annotations

from typing import Any

from .capacity import Layout
from .command import Result, Search
from .price import Price
from .roleplan import Plan, RolePlan
from .runplan import MeasuredEngine
from .topology import Candidate


def _fields(item: object, *names: str) -> dict[str, Any]:
    return {name: getattr(item, name) for name in names}


def _price(price: Price) -> dict[str, Any]:
    return {**_fields(price, "tokens", "blocks", "bytes", "mib", "waste_percent"), "blocks_by_group": list(price.by_group)}


def _layout(layout: Layout) -> dict[str, Any]:
    choice, shape = layout.choice, layout.shape
    return {
        "shape": {
            **_fields(shape, "tensor_parallel", "pipeline_parallel", "data_parallel", "expert_parallel", "replicas", "gpus"),
            **_fields(shape, "max_model_len", "max_num_batched_tokens", "max_num_seqs", "kv_cache_dtype", "backend"),
            **_fields(shape, "prefix_caching", "hybrid_manager", "speculative_tokens", "max_in_flight_tokens"),
        },
        "block_size": choice.block_size,
        "state": _fields(choice, "state_bytes", "state_tokens", "token_bytes", "alignment", "state_padding_percent"),
        "block_bytes": list(layout.stage_block_bytes),
        "grouping": layout.grouping.path,
        "padding_layers": layout.grouping.padding_layers,
        "groups": [
            {"kind": g.first.kind, "block_size": g.first.block_size, "layers": len(g.layers), "page_bytes": g.page_bytes}
            for g in layout.groups
        ],
    }


def _role(role: RolePlan) -> dict[str, Any]:
    book, cache, graph, mtp = role.book, role.capacity, role.graph, role.mtp
    return {
        "layout": _layout(role.layout),
        "kinds": [
            _fields(k, "label", "layers", "heads", "copies", "block_tokens", "page_bytes", "admission_bytes", "steady_bytes")
            for k in role.kinds
        ],
        "admission": _price(role.admission),
        "steady": _price(role.steady),
        "copied": {"share": role.copied_share, "gib": role.copied_gib, "requests": role.copied_requests},
        "ledger": None
        if book is None
        else {
            "kv_bytes": book.kv_bytes,
            "complete": book.complete,
            "rows": [_fields(row, "name", "gib", "source", "note", "inside") for row in book.rows],
        },
        "capacity": None if cache is None else {**_fields(cache, "num_blocks", "tokens", "concurrency"), "line": cache.line},
        "refused": role.refused or None,
        "graph_error": None if graph is None else _fields(graph, "error_gib", "requests", "meaning"),
        "mtp": None
        if mtp is None
        else _fields(mtp, "block_before", "block_after", "bytes_before", "bytes_after", "concurrency_before", "concurrency_after"),
        "levers": [_fields(lever, "change", "price_percent", "held", "printed", "refused") for lever in role.levers],
    }


def _plan(plan: Plan) -> dict[str, Any]:
    return {
        "model": {**_fields(plan.model, "name", "architecture", "family", "dtype", "decoder_layers", "assumed")},
        "tokens": plan.tokens,
        "roles": {name: _role(role) for name, role in plan.roles.items()},
        "findings": [_fields(f, "severity", "code", "message", "fix", "price_requests") for f in plan.findings],
        "patches_needed": sorted(plan.patches_needed),
        "transfer": None if plan.transfer is None else {**_fields(plan.transfer, "tokens", "bytes_per_rank", "ranks", "total_bytes")},
        "recipe_patch": None if plan.emitted is None else plan.emitted.patch(),
        "capture_sizes": None if plan.emitted is None else list(plan.emitted.capture_sizes),
    }


def _candidate(item: Candidate) -> dict[str, Any]:
    names = ("name", "gpus", "weights_gib", "kv_gib", "block_size", "held", "printed", "engine_held", "held_per_gpu")
    return {**_fields(item, *names), "refused": item.refused or None}


def _search(found: Search) -> dict[str, Any]:
    return {
        "model": found.model.name,
        "gpus": found.gpus,
        "tokens": found.tokens,
        "roles": {role: [_candidate(c) for c in items] for role, items in found.roles.items()},
        "pairs": [
            {
                "prefill": pair.prefill.name,
                "decode": pair.decode.name,
                "gpus": pair.gpus,
                "decode_held": pair.decode.engine_held,
                "held_per_gpu": pair.held_per_gpu,
                "errors": list(pair.errors),
            }
            for pair in found.pairs
        ],
    }


def _engine(engine: MeasuredEngine) -> dict[str, Any]:
    return {
        "engine": engine.record.name,
        "role": engine.record.role,
        "exact": engine.exact,
        "verdict": engine.verdict,
        "problem": engine.problem or None,
        "values": [_fields(row, "name", "predicted", "measured", "residual", "low", "high", "agrees", "source") for row in engine.rows],
        "ledger": [_fields(row, "name", "gib", "source", "note", "inside") for row in engine.ledger],
        "plan": None if engine.plan is None else _role(engine.plan),
    }


def exported(result: Result) -> dict[str, Any]:
    if isinstance(result, Plan):
        return _plan(result)
    if isinstance(result, Search):
        return _search(result)
    transfers = [_fields(row, "name", "predicted", "measured", "residual", "source") for row in result.transfers]
    return {"path": str(result.path), "engines": [_engine(engine) for engine in result.engines], "transfers": transfers}
