"""From bytes to vLLM's printed line: blocks in the pool, "KV cache size" and "Maximum concurrency".

vllm v1/core/kv_cache_utils.py: get_kv_cache_configs, get_max_concurrency_for_kv_cache_config, get_kv_cache_capacity.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from pdlaunch.errors import PlanError

from .blocks import BlockChoice, choose_block, specs_by_layer
from .groups import Group, Grouping, group_layers
from .layers import Model
from .price import Price, admission, steady
from .rules import refuse
from .shape import RoleShape


def stage_of_layers(layers: int, stages: int) -> list[int]:
    """Pipeline stage of each decoder layer (vllm distributed/utils.py get_pp_indices): remainders go to the middle stages,
    from the last but one backwards, because the first and last stage also hold the embeddings."""
    each, rest = divmod(layers, stages)
    sizes = [each] * stages
    for i in range(2, rest + 2):
        sizes[-i] += 1
    return [stage for stage, size in enumerate(sizes) for _ in range(size)]


@dataclass(frozen=True)
class Layout:
    """One role's cache before its memory is known: block size, groups, and bytes of one pool block on each pipeline stage."""

    model: Model
    shape: RoleShape
    choice: BlockChoice
    grouping: Grouping
    stage_block_bytes: tuple[int, ...]
    stage_groups: tuple[tuple[Group, ...], ...]

    @property
    def groups(self) -> tuple[Group, ...]:
        return self.grouping.groups

    @property
    def block_bytes(self) -> int:
        """Bytes of one pool block on the rank where it is largest."""
        return max(self.stage_block_bytes)

    @property
    def scheduler_block(self) -> int:
        """The block size the NIXL connector and the scheduler see: the least common multiple over groups of tokens."""
        return lcm(*(group.first.block_size for group in self.groups if not group.first.is_state))

    def admission(self, tokens: int) -> Price:
        return admission(self.groups, self.shape, tokens, self.block_bytes)

    def steady(self, tokens: int) -> Price:
        return steady(self.groups, self.shape, tokens, self.block_bytes)


@dataclass(frozen=True)
class Capacity:
    """What vLLM prints for one cache. tokens is derived from the concurrency, not from bytes: never divide bytes by it."""

    layout: Layout
    num_blocks: int
    concurrency: float
    tokens: int

    @property
    def line(self) -> str:
        """The line as vLLM logs it (without the device name in front)."""
        length = self.layout.shape.max_model_len
        return f"KV cache size: {self.tokens:,} tokens, Maximum concurrency for {length:,} tokens per request: {self.concurrency:.2f}x"

    def requests(self, tokens: int, *, held: bool = False) -> int:
        """Whole requests of that length which fit beside the null block; held: by the steady price instead of the admission price."""
        price = self.layout.steady(tokens) if held else self.layout.admission(tokens)
        return (self.num_blocks - 1) // price.blocks


def plan_layout(model: Model, shape: RoleShape) -> Layout:
    """Block size and groups of a role. PlanError where vLLM would refuse to start."""
    if shape.layout.startswith("B"):
        raise PlanError(f"KV layout {shape.layout} is not priced", rule="block-outermost layouts pack pages differently; use LBHNC")
    if shape.speculative_tokens and not model.drafter:
        rule = "speculative tokens are priced for a model's own MTP head, which this config does not have"
        raise PlanError(f"{shape.speculative_tokens} speculative tokens for {model.architecture}", rule=rule, hint="speculative_tokens: 0")
    refuse(model, shape)
    choice = choose_block(model, shape)
    specs, decoder = specs_by_layer(model, shape, choice)
    grouping = group_layers(specs, shape.hybrid_manager)
    if shape.pipeline_parallel == 1:
        stage_groups: tuple[tuple[Group, ...], ...] = (grouping.groups,)
    else:
        by_layer = stage_of_layers(model.decoder_layers, shape.pipeline_parallel)
        for layer, source in model.shared_from:
            if by_layer[layer] != by_layer[source]:
                message = f"layer {layer} reads the cache of layer {source}, which is on another pipeline stage"
                raise PlanError(message, rule="vLLM shares KV only within a stage (validate_kv_sharing_target)")
        stages = [by_layer[place] for place in decoder]
        stage_groups = tuple(tuple(group.on_stage(stages, stage) for group in grouping.groups) for stage in range(shape.pipeline_parallel))
    block_bytes = tuple(max(group.page_bytes for group in groups) for groups in stage_groups)
    return Layout(model, shape, choice, grouping, block_bytes, stage_groups)


def blocks_needed(layout: Layout, tokens: int) -> int:
    return layout.admission(tokens).blocks


def longest_request(layout: Layout, num_blocks: int) -> int:
    """Longest max_model_len that vLLM would start with in so many blocks, one of them the null block; 0 if none."""
    low, high = 0, layout.shape.max_model_len
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if blocks_needed(layout, middle) <= num_blocks - 1 else (low, middle - 1)
    return low


def capacity(layout: Layout, available_bytes: int | tuple[int, ...]) -> Capacity:
    """Capacity of one cache. available_bytes: for KV on every rank, or one number per pipeline stage.

    PlanError, with vLLM's reason, when a single request of max_model_len does not fit beside the null block.
    """
    shape = layout.shape
    per_stage = (available_bytes,) * len(layout.stage_block_bytes) if isinstance(available_bytes, int) else available_bytes
    fits = [bytes_ // block if block else None for bytes_, block in zip(per_stage, layout.stage_block_bytes, strict=True)]
    num_blocks = min(count for count in fits if count is not None)
    if shape.num_blocks_override is not None:
        num_blocks = shape.num_blocks_override
    needed = blocks_needed(layout, shape.max_model_len)
    if num_blocks - 1 < needed:
        longest = longest_request(layout, num_blocks)
        raise PlanError(
            f"one request of {shape.max_model_len} tokens needs {needed} blocks, and {max(num_blocks - 1, 0)} are usable",
            rule="vLLM refuses to start when max_model_len does not fit its KV cache beside the null block",
            hint=(f"max_model_len of at most {longest}, " if longest else "") + "more memory, or more tensor parallelism",
        )
    concurrency = num_blocks / needed
    return Capacity(layout, num_blocks, concurrency, int(concurrency * shape.max_model_len))
