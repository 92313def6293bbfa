"""HF configs: what is read of each family, weights against published parameter counts, and configs that cannot be priced."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from pdlaunch.errors import PlanError
from pdlaunch.planner.capacity import plan_layout
from pdlaunch.planner.config import load_config
from pdlaunch.planner.families import FAMILIES, read_model
from pdlaunch.planner.layers import Attention
from pdlaunch.planner.shape import RoleShape
from pdlaunch.planner.specs import head_replication, heads_per_rank
from pdlaunch.planner.weights import rank_bytes
from tests.planner.models import CONFIGS, GEMMA4, layout, model

LLAMA: dict[str, Any] = json.loads((CONFIGS / "llama-3.1-8b.json").read_text())


def without(config: Mapping[str, Any], *keys: str) -> dict[str, Any]:
    return {key: value for key, value in config.items() if key not in keys}


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.json")), ids=lambda path: path.stem)
def test_every_committed_config_names_its_source_and_can_be_planned(path: Path) -> None:
    config = load_config(path)
    assert len(config["_source"]) > 40
    plan_layout(read_model(config, str(path)), RoleShape(max_model_len=4096))


@pytest.mark.parametrize(
    ("name", "billions", "bytes_each"),
    [
        ("llama-3.1-8b", 8.03, 2),
        ("qwen3-32b", 32.8, 2),
        ("gemma-2-27b", 27.2, 2),
        ("gemma-4-31b-it", 30.7, 2),
        ("qwen3-next-80b-a3b", 79.7, 2),
        ("nemotron-h-8b", 8.1, 2),
        ("jamba-v0.1", 51.6, 2),
        ("deepseek-v3", 671, 1),
        ("llama-4-scout", 107.8, 2),
    ],
)
def test_counted_weights_are_the_published_parameters(name: str, billions: float, bytes_each: int) -> None:
    """Within 1.5 %: norms, biases, and the MTP head and towers that a count of the language part leaves out."""
    assert rank_bytes(model(name), RoleShape()) == pytest.approx(billions * 1e9 * bytes_each, rel=0.015)


def test_mxfp4_experts() -> None:
    """The published checkpoint of gpt-oss-120b is 60.8 GiB."""
    assert rank_bytes(model("gpt-oss-120b"), RoleShape()) == pytest.approx(60.8 * (1 << 30), rel=0.015)


def test_a_known_checkpoint_size_is_spread_by_the_count() -> None:
    named = model("qwen3-next-80b-a3b")
    counted, whole = (rank_bytes(named, RoleShape(tensor_parallel=tp)) for tp in (8, 1))
    known = dataclasses.replace(named, checkpoint_bytes=80_000_000_000)
    assert rank_bytes(known, RoleShape(tensor_parallel=8)) == pytest.approx(counted * 80e9 / whole)
    assert counted > whole / 8  # two KV heads on eight ranks, and a router on each


def test_experts_shard_over_data_parallel_ranks_and_attention_does_not() -> None:
    name = "qwen3-next-80b-a3b"
    tp8, tp4dp2, tp4 = (rank_bytes(model(name), RoleShape(tensor_parallel=t, data_parallel=d)) for t, d in ((8, 1), (4, 2), (4, 1)))
    assert tp8 < tp4dp2 < tp4


@pytest.mark.parametrize(
    ("total", "tp", "heads", "copies"), [(16, 4, 4, 1), (16, 8, 2, 1), (4, 4, 1, 1), (4, 8, 1, 2), (4, 16, 1, 4), (1, 1, 1, 1)]
)
def test_heads_per_rank(total: int, tp: int, heads: int, copies: int) -> None:
    assert (heads_per_rank(total, tp), head_replication(total, tp)) == (heads, copies)


def test_gemma4_layers() -> None:
    kinds = model("gemma-4-31b-it").attention_kinds()
    assert kinds == {Attention("sliding", 16, 256, 256, 1024): 50, Attention("full", 4, 512, 512): 10}


def test_mla_is_one_copy_per_rank() -> None:
    """TP does not shrink an MLA cache: 576 values per token and layer on every rank."""
    sizes = {layout("deepseek-v3", backend="FLASHMLA", tensor_parallel=tp).block_bytes for tp in (1, 8)}
    assert sizes == {61 * 64 * 576 * 2}


def test_nvfp4_content() -> None:
    """flashinfer.py:403: per head and side, head/2 bytes of data and head/16 of scales."""
    found = layout("llama-3.1-8b", kv_cache_dtype="nvfp4", backend="FLASHINFER")
    assert found.block_bytes == 32 * 16 * (2 * 8) * (64 + 8)


@pytest.mark.parametrize(
    ("config", "words"),
    [
        (without(LLAMA, "num_hidden_layers"), "num_hidden_layers is missing"),
        (without(LLAMA, "architectures"), "architectures is missing"),
        ({**LLAMA, "num_attention_heads": "32"}, "must be an integer"),
        ({**LLAMA, "num_attention_heads": 0}, "must be at least 1"),
        ({**LLAMA, "num_key_value_heads": 5}, "must divide num_attention_heads (32)"),
        ({**LLAMA, "hidden_size": 4100}, "must divide by num_attention_heads"),
        ({**LLAMA, "torch_dtype": "int8"}, "must be float16, bfloat16 or float32"),
        ({**LLAMA, "layer_types": ["full_attention"], "sliding_window": 9}, "num_hidden_layers is 32"),
        ({**LLAMA, "sliding_window": 9, "layer_types": ["other"] * 32}, "names ['other']"),
        ({**LLAMA, "architectures": ["LamaForCausalLM"]}, "nearest: LlamaForCausalLM"),
        ({**load_config(CONFIGS / "nemotron-h-8b.json"), "num_hidden_layers": 51}, "needs num_hidden_layers (51) letters"),
        ({**LLAMA, "architectures": ["NewModel"], "kv_lora_rank": 512}, "with kv_lora_rank"),
    ],
)
def test_configs_that_cannot_be_priced(config: dict[str, Any], words: str) -> None:
    with pytest.raises(PlanError) as error:
        read_model(config, "somewhere/config.json")
    assert words in str(error.value)


def test_unknown_architecture_needs_the_flag_and_says_so_afterwards() -> None:
    config = {**LLAMA, "architectures": ["BrandNewForCausalLM"]}
    with pytest.raises(PlanError, match="--assume-gqa"):
        read_model(config)
    assumed = read_model(config, assume_gqa=True)
    assert assumed.assumed
    assert plan_layout(assumed, RoleShape()).block_bytes == plan_layout(read_model(LLAMA), RoleShape()).block_bytes


def test_assume_gqa_does_not_hide_another_kind_of_layer() -> None:
    with pytest.raises(PlanError, match="not plain attention"):
        read_model({**LLAMA, "architectures": ["NewModel"], "linear_num_value_heads": 8}, assume_gqa=True)


@pytest.mark.parametrize("text", ["{", "[]", ""])
def test_config_files_that_are_not_objects(tmp_path: Path, text: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(PlanError, match=r"config\.json"):
        load_config(tmp_path)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no such HF config"):
        load_config(tmp_path / "absent")


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama-3.1-8b", {"tensor_parallel": 5}, "Total number of attention heads (32) must be divisible by tensor parallel size (5)"),
        ("gpt-oss-120b", {"tensor_parallel": 16}, "does not copy KV heads"),
        ("gemma-2-27b", {"dtype": "float16"}, "float16"),
        ("qwen3-next-80b-a3b", {"hybrid_manager": False}, "hybrid KV cache manager off"),
        ("llama-3.1-8b", {"pipeline_parallel": 33}, "exceeds the model's 32 layers"),
        ("llama-3.1-8b", {"max_model_len": 200000}, "max_position_embeddings"),
        ("llama-3.1-8b", {"block_size": 24}, "does not suit"),
        ("llama-3.1-8b", {"backend": "MAGIC"}, "unknown attention backend"),
        ("llama-3.1-8b", {"kv_cache_dtype": "fp3"}, "not priced"),
        ("llama-3.1-8b", {"layout": "BLHNC"}, "not priced"),
        ("llama-3.1-8b", {"speculative_tokens": 2}, "does not have"),
        ("nemotron-h-8b", {"tensor_parallel": 16}, "Mamba groups do not divide"),
    ],
)
def test_shapes_that_vllm_refuses(name: str, changes: dict[str, object], words: str) -> None:
    with pytest.raises(PlanError) as error:
        layout(name, max_model_len=4096, **changes) if "max_model_len" not in changes else layout(name, **changes)
    assert words in str(error.value)


def test_every_family_has_a_reader_with_its_source_in_vllm() -> None:
    for _, reader in FAMILIES.values():
        assert "models/" in (reader.__doc__ or "") or "gemma4" in reader.__name__
    assert read_model(load_config(GEMMA4), str(GEMMA4)).family == "sliding/global, mixed heads"
