"""From a HF config to the caches of its layers, one reader per family.

Each reader says which vLLM model file it follows. A model class that is not listed is refused, because "every layer keeps
num_key_value_heads heads" is wrong for most new models; `assume_gqa` lets a person say that it is right for this one.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from typing import Any

from pdlaunch.errors import PlanError

from .config import Fields
from .layers import Attention, CacheLayer, GatedDeltaNet, Geometry, Mamba1, Mamba2, Model, Recurrent, ShortConv

Reader = Callable[[Fields], dict[str, Any]]

# Fields that say "this is not plain grouped-query attention"; --assume-gqa does not override them.
_NOT_GQA = ("kv_lora_rank", "linear_num_value_heads", "hybrid_override_pattern", "mamba_d_state", "layers_block_type", "ssm_state_size")


def _head_dim(fields: Fields) -> int:
    """ModelArchConfigConvertorBase.get_head_size: head_dim, else hidden_size // num_attention_heads."""
    if fields.has("head_dim"):
        return fields.integer("head_dim")
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if hidden % heads:
        raise fields.error("hidden_size", f"is {hidden}", f"without head_dim it must divide by num_attention_heads ({heads})")
    return hidden // heads


def _kv_heads(fields: Fields) -> int:
    heads = fields.integer("num_attention_heads")
    kv = fields.integer("num_key_value_heads", default=heads)
    if heads % kv:
        raise fields.error("num_key_value_heads", f"is {kv}", f"must divide num_attention_heads ({heads})")
    return kv


def _attention(fields: Fields, kind: str = "full", window: int | None = None) -> Attention:
    size = _head_dim(fields)
    return Attention(kind, _kv_heads(fields), size, size, window)


def _stack(geometries: list[Geometry | None]) -> tuple[CacheLayer, ...]:
    return tuple(CacheLayer(i, g) for i, g in enumerate(geometries) if g is not None)


def _window(fields: Fields) -> int:
    return fields.integer("sliding_window")


def _by_layer_type(fields: Fields, types: list[str], choose: Mapping[str, Geometry | None]) -> tuple[CacheLayer, ...]:
    unknown = sorted(set(types) - set(choose))
    if unknown:
        raise fields.error("layer_types", f"names {unknown}", f"the family knows {sorted(choose)}")
    return _stack([choose[kind] for kind in types])


def plain(fields: Fields) -> dict[str, Any]:
    """Llama, Mistral, Mixtral, Qwen2, Qwen3, Phi, OLMo, Granite, GLM-4: one kind of layer (vllm models/llama.py, qwen3.py).

    A window without layer_types makes every layer local: CacheConfig.sliding_window, which arg_utils.py sets when layer_types is
    absent or names only sliding layers. Qwen needs use_sliding_window for that, Mistral does not.
    """
    count = fields.integer("num_hidden_layers")
    full = _attention(fields)
    qwen = fields.architecture.startswith("Qwen")
    windowed = fields.has("sliding_window") and bool(fields.get("use_sliding_window", not qwen))
    if not windowed:
        return {"layers": _stack([full] * count)}
    if qwen and fields.integer("max_window_layers", default=0, minimum=0):
        rule = "vLLM runs Qwen with a window on every layer or on none (models/qwen2.py)"
        raise fields.error("use_sliding_window", "is true beside max_window_layers", rule)
    sliding = _attention(fields, "sliding", _window(fields))
    types = fields.strings("layer_types", count) or ["sliding_attention"] * count
    return {"layers": _by_layer_type(fields, types, {"full_attention": full, "sliding_attention": sliding})}


def _alternating(fields: Fields, pattern: int) -> dict[str, Any]:
    count = fields.integer("num_hidden_layers")
    types = fields.strings("layer_types", count) or [
        "full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)
    ]
    full, sliding = _attention(fields), _attention(fields, "sliding", _window(fields))
    return {"layers": _by_layer_type(fields, types, {"full_attention": full, "sliding_attention": sliding})}


def gemma2(fields: Fields) -> dict[str, Any]:
    """vllm models/gemma2.py:155; without layer_types every second layer is global (transformers Gemma2Config)."""
    return _alternating(fields, 2)


