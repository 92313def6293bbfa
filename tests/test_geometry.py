"""Heads, bytes and the need of the per-region patch: against measured runs and the connector's own matrix."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlaunch.errors import PlanError
from pdlaunch.geometry import LayerKind, hand_off, heads_of_rank, heads_per_rank, layer_kinds, patch_need, transferred_bytes

TP = (1, 2, 4, 8)
SLIDING_31B = LayerKind("sliding_attention", tuple(i for i in range(60) if i % 6 != 5), 16, 256, 256)
GEMMA_31B = [SLIDING_31B, LayerKind("full_attention", tuple(range(5, 60, 6)), 4, 512, 512)]
TINY: dict[str, Any] = {
    "model_type": "gemma4_text",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "hidden_size": 256,
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": 1}},
}


def kinds(sliding: int, full: int) -> list[LayerKind]:
    return [LayerKind("sliding_attention", (0, 1, 2, 3, 4), sliding, 256, 256), LayerKind("full_attention", (5,), full, 512, 512)]


def test_bytes_equal_two_measured_runs_of_the_tiny_model() -> None:
    """TP1 -> TP2, float32, block 64, over real NIXL: nine prompts of 118 blocks, and nine of 126, in 18 transfers each."""
    tiny = layer_kinds(TINY)
    nine = [825] * 8 + [821]
    assert sum(-(-tokens // 64) for tokens in nine) == 117 and sum(nine) == 7421
    assert transferred_bytes(tiny, 2, [64 * 118], 64, 4) == 92_798_976
    assert transferred_bytes(tiny, 2, [862, 869, 873, 868, 872, 867, 865, 869, 861], 64, 4) == 99_090_432
    assert transferred_bytes(tiny, 2, [64 * 118], 64, 2) == 92_798_976 // 2


def test_pages_of_gemma_31b() -> None:
    """bf16, block 64: the numbers of the reported assertion."""
    sliding, full = GEMMA_31B
    assert [64 * sliding.token_bytes(tp, 2) for tp in TP] == [1048576, 524288, 262144, 131072]
    assert [64 * full.token_bytes(tp, 2) for tp in TP] == [524288, 262144, 131072, 131072]


@pytest.mark.parametrize(("sliding", "full", "free"), [(16, 4, 4), (8, 2, 2), (4, 1, 1)])
def test_need_is_the_matrix_of_the_connector(sliding: int, full: int, free: int) -> None:
    """The cells that fail on stock 0.31.0 in patches/tests/test_matrix.py: both sizes above what the global layers split to."""
    for p in TP:
        for d in TP:
            fails = p != d and (max(p, d) > free) and not (sliding == 4 and (p, d) == (4, 8))
            assert patch_need(kinds(sliding, full), p, d).needed == fails, (p, d)


def test_need_says_which_layers_and_how_many_heads() -> None:
    need = patch_need(GEMMA_31B, 4, 8)
    assert need.reasons == (
        "10 full_attention layers (first: layer 5) hold 1 KV heads per rank at prefill TP 4 and 1 at decode TP 8; "
        "stock expects the ratio 4 to 2 of the model-wide 16 KV heads",
    )
    assert need.hybrid_manager_off


def test_uniform_models_need_nothing_except_reads_from_copies() -> None:
    llama = [LayerKind("full_attention", tuple(range(32)), 8, 128, 128)]
    assert not any(patch_need(llama, p, d).needed for p in TP for d in TP)
    assert patch_need(llama, 16, 4).reasons == (
        "prefill TP 16 is above the model-wide 8 KV heads: stock cannot read from prefill ranks that hold copies of a head "
        "when decode TP is smaller",
    )
    assert not patch_need(llama, 4, 16).needed


@pytest.mark.parametrize(("p", "d"), [(4, 6), (3, 8), (0, 1)])
def test_tp_sizes_that_do_not_divide_are_refused(p: int, d: int) -> None:
    with pytest.raises(PlanError, match="one of them divides the other"):
        patch_need(GEMMA_31B, p, d)
    with pytest.raises(PlanError, match="one of them divides the other"):
        hand_off(GEMMA_31B, p, d)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(PlanError, match="6 KV heads over TP 4"):
        heads_per_rank(6, 4)


def test_the_drawing_of_p4_d8() -> None:
    """Prefill rank n is read by decode ranks 2n and 2n + 1: sliding pages in halves, the global head whole by both."""
    reads = {(r.kind, r.decode_rank): r for r in hand_off(GEMMA_31B, 4, 8)}
    assert len(reads) == 16
    for rank in range(8):
        half, whole = reads["sliding_attention", rank], reads["full_attention", rank]
        assert (half.prefill_rank, half.heads, half.whole) == (rank // 2, range(2 * rank, 2 * rank + 2), False)
        assert (whole.prefill_rank, whole.heads, whole.whole) == (rank // 2, range(rank // 2, rank // 2 + 1), True)


def test_copies_are_read_once_when_decode_is_smaller() -> None:
    reads = [r for r in hand_off(GEMMA_31B, 8, 4) if r.kind == "full_attention"]
    assert [(r.decode_rank, r.prefill_rank) for r in reads] == [(0, 0), (1, 2), (2, 4), (3, 6)]
    assert all(r.whole for r in hand_off(GEMMA_31B, 8, 4))


@given(
    st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32]),
    st.integers(0, 5),
    st.integers(0, 5),
    st.integers(1, 5000),
)
def test_every_decode_rank_gets_each_of_its_heads_exactly_once(heads: int, p: int, d: int, tokens: int) -> None:
    p, d = 2**p, 2**d
    kind = LayerKind("full_attention", (0,), heads, 64, 64)
    if any(heads % tp and tp % heads for tp in (p, d)):
        with pytest.raises(PlanError):
            hand_off([kind], p, d)
        return
    reads = hand_off([kind], p, d)
    for rank in range(d):
        got = sorted(head for r in reads if r.decode_rank == rank for head in r.heads)
        assert got == list(heads_of_rank(heads, rank, d))
    assert all(set(r.heads) <= set(heads_of_rank(heads, r.prefill_rank, p)) for r in reads)
    moved = sum(len(r.heads) for r in reads) * -(-tokens // 64) * 64 * 128 * 2
    assert moved == transferred_bytes([kind], d, [tokens], 64, 2)


def test_layer_kinds_of_gemma4_in_its_three_spellings() -> None:
    assert layer_kinds(TINY) == [
        LayerKind("sliding_attention", (0, 1, 2, 3, 4), 4, 64, 64),
        LayerKind("full_attention", (5,), 1, 128, 128),
    ]
    plain = {k: v for k, v in TINY.items() if k not in ("per_layer_config", "layer_types")}
    keys = {**plain, "global_head_dim": 128, "num_global_key_value_heads": 1}
    assert layer_kinds(keys) == layer_kinds(TINY)
    assert layer_kinds({"model_type": "gemma4", "text_config": keys}) == layer_kinds(TINY)
    ungated = layer_kinds({**keys, "attention_k_eq_v": False})
    assert [(k.kv_heads, k.head_size_k) for k in ungated] == [(4, 64), (4, 128)]


def test_layers_that_share_a_cache_hold_none() -> None:
    assert [len(k.layers) for k in layer_kinds({**TINY, "num_kv_shared_layers": 3})] == [3]


def test_layer_kinds_of_other_families() -> None:
    text = {"num_hidden_layers": 12, "num_attention_heads": 32, "num_key_value_heads": 16, "head_dim": 128}
    gemma3 = {"text_config": {"model_type": "gemma3_text", **text}}
    assert [(k.name, len(k.layers), k.kv_heads) for k in layer_kinds(gemma3)] == [("sliding_attention", 10, 16), ("full_attention", 2, 16)]
    qwen3 = {"model_type": "qwen3", "num_hidden_layers": 36, "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
    assert layer_kinds(qwen3) == [LayerKind("full_attention", tuple(range(36)), 8, 128, 128)]
    llama = {"model_type": "llama", "num_hidden_layers": 2, "num_attention_heads": 32, "hidden_size": 4096}
    assert layer_kinds(llama) == [LayerKind("full_attention", (0, 1), 32, 128, 128)]
    oss = {
        "model_type": "gpt_oss",
        "num_hidden_layers": 4,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
    }
    assert [(k.name, k.layers) for k in layer_kinds(oss)] == [("sliding_attention", (0, 2)), ("full_attention", (1, 3))]
    assert not patch_need(layer_kinds(oss), 4, 8).needed


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_hidden_layers": None}, "num_hidden_layers"),
        ({"kv_lora_rank": 512}, "other than grouped-query"),
        ({"layer_types": ["full_attention"]}, "1 layer_types for 6 layers"),
        ({"head_dim": None, "hidden_size": None, "per_layer_config": {}}, "head_dim"),
    ],
)
def test_configs_that_it_cannot_read_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        layer_kinds({**TINY, **change})


def test_the_shipped_tiny_model_has_the_measured_geometry() -> None:
    config = Path(__file__).resolve().parent.parent / "models" / "gemma4-recall-4x1" / "config.json"
    assert layer_kinds(json.loads(config.read_text())) == layer_kinds(TINY)


def test_gemma_31b_from_its_published_config() -> None:
    config = Path(__file__).resolve().parent.parent / "models" / "configs" / "gemma-4-31b-it.json"
    assert layer_kinds(json.loads(config.read_text())) == GEMMA_31B
