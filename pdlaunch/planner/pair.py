"""Two roles of one model as a pair: their layouts, what the pair's heads make of a hand-over, and which of our patches it needs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from pdlaunch.errors import PlanError

from .capacity import Layout, capacity, plan_layout
from .layers import Attention, Model
from .memory import kv_bytes
from .shape import RoleShape
from .specs import heads_per_rank

PER_REGION_PATCH = "vllm-0.31.0-nixl-per-region-kv-heads"
PER_GROUP_PATCH = "vllm-0.31.0-nixl-per-group-pages"


def known_patches(names: Iterable[str]) -> frozenset[str]:
    """A recipe's patches under the names above: a rebase to another vLLM counts as what it is rebased from."""
    known = {name.partition("-nixl-")[2]: name for name in (PER_REGION_PATCH, PER_GROUP_PATCH)}
    return frozenset(known.get(name.partition("-nixl-")[2], name) for name in names)


@dataclass(frozen=True, slots=True)
class Pair:
    """A model with the two layouts that were derived from the roles' shapes, and the patches that will be applied."""

    model: Model
    prefill: Layout
    decode: Layout
    patches: frozenset[str]

    @property
    def p(self) -> RoleShape:
        return self.prefill.shape

    @property
    def d(self) -> RoleShape:
        return self.decode.shape

    @property
    def has_state(self) -> bool:
        return any(group.first.is_state for group in self.decode.groups)

    @property
    def one_table(self) -> bool:
        """Whether every layer of a role uses one block table: hybrid manager off, or all layers alike."""
        return len(self.decode.groups) == 1 == len(self.prefill.groups)


def unevenly_scaled(model: Model, prefill_tp: int, decode_tp: int) -> list[Attention]:
    """Layers whose heads per rank do not scale as the model-wide head count does: stock vLLM slices them wrongly."""
    wide = heads_per_rank(model.kv_heads, prefill_tp), heads_per_rank(model.kv_heads, decode_tp)
    uneven = []
    for attention in model.attention_kinds():
        own = heads_per_rank(attention.kv_heads, prefill_tp), heads_per_rank(attention.kv_heads, decode_tp)
        if own[0] * wide[1] != own[1] * wide[0]:
            uneven.append(attention)
    return uneven


def copies_above(pair: Pair) -> bool:
    """Prefill ranks that hold copies of a head, read by fewer decode ranks: stock refuses, the per-region patch reads the first copy."""
    p, d = pair.p.tensor_parallel, pair.d.tensor_parallel
    return p > d and p > pair.model.kv_heads and not pair.model.uses_mla and not pair.has_state


def needed_patches(pair: Pair) -> frozenset[str]:
    """Patches without which this pair cannot hand its cache over."""
    uneven = unevenly_scaled(pair.model, pair.p.tensor_parallel, pair.d.tensor_parallel)
    both_on = pair.p.hybrid_manager and pair.d.hybrid_manager
    several_groups = len(pair.decode.groups) > 1 or len(pair.prefill.groups) > 1
    if both_on and several_groups and not pair.has_state and pair.p.block_size == pair.d.block_size:
        if uneven or pair.prefill.scheduler_block != pair.decode.scheduler_block:
            return frozenset({PER_REGION_PATCH, PER_GROUP_PATCH})
        return frozenset()
    return frozenset({PER_REGION_PATCH}) if uneven or copies_above(pair) else frozenset()


def needed_patches_of(prefill: Layout, decode: Layout) -> frozenset[str]:
    return needed_patches(Pair(decode.model, prefill, decode, frozenset()))


def requests_lost(layout: Layout, **changes: object) -> int | None:
    """Requests of max_model_len that one cache holds fewer, by the steady price, after a change; None if memory is unknown."""
    before = kv_bytes(layout.model, layout.shape)
    if before is None:
        return None
    shape = layout.shape.with_changes(**changes)
    try:
        after = capacity(plan_layout(layout.model, shape), before)
        now = capacity(layout, before)
    except PlanError:
        return None
    length = shape.max_model_len
    return now.requests(length, held=True) - after.requests(length, held=True)
