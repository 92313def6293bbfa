"""Weights of one rank, counted from the config. An estimate: biases, norms and small projections are left out (well under 1 %).

Given a checkpoint's total size (model.safetensors.index.json metadata.total_size), the count decides only how it is spread.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .config import Fields
from .layers import Attention, GatedDeltaNet, Geometry, Mamba1, Mamba2, Model
from .shape import DTYPE_BYTES, RoleShape
from .specs import heads_per_rank, model_dtype

# Bytes per quantized weight with its scales: nvfp4 4 bit + 8/16, mxfp4 4 bit + 8/32, 4-bit integer groups of 128.
_QUANT_BYTES = {"fp8": 1.0, "nvfp4": 0.5625, "modelopt_fp4": 0.5625, "mxfp4": 0.53125, "awq": 0.53, "gptq": 0.53, "modelopt": 1.0}


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters by how vLLM spreads them: dense (attention, MLP) by TP; experts by TP x DP, with expert parallelism or without
    (fused_moe/config.py flatten_tp_across_dp_and_pcp); copied on every rank."""

    dense: float = 0.0
    experts: float = 0.0
    copied: float = 0.0


def _attention_parameters(fields: Fields, geometry: Attention, tp: int) -> tuple[float, float]:
    """(all parameters, parameters on one rank): query and output shard by heads, K and V by KV heads, at least one per rank."""
    hidden, heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    if geometry.kind == "indexer":
        size = hidden * fields.integer("index_head_dim")
        return float(size), float(size)
    if geometry.kind == "mla":
        nope, rope = fields.integer("qk_nope_head_dim"), fields.integer("qk_rope_head_dim")
        value, rank = fields.integer("v_head_dim"), fields.integer("kv_lora_rank")
        q_rank = fields.integer("q_lora_rank", default=0, minimum=0)
        query = heads * (nope + rope) * (q_rank or hidden)
        sharded = query + rank * heads * (nope + value) + heads * value * hidden
        copied = hidden * (rank + rope) + hidden * q_rank
        return float(sharded + copied), sharded / tp + copied
    query = 2 * hidden * heads * geometry.head_size
    kv = hidden * (geometry.head_size + geometry.head_size_v)
    return float(query + kv * geometry.kv_heads), query / tp + kv * heads_per_rank(geometry.kv_heads, tp)


def _recurrent_parameters(fields: Fields, geometry: Geometry) -> float:
    hidden = fields.integer("hidden_size")
    if isinstance(geometry, GatedDeltaNet):
        keys, values = geometry.key_heads * geometry.key_dim, geometry.value_heads * geometry.value_dim
        return float(hidden * (2 * keys + 2 * values + 2 * geometry.value_heads) + values * hidden)
    if isinstance(geometry, Mamba2):
        inner = 2 * geometry.intermediate + 2 * geometry.groups * geometry.state_size + geometry.heads
        return float(hidden * inner + geometry.intermediate * hidden)
    if isinstance(geometry, Mamba1):
        return float(3 * hidden * geometry.intermediate + geometry.intermediate * (2 * geometry.state_size + hidden // 16))
    return 4.0 * hidden * hidden


def _moe_layers(fields: Fields, layers: int) -> int:
    """Layers with experts: every one, or by the config's own rule."""
    pattern = fields.get("hybrid_override_pattern")
    if isinstance(pattern, str):
        return pattern.count("E")
    first = fields.integer("first_k_dense_replace", default=0, minimum=0)
    step = fields.integer("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_freq", "expert_layer_period", default=1)
    return max(0, layers - first) // step


def _mlp(fields: Fields, layers: int) -> Parameters:
    hidden = fields.integer("hidden_size")
    experts = fields.integer("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts", default=0, minimum=0)
    gates = 2 if fields.get("mlp_hidden_act") == "relu2" else 3
    wide = fields.integer("intermediate_size", default=0, minimum=0)
    pattern = fields.get("hybrid_override_pattern")
    sparse = _moe_layers(fields, layers) if experts else 0
    both = bool(fields.get("enable_moe_block"))  # gemma-4 MoE keeps its dense MLP beside the experts
    dense_layers = pattern.count("-") if isinstance(pattern, str) else layers - (0 if both else sparse)
    narrow = fields.integer("moe_intermediate_size", "expert_intermediate_size", "intermediate_size", default=0, minimum=0)
    shared = fields.integer("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", default=0, minimum=0)
    shared = shared or narrow * fields.integer("n_shared_experts", default=0, minimum=0)
    return Parameters(
        dense=float(gates * hidden * (wide * dense_layers + shared * sparse)),
        experts=float(gates * hidden * narrow * experts * sparse),
        copied=float(hidden * experts * sparse),
    )


def _quant(fields: Fields) -> str | None:
    config = fields.get("quantization_config")
    if not isinstance(config, Mapping):
        return None
    method = str(config.get("quant_method", "")).lower()
    if method in ("compressed-tensors", "modelopt") and "fp4" in str(config).lower():
        return "nvfp4"
    return "fp8" if method == "compressed-tensors" else method


def rank_bytes(model: Model, shape: RoleShape) -> float:
    """Bytes of weights on the fullest rank. When the checkpoint's size is known (model.checkpoint_bytes) the count only spreads it."""
    fields = Fields({"architectures": [model.architecture], **model.text})
    tp, pp = shape.tensor_parallel, shape.pipeline_parallel
    own, total = 0.0, 0.0
    for geometry, count in model.geometries().items():
        if isinstance(geometry, Attention):
            everything, rank = _attention_parameters(fields, geometry, tp)
        else:
            everything = _recurrent_parameters(fields, geometry)
            rank = everything / tp
        own, total = own + rank * count, total + everything * count
    mlp = _mlp(fields, model.decoder_layers)
    expert_ranks = tp * shape.data_parallel
    vocabulary = fields.integer("vocab_size", default=0, minimum=0) * fields.integer("hidden_size")
    tables = 1 if fields.get("tie_word_embeddings") else 2
    unquantized = DTYPE_BYTES[model_dtype(model, shape)]
    quant = _quant(fields)
    linear = _QUANT_BYTES.get(quant or "", float(unquantized))
    dense = float(unquantized) if quant in ("mxfp4",) else linear
    # Without tied tables the first stage holds one and the last the other, so a rank of several stages never holds both.
    rank_tables = vocabulary * (tables if pp == 1 else 1) / tp * unquantized
    rank_total = ((own + mlp.dense / tp + mlp.copied) * dense + mlp.experts / expert_ranks * linear) / pp + rank_tables
    known = model.checkpoint_bytes
    if known is None:
        return rank_total
    whole = (total + mlp.dense + mlp.copied) * dense + mlp.experts * linear + vocabulary * tables * unquantized
    return rank_total * known / whole
