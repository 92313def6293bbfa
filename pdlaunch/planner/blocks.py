"""The block size that falls out, and the specs of every layer with it.

vllm platforms/interface.py: update_block_size_for_backend, _align_hybrid_block_size; platforms/cpu.py for the CPU platform.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import lcm

from pdlaunch.errors import PlanError

from .layers import Attention, Geometry, Model
from .shape import Backend, RoleShape
from .specs import LayerSpec, attention_token_bytes, backend_of, ceil_div, element_bytes, model_dtype, state_bytes, state_shapes

SpecLayers = dict[LayerSpec, list[int]]


@dataclass(frozen=True, slots=True)
class BlockChoice:
    """The block size in tokens and why.

    token_bytes: bytes of one token in one attention layer, by vLLM's model-wide head count. state_bytes: of the largest state, 0
    without one. state_tokens: how many tokens one state is worth. alignment: the step of the search. state_block: tokens per
    state block. padded_state: page that states are padded to, None when it fits exactly or there is no state.
    """

    block_size: int
    alignment: int
    token_bytes: int
    state_bytes: int
    state_block: int
    padded_state: int | None

    @property
    def state_tokens(self) -> int:
        return ceil_div(self.state_bytes, self.token_bytes)

    @property
    def state_padding_percent(self) -> float:
        """What vLLM logs as "Padding mamba page size by"."""
        return 0.0 if self.padded_state is None else 100 * (self.padded_state - self.state_bytes) / self.state_bytes


def _base_block(model: Model, shape: RoleShape, backend: Backend) -> int:
    """--block-size, or the backend's preference; the reference CPU_MLA takes 16 whatever was asked (platforms/cpu.py)."""
    if shape.backend == "CPU_MLA":
        return 16
    if shape.block_size is not None:
        if not shape.cpu and backend.kernel_block(shape.block_size) is None:
            legal = f"a multiple of {backend.smallest}"
            raise PlanError(f"block size {shape.block_size} does not suit {backend.name}", rule=f"the kernels need {legal}")
        return shape.block_size
    return backend.default_block


def _page_of_one_token(model: Model, shape: RoleShape) -> int:
    """Bytes per token by the model-wide head count and head size, as _align_hybrid_block_size computes it."""
    if model.uses_mla:
        return model.head_size * element_bytes(shape.kv_cache_dtype, model_dtype(model, shape))
    slots, content = attention_token_bytes(model, Attention("full", model.kv_heads, model.head_size, model.head_size), shape)
    return slots * content


def choose_block(model: Model, shape: RoleShape) -> BlockChoice:
    """Block size of one role.

    Without states: --block-size or the backend's default. With states a block must hold a whole state, so it grows to
    alignment * ceil(state / (alignment * bytes per token)), and states are padded to exactly that page.
    """
    backend = backend_of(shape)
    base = _base_block(model, shape, backend)
    token = _page_of_one_token(model, shape)
    states = [state_bytes(model, g, shape) for g in model.geometries() if not isinstance(g, Attention)]
    largest = max(states, default=0)
    if not largest or not model.hybrid:
        state_block = base if shape.prefix_caching else shape.max_model_len
        return BlockChoice(base, base, token, largest, state_block, None)
    alignment = max(backend.smallest, base)
    if model.uses_mla:
        alignment = max(alignment, 128)
    if shape.state_mode == "all":
        alignment = lcm(model.mamba_chunk_size, alignment)
        needed = alignment * ceil_div(ceil_div(largest, token), alignment)
    else:
        needed = alignment * ceil_div(largest, alignment * token)
    block = max(base, needed)
    state_block = {"all": needed, "align": block, "none": shape.max_model_len}[shape.state_mode]
    page = block * token
    return BlockChoice(block, alignment, token, largest, state_block, page if page != largest else None)


def _attention_spec(model: Model, attention: Attention, shape: RoleShape, choice: BlockChoice) -> LayerSpec:
    slots, content = attention_token_bytes(model, attention, shape)
    block = choice.block_size
    if attention.kind == "sliding":
        block = backend_of(shape).largest_within(block)  # attention.py: a sliding layer chooses its own kernel block
    return LayerSpec(attention.kind, block, slots * content, 0, slots, content, attention.head_size, attention.window)


def layer_spec(model: Model, geometry: Geometry, shape: RoleShape, choice: BlockChoice) -> LayerSpec:
    """One layer's spec on one rank (Attention.get_kv_cache_spec, MambaBase.get_kv_cache_spec)."""
    if isinstance(geometry, Attention):
        return _attention_spec(model, geometry, shape, choice)
    return LayerSpec(
        "state",
        choice.state_block,
        state_bytes=state_bytes(model, geometry, shape),
        padded=choice.padded_state,
        speculative_blocks=shape.speculative_tokens,
        state_mode=shape.state_mode,
        state_shapes=state_shapes(geometry, shape),
    )


def specs_by_layer(model: Model, shape: RoleShape, choice: BlockChoice) -> tuple[SpecLayers, list[int]]:
    """Specs with the indices of their layers, in the model's order, and the decoder layer of each index.

    The drafter's layers follow the model's, on the last pipeline stage, when speculative tokens are asked for.
    """
    made: dict[Geometry, LayerSpec] = {}
    found: SpecLayers = {}
    decoder: list[int] = []
    drafter = model.drafter if shape.speculative_tokens else ()
    layers = [(layer.decoder_layer, layer.geometry) for layer in model.layers]
    layers += [(model.decoder_layers - 1, geometry) for geometry in drafter]
    for index, (place, geometry) in enumerate(layers):
        spec = made.get(geometry)
        if spec is None:
            spec = made[geometry] = layer_spec(model, geometry, shape, choice)
        found.setdefault(spec, []).append(index)
        decoder.append(place)
    return found, decoder
