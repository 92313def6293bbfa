"""Per rank: what one page of each layer costs. The planner's counterpart of vLLM's v1/kv_cache_interface.py.

A page is what one layer stores in one block. An attention page grows with the block; a state page does not.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import prod

from pdlaunch.errors import PlanError

from .layers import Attention, Model, Recurrent, ShardError, State
from .shape import BACKENDS, DTYPE_BYTES, Backend, RoleShape

_PACKED_MLA = {"fp8_ds_mla": 656, "nvfp4_ds_mla": 352}  # bytes per token; mla_attention.py get_kv_cache_spec


@dataclass(frozen=True, slots=True)
class LayerSpec:
    """One layer's cache on one rank. Equal specs share a group.

    kind: full, sliding, chunked, mla, indexer or state. block_size in tokens (for a state: the tokens one state stands for).
    token_bytes: bytes per token of all its heads; state_bytes: bytes of one state. padded: page size after padding, if padded.
    head_slots, content_bytes (per head slot and token), head_size and state_shapes tell apart layers whose bytes happen to be equal.
    """

    kind: str
    block_size: int
    token_bytes: int = 0
    state_bytes: int = 0
    head_slots: int = 1
    content_bytes: int = 0
    head_size: int = 0
    window: int | None = None
    padded: int | None = None
    speculative_blocks: int = 0
    state_mode: str = "none"
    promoted_window: int | None = None
    promoted_chunk: int | None = None
    state_shapes: tuple[tuple[int, ...], ...] = ()

    @property
    def natural_page_bytes(self) -> int:
        return self.state_bytes if self.kind == "state" else self.token_bytes * self.block_size

    @property
    def page_bytes(self) -> int:
        return self.natural_page_bytes if self.padded is None else self.padded

    @property
    def is_state(self) -> bool:
        return self.kind == "state"

    @property
    def is_full(self) -> bool:
        """Keeps every token: full attention, MLA and its indexer."""
        return self.kind in ("full", "mla", "indexer")

    def storage(self) -> LayerSpec:
        """The spec without what only attention sees: full layers that differ in a promoted window share a page format."""
        return replace(self, promoted_window=None, promoted_chunk=None)


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)


def heads_per_rank(total: int, tp: int) -> int:
    """ModelConfig.get_num_kv_heads: at least one head, so tp > total means copies."""
    return max(1, total // tp)


def head_replication(total: int, tp: int) -> int:
    """Ranks that hold the same KV head."""
    return max(1, tp // total)


def model_dtype(model: Model, shape: RoleShape) -> str:
    """ModelConfig: auto takes the config's dtype, but float32 weights are served in the platform's first dtype (bfloat16)."""
    if shape.dtype != "auto":
        return {"half": "float16", "float": "float32"}.get(shape.dtype, shape.dtype)
    return "bfloat16" if model.dtype == "float32" else model.dtype


def element_bytes(kv_dtype: str, fallback: str) -> int:
    name = fallback if kv_dtype == "auto" else kv_dtype
    if name not in DTYPE_BYTES:
        raise PlanError(f"kv_cache_dtype {name!r} is not priced", rule=f"known: {', '.join(sorted(DTYPE_BYTES))}")
    return DTYPE_BYTES[name]


def _slots_and_content(attention: Attention, heads: int, kv_dtype: str, size: int) -> tuple[int, int]:
    """Head slots and bytes per slot and token (AttentionSpec, customize_spec of the backend that owns the packing)."""
    k, v = attention.head_size, attention.head_size_v
    if attention.kind == "indexer":
        return 1, k  # uint8 keys with their scales inside, whatever the KV dtype
    if attention.kind == "mla":
        return 1, _PACKED_MLA.get(kv_dtype, (k + v) * size)
    if kv_dtype.startswith("nvfp4"):
        return 2 * heads, k // 2 + k // 16  # flashinfer.py: K and V in slots of their own, fp4 data and fp8 scales
    if kv_dtype.endswith("_per_token_head"):
        k, v = (k // 2, v // 2) if kv_dtype.startswith("int4") else (k, v)
        return heads, (k + v) * size + 2 * 4  # triton_attn.py: one fp32 scale beside K and one beside V
    return heads, (k + v) * size


def attention_token_bytes(model: Model, attention: Attention, shape: RoleShape) -> tuple[int, int]:
    """(head slots, content bytes) of one layer on one rank."""
    size = element_bytes(shape.kv_cache_dtype, model_dtype(model, shape))
    return _slots_and_content(attention, heads_per_rank(attention.kv_heads, shape.tensor_parallel), shape.kv_cache_dtype, size)


def state_dtypes(model: Model, shape: RoleShape) -> tuple[int, int]:
    """Bytes per element of convolution and recurrent state (MambaStateDtypeCalculator, models/config.py).

    auto: the model's pinned dtype (Qwen3.5 mamba_ssm_dtype, Nemotron-H float32) for the recurrent part, else that of the conv part.
    """
    conv = model_dtype(model, shape) if shape.mamba_cache_dtype == "auto" else shape.mamba_cache_dtype
    ssm = shape.mamba_ssm_cache_dtype
    if ssm == "auto":
        ssm = model.ssm_dtype or conv
    if ssm == "auto":
        ssm = conv
    return element_bytes(conv, conv), element_bytes(ssm, ssm)


def state_shapes(recurrent: Recurrent, shape: RoleShape) -> State:
    """Shapes of one state on one rank. PlanError when TP does not divide it, as vLLM's `divide` refuses."""
    try:
        return recurrent.shapes(shape.tensor_parallel, shape.speculative_tokens)
    except ShardError as error:
        raise PlanError(str(error), rule="vLLM shards recurrent state evenly (vllm.distributed.utils.divide)") from error


def state_bytes(model: Model, recurrent: Recurrent, shape: RoleShape) -> int:
    """Bytes of one state of one layer on one rank."""
    sizes = state_dtypes(model, shape)
    return sum(prod(dims) * size for dims, size in zip(state_shapes(recurrent, shape), sizes, strict=False))


def backend_of(shape: RoleShape) -> Backend:
    if shape.backend not in BACKENDS:
        raise PlanError(f"unknown attention backend {shape.backend!r}", rule=f"known: {', '.join(sorted(BACKENDS))}")
    return BACKENDS[shape.backend]
