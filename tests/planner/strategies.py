"""Random models of every family, small enough that vLLM builds one in 20 ms, and random engine arguments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hypothesis import strategies as st

from pdlaunch.planner.shape import RoleShape

Config = dict[str, Any]
Draw = Callable[[st.SearchStrategy[Any]], Any]
Make = Callable[[Draw], Config]

BASE: Config = {
    "hidden_size": 256,
    "intermediate_size": 256,
    "vocab_size": 768,
    "max_position_embeddings": 1 << 22,
    "dtype": "bfloat16",
    "tie_word_embeddings": True,
}
HEAD_SIZES = (32, 64, 96, 128, 192, 256)
WINDOWS = st.integers(1, 5000)


def _gqa(draw: Draw, architecture: str, model_type: str, max_layers: int = 10) -> Config:
    heads = draw(st.sampled_from([8, 16, 32]))
    kv = draw(st.sampled_from([n for n in (1, 2, 4, 8, 16, heads) if heads % n == 0]))
    return {
        **BASE,
        "architectures": [architecture],
        "model_type": model_type,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "head_dim": draw(st.sampled_from(HEAD_SIZES)),
        "num_hidden_layers": draw(st.integers(1, max_layers)),
    }


def _types(draw: Draw, config: Config, kinds: tuple[str, str]) -> list[str]:
    """Any mix of two kinds of layer, in any order."""
    count = config["num_hidden_layers"]
    types: list[str] = draw(st.lists(st.sampled_from(kinds), min_size=count, max_size=count))
    return types


def llama(draw: Draw) -> Config:
    return _gqa(draw, "LlamaForCausalLM", "llama")


def mistral(draw: Draw) -> Config:
    config = _gqa(draw, "MistralForCausalLM", "mistral")
    return {**config, "sliding_window": draw(st.none() | WINDOWS)}


def qwen3(draw: Draw) -> Config:
    return _gqa(draw, "Qwen3ForCausalLM", "qwen3")


def _sliding(draw: Draw, architecture: str, model_type: str) -> Config:
    config = _gqa(draw, architecture, model_type)
    config["sliding_window"] = draw(WINDOWS)
    if draw(st.booleans()):
        config["layer_types"] = _types(draw, config, ("sliding_attention", "full_attention"))
    return config


def gemma2(draw: Draw) -> Config:
    return _sliding(draw, "Gemma2ForCausalLM", "gemma2")


def gemma3(draw: Draw) -> Config:
    return _sliding(draw, "Gemma3ForCausalLM", "gemma3_text")


def gemma4(draw: Draw) -> Config:
    """Both spellings of per-layer heads, k_eq_v, and layers that share an earlier layer's cache."""
    config = _gqa(draw, "Gemma4ForCausalLM", "gemma4_text")
    config["num_hidden_layers"] = count = draw(st.integers(2, 12))
    middle = _types(draw, config, ("sliding_attention", "full_attention"))[1:-1]
    config["layer_types"] = ["sliding_attention", *middle, "full_attention"]
    kv = st.sampled_from([n for n in (1, 2, 4, 8) if config["num_attention_heads"] % n == 0])
    config |= {
        "sliding_window": draw(WINDOWS),
        "hidden_size_per_layer_input": 0,
        "vocab_size_per_layer_input": 768,
        "enable_moe_block": False,
        "use_double_wide_mlp": False,
        "attention_k_eq_v": draw(st.booleans()),
    }
    if draw(st.booleans()):
        own = {"head_dim": draw(st.sampled_from(HEAD_SIZES)), "num_key_value_heads": draw(kv)}
        config["per_layer_config"] = {str(i): own for i, kind in enumerate(config["layer_types"]) if kind == "full_attention"}
    else:
        config |= {"global_head_dim": draw(st.sampled_from(HEAD_SIZES)), "num_global_key_value_heads": draw(kv)}
    if config["layer_types"][1] == "full_attention":
        config["num_kv_shared_layers"] = draw(st.integers(0, count - 2))
    return config


def gpt_oss(draw: Draw) -> Config:
    config = _gqa(draw, "GptOssForCausalLM", "gpt_oss", 6)
    return {**config, "intermediate_size": 1024, "sliding_window": draw(WINDOWS), "num_local_experts": 1, "num_experts_per_tok": 1}


def llama4(draw: Draw) -> Config:
    config = _gqa(draw, "Llama4ForCausalLM", "llama4_text")
    config |= {
        "attention_chunk_size": draw(st.integers(1, 5000)),
        "num_local_experts": 1,
        "moe_layers": [],
        "intermediate_size_mlp": 64,
        "no_rope_layer_interval": draw(st.integers(1, 5)),
    }
    return config


