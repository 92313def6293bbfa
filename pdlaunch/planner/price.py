"""What one request costs, in blocks of the shared pool. Two prices, because vLLM charges one and decode holds the other.

Admission is what vLLM reserves room for when it prints "Maximum concurrency" and when it admits a prompt: a sliding layer must be
able to hold its window plus everything in flight. Steady is what a request of that length really holds between decode steps: a
sliding layer holds its window and no more. vLLM's printed capacity uses only the first (v1/kv_cache_interface.py).
"""

from __future__ import annotations

from dataclasses import dataclass

from .groups import Group
from .shape import RoleShape
from .specs import LayerSpec, ceil_div


def _state_blocks(spec: LayerSpec, tokens: int) -> int:
    """MambaSpec.max_memory_usage_bytes: one state plus one per speculative token; align keeps two; all keeps one per block."""
    if spec.state_mode == "all":
        return ceil_div(tokens, spec.block_size) + spec.speculative_blocks
    return (2 if spec.state_mode == "align" else 1) + spec.speculative_blocks


def blocks(spec: LayerSpec, tokens: int, in_flight: int) -> int:
    """Blocks that one layer's group needs for a request of so many tokens with in_flight tokens scheduled and not yet settled.

    Full, MLA: every token. Sliding: window - 1 + in_flight, plus one block because the window need not start on a block's edge.
    Chunked: chunk + in_flight.
    """
    if spec.is_state:
        return _state_blocks(spec, tokens)
    if spec.kind == "sliding":
        return ceil_div(min((spec.window or 0) - 1 + in_flight, tokens), spec.block_size) + 1
    if spec.kind == "chunked":
        return ceil_div(min((spec.window or 0) + in_flight, tokens), spec.block_size)
    return ceil_div(tokens, spec.block_size)


@dataclass(frozen=True, slots=True)
class Price:
    """One request of `tokens` tokens: blocks by group, and what one block costs on the widest rank.

    used_bytes: bytes of those blocks that the request's tokens and states really fill.
    """

    tokens: int
    by_group: tuple[int, ...]
    block_bytes: int
    used_bytes: int

    @property
    def blocks(self) -> int:
        return sum(self.by_group)

    @property
    def bytes(self) -> int:
        return self.blocks * self.block_bytes

    @property
    def mib(self) -> float:
        return self.bytes / (1 << 20)

    @property
    def waste_percent(self) -> float:
        return 100 * (1 - self.used_bytes / self.bytes)


def _stored_bytes(spec: LayerSpec, tokens: int, in_flight: int) -> int:
    """Bytes that carry information: tokens that the layer keeps, or its states without padding."""
    if spec.is_state:
        return spec.state_bytes * _state_blocks(spec, tokens)
    kept = tokens
    if spec.kind in ("sliding", "chunked"):
        kept = min((spec.window or 0) - (spec.kind == "sliding") + in_flight, tokens)
    return spec.token_bytes * kept


def _price(groups: tuple[Group, ...], tokens: int, in_flight: int, block_bytes: int) -> Price:
    by_group = tuple(blocks(group.first, tokens, in_flight) for group in groups)
    used = sum(_stored_bytes(spec, tokens, in_flight) * len(layers) for group in groups for spec, layers in group.specs.items())
    return Price(tokens, by_group, block_bytes, used)


def admission(groups: tuple[Group, ...], shape: RoleShape, tokens: int, block_bytes: int) -> Price:
    """What vLLM charges for a request of that length (get_max_concurrency_for_kv_cache_config at tokens = max_model_len)."""
    return _price(groups, tokens, shape.max_in_flight_tokens, block_bytes)


def steady(groups: tuple[Group, ...], shape: RoleShape, tokens: int, block_bytes: int) -> Price:
    """What a request of that length holds between decode steps, in the worst alignment of its window.

    One decode step is in flight: one token and its drafts. Async scheduling can hold a second step's tokens for a moment.
    """
    return _price(groups, tokens, 1 + shape.speculative_tokens, block_bytes)
