"""Model folders of real size without weights: the published shapes of two gemma-4 models, served with --load-format dummy.

Sources: heads and head sizes are those of vllm#50765 (26B-A4B: 8 sliding, 2 global KV heads) and of the 31B model (16 and 4); widths, layer
counts and experts are those of the published config.json files (hidden 2816, 30 layers, 128 experts of 704, top 8; hidden 5376, 60 layers).
The vocabulary is that of the small recall model, whose tokenizer is used, so the output projection is 400 times smaller than the real one.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

COPIED_FILES = ("tokenizer_config.json", "chat_template.jinja", "generation_config.json")

_COMMON = {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attention_k_eq_v": True,
    "bos_token_id": 2,
    "eos_token_id": [1, 5],
    "pad_token_id": 0,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size_per_layer_input": 0,
    "initializer_range": 0.02,
    "max_position_embeddings": 262144,
    "num_kv_shared_layers": 0,
    "rms_norm_eps": 1e-06,
    "sliding_window": 1024,
    "rope_parameters": {
        "full_attention": {"partial_rotary_factor": 0.25, "rope_theta": 1000000.0, "rope_type": "proportional"},
        "sliding_attention": {"rope_theta": 10000.0, "rope_type": "default"},
    },
    "tie_word_embeddings": True,
    "use_bidirectional_attention": None,
    "use_cache": True,
    "use_double_wide_mlp": False,
}
_SHAPES = {
    "gemma4-26b-a4b": {
        "hidden_size": 2816,
        "intermediate_size": 2112,
        "moe_intermediate_size": 704,
        "num_experts": 128,
        "top_k_experts": 8,
        "enable_moe_block": True,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 30,
        "global_kv_heads": 2,
    },
    "gemma4-31b": {
        "hidden_size": 5376,
        "intermediate_size": 21504,
        "moe_intermediate_size": None,
        "num_experts": None,
        "top_k_experts": None,
        "enable_moe_block": False,
        "num_attention_heads": 32,
        "num_key_value_heads": 16,
        "num_hidden_layers": 60,
        "global_kv_heads": 4,
    },
    # Half of each in every width that tensor parallelism divides: per rank, its engines at TP 1 and 2 hold, send and compute what those of
    # the published model do at TP 2 and 4. For machines with two GPUs.
    "gemma4-26b-a4b-half": {
        "hidden_size": 2816,
        "intermediate_size": 1056,
        "moe_intermediate_size": 352,
        "num_experts": 128,
        "top_k_experts": 8,
        "enable_moe_block": True,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "num_hidden_layers": 30,
        "global_kv_heads": 1,
    },
    "gemma4-31b-half": {
        "hidden_size": 5376,
        "intermediate_size": 10752,
        "moe_intermediate_size": None,
        "num_experts": None,
        "top_k_experts": None,
        "enable_moe_block": False,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "num_hidden_layers": 60,
        "global_kv_heads": 2,
    },
    # Not a published model: the heads of the 26B-A4B in a size that a CPU serves, to try the scripts out.
    "small": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "moe_intermediate_size": None,
        "num_experts": None,
        "top_k_experts": None,
        "enable_moe_block": False,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        "num_hidden_layers": 6,
        "global_kv_heads": 2,
    },
}
NAMES = ("gemma4-26b-a4b", "gemma4-31b", "gemma4-26b-a4b-half", "gemma4-31b-half")


def config(name: str, layers: int = 0, vocab_size: int = 640, experts: int = 0) -> dict[str, object]:
    """config.json of a shape. layers: a multiple of 6 (five sliding, one global) below the published count; 0: the published count.

    experts: another number of experts than published; 0: as published."""
    shape = dict(_SHAPES[name])
    global_heads = shape.pop("global_kv_heads")
    count = layers or int(str(shape["num_hidden_layers"]))
    if experts:
        shape["num_experts"] = experts
    if count % 6:
        raise ValueError(f"{name}: {count} layers; the pattern has six")
    globals_at = range(5, count, 6)
    return {
        **_COMMON,
        **shape,
        "num_hidden_layers": count,
        "vocab_size": vocab_size,
        "vocab_size_per_layer_input": vocab_size,
        "layer_types": ["full_attention" if i in globals_at else "sliding_attention" for i in range(count)],
        "per_layer_config": {str(i): {"head_dim": 512, "num_key_value_heads": global_heads} for i in globals_at},
    }


def write(name: str, folder: Path, tokenizer_of: Path, layers: int = 0, experts: int = 0) -> Path:
    """A folder that vLLM can serve with --load-format dummy."""
    folder.mkdir(parents=True, exist_ok=True)
    vocab_size = json.loads((tokenizer_of / "config.json").read_text(encoding="utf-8"))["vocab_size"]
    (folder / "config.json").write_text(json.dumps(config(name, layers, vocab_size, experts), indent=1) + "\n", encoding="utf-8")
    (folder / "tokenizer.json").write_text(plain_tokenizer((tokenizer_of / "tokenizer.json").read_text(encoding="utf-8")), encoding="utf-8")
    for file in COPIED_FILES:
        shutil.copyfile(tokenizer_of / file, folder / file)
    return folder


def plain_tokenizer(text: str) -> str:
    """tokenizer.json without special tokens: random weights answer with padding, and a special token is shown as no text at all."""
    tokenizer = json.loads(text)
    for token in tokenizer["added_tokens"]:
        token["special"] = False
    return json.dumps(tokenizer, ensure_ascii=False) + "\n"