def deepseek(draw: Draw) -> Config:
    config = _gqa(draw, "DeepseekV3ForCausalLM", "deepseek_v3", 6)
    del config["head_dim"]
    rope = draw(st.sampled_from([16, 32, 64]))
    config |= {
        "num_key_value_heads": config["num_attention_heads"],
        "kv_lora_rank": draw(st.sampled_from([64, 128, 512])),
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": 2 * rope,
        "v_head_dim": 64,
        "q_lora_rank": 64,
        "first_k_dense_replace": 99,
        "n_routed_experts": 1,
        "num_nextn_predict_layers": draw(st.integers(1, 2)),
    }
    return config


def _qwen_hybrid(draw: Draw, architecture: str, model_type: str) -> Config:
    config = _gqa(draw, architecture, model_type, 12)
    values = draw(st.sampled_from([8, 16, 32]))
    config |= {
        "linear_num_key_heads": draw(st.sampled_from([n for n in (4, 8, 16) if n <= values])),
        "linear_num_value_heads": values,
        "linear_key_head_dim": draw(st.sampled_from([32, 64, 128])),
        "linear_value_head_dim": draw(st.sampled_from([32, 64, 128])),
        "linear_conv_kernel_dim": draw(st.integers(2, 5)),
        "num_experts": 0,
        "mlp_only_layers": list(range(16)),
        "moe_intermediate_size": 64,
        "shared_expert_intermediate_size": 64,
        "num_experts_per_tok": 1,
        "layer_types": ["full_attention", *_types(draw, config, ("linear_attention", "full_attention"))[1:]],
    }
    return config


def qwen3_next(draw: Draw) -> Config:
    return _qwen_hybrid(draw, "Qwen3NextForCausalLM", "qwen3_next")


def qwen3_5(draw: Draw) -> Config:
    config = _qwen_hybrid(draw, "Qwen3_5ForCausalLM", "qwen3_5_text")
    pinned = draw(st.sampled_from([None, "float32", "bfloat16"]))
    return {**config, "mtp_num_hidden_layers": 1, **({"mamba_ssm_dtype": pinned} if pinned else {})}


def nemotron_h(draw: Draw) -> Config:
    config = _gqa(draw, "NemotronHForCausalLM", "nemotron_h")
    pattern = "M*" + draw(st.text("M*-", max_size=10))
    config |= {
        "num_hidden_layers": len(pattern),
        "hybrid_override_pattern": pattern,
        "mamba_num_heads": draw(st.sampled_from([8, 16, 32])),
        "mamba_head_dim": draw(st.sampled_from([32, 64])),
        "n_groups": draw(st.sampled_from([1, 2, 8])),
        "ssm_state_size": draw(st.sampled_from([16, 64, 128])),
        "conv_kernel": 4,
        "chunk_size": draw(st.sampled_from([128, 256])),
    }
    ssm = draw(st.sampled_from([None, "float32", "bfloat16"]))
    return {**config, **({"mamba_ssm_cache_dtype": ssm} if ssm else {})}


def jamba(draw: Draw) -> Config:
    config = _gqa(draw, "JambaForCausalLM", "jamba", 10)
    del config["head_dim"]
    period = draw(st.integers(2, 5))
    config |= {
        "hidden_size": 32 * config["num_attention_heads"],
        "num_hidden_layers": draw(st.integers(period, 10)),
        "attn_layer_period": period,
        "attn_layer_offset": draw(st.integers(0, period - 1)),
        "mamba_d_state": draw(st.sampled_from([8, 16, 32])),
        "mamba_d_conv": draw(st.integers(2, 5)),
        "mamba_expand": 2,
        "num_experts": 1,
        "mamba_dt_rank": 16,
    }
    return config


def granite(draw: Draw) -> Config:
    config = _gqa(draw, "GraniteMoeHybridForCausalLM", "granitemoehybrid")
    del config["head_dim"]
    dim = draw(st.sampled_from([32, 64]))
    heads = draw(st.sampled_from([8, 16, 32]))
    config |= {
        "hidden_size": dim * heads // 2,
        "layer_types": ["attention", *_types(draw, config, ("mamba", "attention"))[1:]],
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_n_groups": draw(st.sampled_from([1, 2])),
        "mamba_d_state": draw(st.sampled_from([16, 64, 128])),
        "mamba_d_conv": 4,
        "mamba_expand": 2,
        "num_local_experts": 0,
        "shared_intermediate_size": 64,
    }
    while config["hidden_size"] % (config["num_attention_heads"] * 2):
        config["num_attention_heads"] //= 2
    config["num_key_value_heads"] = min(config["num_key_value_heads"], config["num_attention_heads"])
    return config