def gemma3(fields: Fields) -> dict[str, Any]:
    """vllm models/gemma3.py:153; five sliding layers, then one global layer (sliding_window_pattern)."""
    return _alternating(fields, fields.integer("sliding_window_pattern", default=6))


def gpt_oss(fields: Fields) -> dict[str, Any]:
    """vllm models/gpt_oss.py:176: even layers slide, odd layers are global, whatever layer_types says."""
    count = fields.integer("num_hidden_layers")
    full, sliding = _attention(fields), _attention(fields, "sliding", _window(fields))
    return {"layers": _stack([full if i % 2 else sliding for i in range(count)]), "copies_heads": False}


def _gemma4_types(fields: Fields, count: int) -> list[str]:
    types = fields.strings("layer_types", count) or ["full_attention" if (i + 1) % 6 == 0 else "sliding_attention" for i in range(count)]
    return [*types[:-1], "full_attention"]  # Gemma4TextConfig makes the last layer global


def gemma4(fields: Fields) -> dict[str, Any]:
    """vllm models/gemma4.py and transformers_utils/configs/gemma4.py: global layers have their own head size and KV heads.

    Two spellings: per_layer_config (transformers >= 5.15) or global_head_dim, num_global_key_value_heads and attention_k_eq_v.
    k_eq_v saves weights, not cache: vLLM stores K and V for such a layer. The last num_kv_shared_layers read the cache of an
    earlier layer and keep none.
    """
    count = fields.integer("num_hidden_layers")
    heads, kv, size = fields.integer("num_attention_heads"), _kv_heads(fields), fields.integer("head_dim")
    types = _gemma4_types(fields, count)
    per_layer = fields.get("per_layer_config")
    global_size = fields.integer("global_head_dim", default=512)
    k_eq_v = fields.get("attention_k_eq_v", True)
    global_kv = fields.integer("num_global_key_value_heads", default=kv) if k_eq_v else kv
    kept = count - fields.integer("num_kv_shared_layers", default=0, minimum=0)
    found: list[Geometry | None] = []
    kv_seen, size_seen = 0, 0
    for i, kind in enumerate(types):
        if per_layer is not None:
            own = per_layer.get(str(i), per_layer.get(i, {})) if isinstance(per_layer, Mapping) else per_layer[i]
            layer_kv, layer_size = int(own.get("num_key_value_heads", kv)), int(own.get("head_dim", size))
        else:
            layer_kv, layer_size = (global_kv, global_size) if kind == "full_attention" else (kv, size)
        if heads % layer_kv:
            raise fields.error("num_key_value_heads", f"is {layer_kv} on layer {i}", f"must divide num_attention_heads ({heads})")
        kv_seen, size_seen = max(kv_seen, layer_kv), max(size_seen, layer_size)
        window = None if kind == "full_attention" else _window(fields)
        attention = Attention("full" if window is None else "sliding", layer_kv, layer_size, layer_size, window)
        found.append(attention if i < kept else None)
    last = {kind: i for i, kind in enumerate(types[:kept])}
    shared = tuple((i, last[types[i]]) for i in range(kept, count) if types[i] in last)
    return {"layers": _stack(found), "kv_heads": kv_seen, "head_size": size_seen, "shared_from": shared}


def llama4(fields: Fields) -> dict[str, Any]:
    """vllm models/llama4.py:251: layers with rope attend within chunks, every fourth layer is global (no_rope_layers)."""
    count = fields.integer("num_hidden_layers")
    chunk = fields.integer("attention_chunk_size", default=8192)
    interval = fields.integer("no_rope_layer_interval", default=4)
    rope = fields.get("no_rope_layers") or [int((i + 1) % interval != 0) for i in range(count)]
    if len(rope) != count:
        raise fields.error("no_rope_layers", f"has {len(rope)} entries", f"num_hidden_layers is {count}")
    full, local = _attention(fields), _attention(fields, "chunked", chunk)
    return {"layers": _stack([local if flag else full for flag in rope]), "attention_chunk_size": chunk}


