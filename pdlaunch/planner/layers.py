"""What a model keeps per layer, before tensor parallelism touches it.

A layer keeps either tokens (an attention layer: some bytes for every token it may still read) or one state per request (a
recurrent layer: some bytes whatever the context length). Everything else in this package follows from this table.
"""

from __future__ import annotations

from dataclasses import dataclass, field

State = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Attention:
    """One attention layer of the whole model.

    kind: "full", "sliding", "chunked" (Llama 4 local attention), "mla" (one latent vector per token), "indexer" (the key cache
    of DeepSeek sparse attention). kv_heads: of the model, not of a rank. window: tokens a sliding or chunked layer may read.
    """

    kind: str
    kv_heads: int
    head_size: int
    head_size_v: int
    window: int | None = None

    @property
    def label(self) -> str:
        heads = f"{self.kv_heads} x {self.head_size}"
        return f"{self.kind} {heads}" if self.window is None else f"{self.kind}({self.window}) {heads}"


@dataclass(frozen=True, slots=True)
class GatedDeltaNet:
    """Qwen3-Next, Qwen3.5, Qwen3.8: conv history and one matrix per value head (vllm mamba_utils.gated_delta_net_state_shape)."""

    key_heads: int
    value_heads: int
    key_dim: int
    value_dim: int
    conv_kernel: int
    kind: str = "gdn"

    def shapes(self, tp: int, speculative_tokens: int) -> State:
        heads = divide(self.value_heads, tp, "gated DeltaNet value heads")
        channels = 2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim
        rows = self.conv_kernel - 1 + speculative_tokens
        return (rows, divide(channels, tp, "gated DeltaNet convolution channels")), (heads, self.value_dim, self.key_dim)

    @property
    def label(self) -> str:
        return f"gated DeltaNet {self.value_heads} x {self.value_dim} x {self.key_dim}"


@dataclass(frozen=True, slots=True)
class Mamba1:
    """Jamba: vllm mamba_utils.mamba1_state_shape; it has no slots for speculative tokens in its convolution."""

    intermediate: int
    state_size: int
    conv_kernel: int
    kind: str = "mamba1"

    def shapes(self, tp: int, speculative_tokens: int) -> State:
        width = divide(self.intermediate, tp, "Mamba channels")
        return (self.conv_kernel - 1, width), (width, self.state_size)

    @property
    def label(self) -> str:
        return f"Mamba-1 {self.intermediate} x {self.state_size}"


@dataclass(frozen=True, slots=True)
class Mamba2:
    """Nemotron-H, Bamba, Granite 4, Falcon-H1: vllm mamba_utils.mamba2_state_shape.

    When the groups do not divide by TP, vLLM adds groups until every rank has the one its heads need
    (extra_groups_for_head_shards): the convolution state then shrinks less than 1/TP.
    speculative_rows: whether the family's convolution keeps a row per speculative token.
    """

    intermediate: int
    groups: int
    heads: int
    head_dim: int
    state_size: int
    conv_kernel: int
    speculative_rows: bool = True
    kind: str = "mamba2"

    def shapes(self, tp: int, speculative_tokens: int) -> State:
        heads = divide(self.heads, tp, "Mamba heads")
        if self.groups % tp and self.groups != 1:
            raise ShardError(f"{self.groups} Mamba groups do not divide by tensor parallel size {tp}, and are not 1")
        groups = self.groups if self.groups % tp == 0 else tp
        conv_dim = self.intermediate + 2 * groups * self.state_size
        rows = self.conv_kernel - 1 + (speculative_tokens if self.speculative_rows else 0)
        return (rows, divide(conv_dim, tp, "Mamba convolution channels")), (heads, self.head_dim, self.state_size)

    @property
    def label(self) -> str:
        return f"Mamba-2 {self.heads} x {self.head_dim} x {self.state_size}"


@dataclass(frozen=True, slots=True)
class ShortConv:
    """LFM2: a convolution window and nothing else (vllm mamba_utils.short_conv_state_shape)."""

    channels: int
    conv_kernel: int
    kind: str = "short_conv"

    def shapes(self, tp: int, speculative_tokens: int) -> State:
        return ((self.conv_kernel - 1 + speculative_tokens, divide(self.channels, tp, "convolution channels")),)

    @property
    def label(self) -> str:
        return f"short convolution {self.channels} x {self.conv_kernel}"


Recurrent = GatedDeltaNet | Mamba1 | Mamba2 | ShortConv
Geometry = Attention | GatedDeltaNet | Mamba1 | Mamba2 | ShortConv


class ShardError(ValueError):
    """A dimension that vLLM divides by the tensor parallel size does not divide (vllm.distributed.utils.divide)."""


def divide(total: int, parts: int, what: str) -> int:
    if total % parts:
        raise ShardError(f"{total} {what} do not divide by tensor parallel size {parts}")
    return total // parts


@dataclass(frozen=True, slots=True)
class CacheLayer:
    """One cache that one decoder layer owns. decoder_layer places it in a pipeline stage; drafter layers follow the last one."""

    decoder_layer: int
    geometry: Geometry


@dataclass(frozen=True)
class Model:
    """All that the planner reads from a HF config.

    kv_heads and head_size are vLLM's model-wide values (ModelConfig.get_total_num_kv_heads, get_head_size: the maximum over
    layers); they decide the hybrid block size and appear in the transfer handshake.
    drafter: the caches that the model's own MTP head adds, empty when the family has none.
    hybrid: vLLM's ModelConfig.is_hybrid (recurrent and attention layers together).
    copies_heads: the model class gives a rank at least one KV head (gpt-oss does not: TP above its KV heads fails).
    refuses_float16: ModelConfig's own list. assumed: priced by --assume-gqa.
    shared_from: (layer, earlier layer whose cache it reads) for layers without a cache of their own.
    checkpoint_bytes: weights of the whole checkpoint, where one lies beside the config.
    """

    name: str
    architecture: str
    family: str
    dtype: str
    attention_heads: int
    kv_heads: int
    head_size: int
    decoder_layers: int
    layers: tuple[CacheLayer, ...]
    drafter: tuple[Geometry, ...] = ()
    hybrid: bool = False
    uses_mla: bool = False
    ssm_dtype: str | None = None
    mamba_chunk_size: int = 2048
    state_mode_all: bool = False
    attention_chunk_size: int | None = None
    max_position: int | None = None
    assumed: bool = False
    copies_heads: bool = True
    shared_from: tuple[tuple[int, int], ...] = ()
    checkpoint_bytes: int | None = None
    refuses_float16: bool = False
    text: dict[str, object] = field(default_factory=dict, repr=False, compare=False, hash=False)

    def attention_kinds(self) -> dict[Attention, int]:
        return {g: n for g, n in self.geometries().items() if isinstance(g, Attention)}

    def geometries(self) -> dict[Geometry, int]:
        """Distinct layer geometries with their counts, in order of first appearance; the drafter is not included."""
        found: dict[Geometry, int] = {}
        for layer in self.layers:
            found[layer.geometry] = found.get(layer.geometry, 0) + 1
        return found