def falcon_h1(draw: Draw) -> Config:
    config = _gqa(draw, "FalconH1ForCausalLM", "falcon_h1", 6)
    dim, heads = draw(st.sampled_from([32, 64])), draw(st.sampled_from([16, 32]))
    config |= {
        "mamba_n_heads": heads,
        "mamba_d_head": dim,
        "mamba_d_ssm": dim * heads,
        "mamba_n_groups": draw(st.sampled_from([1, 1, 1, 2])),
        "mamba_d_state": draw(st.sampled_from([16, 64])),
        "mamba_d_conv": 4,
    }
    return config


def lfm2(draw: Draw) -> Config:
    config = _gqa(draw, "Lfm2ForCausalLM", "lfm2")
    del config["head_dim"]
    config |= {
        "hidden_size": 32 * config["num_attention_heads"],
        "conv_dim": draw(st.sampled_from([256, 512, 1024])),
        "layer_types": ["full_attention", *_types(draw, config, ("conv", "full_attention"))[1:]],
        "conv_L_cache": draw(st.integers(2, 5)),
        "block_auto_adjust_ff_dim": False,
        "block_dim": 32 * config["num_attention_heads"],
        "block_ff_dim": 768,
        "block_multiple_of": 32,
        "block_ffn_dim_multiplier": 1.0,
    }
    return config


FAMILIES: dict[str, Make] = {
    f.__name__: f
    for f in (
        llama,
        mistral,
        qwen3,
        gemma2,
        gemma3,
        gemma4,
        gpt_oss,
        llama4,
        deepseek,
        qwen3_next,
        qwen3_5,
        nemotron_h,
        jamba,
        granite,
        falcon_h1,
        lfm2,
    )
}
WITH_DRAFTER = {"deepseek", "qwen3_next", "qwen3_5"}
WITH_STATE = {"qwen3_next", "qwen3_5", "nemotron_h", "jamba", "granite", "falcon_h1", "lfm2"}


def role(draw: Draw, family: str, layers: int) -> RoleShape:
    """Engine arguments of one role. CPU states are float32: with `auto` the CPU platform decides by the machine's AVX-512 support."""
    gpu = ["TRITON_MLA", "FLASHMLA"] if family == "deepseek" else ["FLASH_ATTN", "TRITON_ATTN", "FLASHINFER", "CPU_ATTN"]
    backend = draw(st.sampled_from(gpu))
    cpu = backend == "CPU_ATTN"
    dtypes = ["auto"] if cpu else ["auto", "fp8"]
    if backend == "TRITON_ATTN":
        dtypes += ["fp8_per_token_head", "int8_per_token_head", "int4_per_token_head"]
    states = st.sampled_from(["float32"]) if cpu else st.sampled_from(["auto", "float32", "bfloat16"])
    prefix = draw(st.booleans())
    step = 64 if backend == "FLASHMLA" else 32 if cpu else 16
    return RoleShape(
        tensor_parallel=draw(st.sampled_from([1, 2, 4, 8, 1, 2, 4, 16, 3])),
        pipeline_parallel=draw(st.sampled_from([1, 1, 1, 2])) if layers >= 2 and family not in WITH_STATE else 1,
        max_model_len=draw(st.integers(1, 20000)),
        max_num_batched_tokens=draw(st.sampled_from([256, 1000, 2048, 8192, 16384])),
        block_size=draw(st.none() | st.integers(1, 12).map(lambda n: n * step)),
        kv_cache_dtype=draw(st.sampled_from(dtypes)),
        dtype=draw(st.sampled_from(["auto", "bfloat16", "float16"])),
        mamba_cache_dtype="auto" if cpu else draw(st.sampled_from(["auto", "float32"])),
        mamba_ssm_cache_dtype=draw(states),
        mamba_cache_mode=draw(st.sampled_from([None, "align", "all"])) if family in ("nemotron_h", "jamba") and prefix else None,
        prefix_caching=prefix,
        hybrid_manager=draw(st.sampled_from([True] * (9 if family in WITH_STATE else 1) + [False])),
        backend=backend,
        speculative_tokens=draw(st.integers(0, 4)) if family in WITH_DRAFTER else 0,
        async_scheduling=draw(st.booleans()),
        v2_model_runner=draw(st.booleans()),
    )


@st.composite
def cases(draw: Draw, family: str) -> tuple[Config, RoleShape, tuple[int, ...]]:
    """A model of the family, one role's engine arguments, and the bytes for KV on each pipeline stage."""
    config = FAMILIES[family](draw)
    shape = role(draw, family, config["num_hidden_layers"])
    sizes = [(1 << draw(st.integers(22, 34))) + draw(st.integers(0, 1 << 22)) for _ in range(shape.pipeline_parallel)]
    return config, shape, tuple(sizes)