def deepseek(fields: Fields) -> dict[str, Any]:
    """vllm models/deepseek_v2.py, mla_attention.py: one latent vector of kv_lora_rank + qk_rope_head_dim per token and layer.

    MLA has one KV head, so every TP rank holds the whole latent cache. With index_topk (V3.2) each layer also keeps indexer
    keys: index_head_dim bytes plus one scale of 4 bytes per 128 (DeepseekV32IndexerCache).
    """
    count = fields.integer("num_hidden_layers")
    latent = fields.integer("kv_lora_rank") + fields.integer("qk_rope_head_dim")
    own: list[Geometry] = [Attention("mla", 1, latent, 0)]
    if fields.has("index_topk"):
        dim = fields.integer("index_head_dim")
        own.append(Attention("indexer", 1, dim + dim // 128 * 4, 0))
    layers = tuple(CacheLayer(i, g) for i in range(count) for g in own)
    drafter = own * fields.integer("num_nextn_predict_layers", default=0, minimum=0)
    return {"layers": layers, "drafter": tuple(drafter), "kv_heads": 1, "head_size": latent, "uses_mla": True}


def _gated_delta_net(fields: Fields) -> GatedDeltaNet:
    return GatedDeltaNet(
        fields.integer("linear_num_key_heads"),
        fields.integer("linear_num_value_heads"),
        fields.integer("linear_key_head_dim"),
        fields.integer("linear_value_head_dim"),
        fields.integer("linear_conv_kernel_dim", default=4),
    )


def _qwen_hybrid(fields: Fields, drafter_key: str) -> dict[str, Any]:
    count = fields.integer("num_hidden_layers")
    interval = fields.integer("full_attention_interval", default=4)
    types = fields.strings("layer_types", count) or [
        "full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in range(count)
    ]
    full = _attention(fields)
    chosen: dict[str, Geometry | None] = {"full_attention": full, "linear_attention": _gated_delta_net(fields)}
    drafter = [full] * fields.integer(drafter_key, default=1, minimum=0)
    return {"layers": _by_layer_type(fields, types, chosen), "drafter": tuple(drafter), "hybrid": set(types) != {"full_attention"}}


def qwen3_next(fields: Fields) -> dict[str, Any]:
    """vllm models/qwen3_next.py; its MTP head is full-attention layers (qwen3_next_mtp.py: num_nextn_predict_layers, or 1)."""
    return _qwen_hybrid(fields, "num_nextn_predict_layers")


def qwen3_5(fields: Fields) -> dict[str, Any]:
    """vllm models/qwen3_5.py (Qwen3.5 and Qwen3.8): as Qwen3-Next, but a pinned mamba_ssm_dtype wins over `auto`
    (models/config.py Qwen3_5ForConditionalGenerationConfig): float32 doubles the state and so doubles the block."""
    ssm = fields.get("mamba_ssm_dtype")
    return {**_qwen_hybrid(fields, "mtp_num_hidden_layers"), "ssm_dtype": None if ssm is None else str(ssm)}


def nemotron_h(fields: Fields) -> dict[str, Any]:
    """vllm models/nemotron_h.py: hybrid_override_pattern, one letter per layer: M state, * attention, - MLP, E experts.
    The state is float32 unless the config or the flag says otherwise (NemotronHForCausalLMConfig)."""
    pattern = str(fields.get("hybrid_override_pattern", ""))
    count = fields.integer("num_hidden_layers", default=len(pattern))
    if len(pattern) != count or set(pattern) - set("M*-E"):
        rule = f"needs num_hidden_layers ({count}) letters out of M, *, - and E"
        raise fields.error("hybrid_override_pattern", f"is {pattern!r}", rule)
    heads, dim = fields.integer("mamba_num_heads"), fields.integer("mamba_head_dim")
    conv = fields.integer("conv_kernel", default=4)
    groups, size = fields.integer("n_groups"), fields.integer("ssm_state_size")
    state = Mamba2(heads * dim, groups, heads, dim, size, conv)
    chosen: dict[str, Geometry | None] = {"M": state, "*": _attention(fields), "-": None, "E": None}
    ssm = str(fields.get("mamba_ssm_cache_dtype", "float32"))
    return {
        "layers": _stack([chosen[letter] for letter in pattern]),
        "hybrid": True,
        "ssm_dtype": ssm,
        "state_mode_all": True,
    }


def _jamba_types(fields: Fields, count: int) -> list[str]:
    period = fields.integer("attn_layer_period", default=8)
    offset = fields.integer("attn_layer_offset", default=4, minimum=0)
    return ["attention" if i % period == offset else "mamba" for i in range(count)]


def jamba(fields: Fields) -> dict[str, Any]:
    """vllm models/jamba.py: Mamba-1 layers with one attention layer every attn_layer_period."""
    count = fields.integer("num_hidden_layers")
    width = fields.integer("mamba_expand", default=2) * fields.integer("hidden_size")
    state = Mamba1(width, fields.integer("mamba_d_state", default=16), fields.integer("mamba_d_conv", default=4))
    chosen: dict[str, Geometry | None] = {"attention": _attention(fields), "mamba": state}
    layers = _by_layer_type(fields, _jamba_types(fields, count), chosen)
    return {"layers": layers, "hybrid": True, "state_mode_all": True}


def _mamba2_of_granite(fields: Fields) -> Mamba2:
    width = fields.integer("mamba_d_ssm", default=fields.integer("mamba_expand", default=2) * fields.integer("hidden_size"))
    heads = fields.integer("mamba_n_heads", default=128)
    size = fields.get("mamba_d_head", "auto")
    dim = width // heads if size == "auto" else fields.integer("mamba_d_head")
    if dim * heads != width:
        raise fields.error("mamba_d_head", f"is {dim}", f"mamba_n_heads ({heads}) x mamba_d_head must equal the width ({width})")
    groups, state = fields.integer("mamba_n_groups", default=1), fields.integer("mamba_d_state", default=256)
    return Mamba2(width, groups, heads, dim, state, fields.integer("mamba_d_conv", default=4), speculative_rows=False)


def granite_hybrid(fields: Fields) -> dict[str, Any]:
    """vllm models/granitemoehybrid.py (Granite 4, Bamba): layer_types of "mamba" and "attention"."""
    count = fields.integer("num_hidden_layers")
    types = fields.strings("layer_types", count) or fields.strings("layers_block_type", count) or ["mamba"] * count
    state, full = _mamba2_of_granite(fields), _attention(fields)
    chosen: dict[str, Geometry | None] = {
        "mamba": state,
        "linear_attention": state,
        "attention": full,
        "full_attention": full,
    }
    hybrid = not set(types) <= {"attention", "full_attention"}
    return {"layers": _by_layer_type(fields, types, chosen), "hybrid": hybrid, "state_mode_all": True}


def falcon_h1(fields: Fields) -> dict[str, Any]:
    """vllm models/falcon_h1.py: every layer has a state and attention side by side."""
    count = fields.integer("num_hidden_layers")
    state, full = _mamba2_of_granite(fields), _attention(fields)
    layers = tuple(CacheLayer(i, g) for i in range(count) for g in (full, state))
    return {"layers": layers, "hybrid": True, "state_mode_all": True}


def lfm2(fields: Fields) -> dict[str, Any]:
    """vllm models/lfm2.py: short convolutions with some full-attention layers."""
    count = fields.integer("num_hidden_layers")
    indices = fields.get("full_attn_idxs", range(count))
    types = fields.strings("layer_types", count) or ["full_attention" if i in indices else "conv" for i in range(count)]
    dim = fields.integer("conv_dim")
    state: Recurrent = ShortConv(dim, fields.integer("conv_L_cache", default=3))
    chosen: dict[str, Geometry | None] = {"full_attention": _attention(fields), "conv": state}
    return {"layers": _by_layer_type(fields, types, chosen), "hybrid": set(types) != {"full_attention"}}


FAMILIES: dict[str, tuple[str, Reader]] = {
    **dict.fromkeys(
        (
            "LlamaForCausalLM",
            "MistralForCausalLM",
            "MixtralForCausalLM",
            "Qwen2ForCausalLM",
            "Qwen2MoeForCausalLM",
            "Qwen3ForCausalLM",
            "Qwen3MoeForCausalLM",
            "Phi3ForCausalLM",
            "OlmoForCausalLM",
            "Olmo2ForCausalLM",
            "GraniteForCausalLM",
            "Glm4ForCausalLM",
            "Glm4MoeForCausalLM",
        ),
        ("plain attention", plain),
    ),
    "Gemma2ForCausalLM": ("sliding/global", gemma2),
    "Gemma3ForCausalLM": ("sliding/global", gemma3),
    "Gemma3ForConditionalGeneration": ("sliding/global", gemma3),
    "Gemma4ForCausalLM": ("sliding/global, mixed heads", gemma4),
    "Gemma4ForConditionalGeneration": ("sliding/global, mixed heads", gemma4),
    "GptOssForCausalLM": ("sliding/global", gpt_oss),
    "Llama4ForCausalLM": ("chunked/global", llama4),
    "Llama4ForConditionalGeneration": ("chunked/global", llama4),
    "DeepseekV2ForCausalLM": ("MLA", deepseek),
    "DeepseekV3ForCausalLM": ("MLA", deepseek),
    "DeepseekV32ForCausalLM": ("MLA with an indexer", deepseek),
    "Qwen3NextForCausalLM": ("gated DeltaNet hybrid", qwen3_next),
    "Qwen3_5ForCausalLM": ("gated DeltaNet hybrid", qwen3_5),
    "Qwen3_5MoeForCausalLM": ("gated DeltaNet hybrid", qwen3_5),
    "Qwen3_5ForConditionalGeneration": ("gated DeltaNet hybrid", qwen3_5),
    "Qwen3_5MoeForConditionalGeneration": ("gated DeltaNet hybrid", qwen3_5),
    "NemotronHForCausalLM": ("Mamba-2 hybrid", nemotron_h),
    "JambaForCausalLM": ("Mamba-1 hybrid", jamba),
    "GraniteMoeHybridForCausalLM": ("Mamba-2 hybrid", granite_hybrid),
    "FalconH1ForCausalLM": ("Mamba-2 beside attention", falcon_h1),
    "Lfm2ForCausalLM": ("short-convolution hybrid", lfm2),
    "Lfm2MoeForCausalLM": ("short-convolution hybrid", lfm2),
}


def _reader(fields: Fields, assume_gqa: bool) -> tuple[str, Reader, bool]:
    name = fields.architecture
    if name in FAMILIES:
        return (*FAMILIES[name], False)
    marks = [key for key in _NOT_GQA if fields.has(key)]
    if assume_gqa and not marks:
        return "assumed plain attention", plain, True
    near = difflib.get_close_matches(name, FAMILIES, 1)
    rule = "the planner prices only model classes whose cache it has read in vLLM's source"
    if marks:
        raise fields.error("architectures", f"is {name!r} with {', '.join(marks)}", rule, "these layers are not plain attention")
    hint = "--assume-gqa prices every layer as num_key_value_heads heads of head_dim" + (f"; nearest: {near[0]}" if near else "")
    raise PlanError(f"unknown architecture {name!r}", rule=rule, hint=hint)


def read_model(config: Mapping[str, Any], source: str = "config.json", *, assume_gqa: bool = False) -> Model:
    """A HF config as the caches of its layers.

    PlanError when the architecture is unknown, a field is missing or two fields contradict each other.
    """
    fields = Fields(config, source)
    family, reader, assumed = _reader(fields, assume_gqa)
    found = reader(fields)
    if not found["layers"]:
        raise fields.error("layer_types", "leave no layer that keeps a cache", "there is nothing to price")
    return Model(
        name=str(config.get("_name_or_path") or config.get("name") or fields.architecture),
        architecture=fields.architecture,
        family=family,
        dtype=fields.dtype(),
        attention_heads=fields.integer("num_attention_heads"),
        kv_heads=found.pop("kv_heads", None) or _kv_heads(fields),
        head_size=found.pop("head_size", None) or _head_dim(fields),
        decoder_layers=fields.integer("num_hidden_layers"),
        mamba_chunk_size=fields.integer("mamba_chunk_size", "chunk_size", default=2048),
        max_position=fields.optional_integer("max_position_embeddings"),
        assumed=assumed,
        refuses_float16=fields.get("model_type") in ("gemma2", "gemma3", "gemma3_text", "glm4"),
        text=dict(fields.text),
        **found,
    )
