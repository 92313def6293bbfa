"""Heads and reads of a hand-off: against measured runs, the planner's bytes, and what the planner refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlaunch import cluster, modelcheck, recipe
from pdlaunch.errors import PlanError
from pdlaunch.geometry import LayerKind, hand_off, heads_of_rank, heads_per_rank, layer_kinds
from pdlaunch.job import config_path
from pdlaunch.planner.capacity import Layout, plan_layout
from pdlaunch.planner.compat import check_pair
from pdlaunch.planner.config import load_config
from pdlaunch.planner.families import read_model
from pdlaunch.planner.shape import RoleShape
from pdlaunch.planner.specs import model_dtype
from pdlaunch.planner.transfer import transfer
from tests.golden_cases import CASES, ROOT, build

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


def read_bytes(kinds: list[LayerKind], p: int, d: int, kept_tokens: dict[str, int], dtype_bytes: int) -> int:
    """Bytes of every drawn read, where the blocks handed over hold so many tokens of each kind of layer."""
    by_name = {kind.name: kind for kind in kinds}
    total = 0
    for read in hand_off(kinds, p, d):
        kind = by_name[read.kind]
        head_bytes = (kind.head_size_k + kind.head_size_v) * dtype_bytes
        total += len(read.heads) * head_bytes * len(kind.layers) * kept_tokens[kind.name]
    return total


def test_bytes_equal_two_measured_runs_of_the_tiny_model() -> None:
    """TP1 -> TP2, float32, block 64, over real NIXL: nine prompts of 118 blocks, and nine of 126, in 18 transfers each."""
    for blocks, measured in ((118, 92_798_976), (126, 99_090_432)):
        kept = dict.fromkeys(("sliding_attention", "full_attention"), 64 * blocks)
        assert read_bytes(layer_kinds(TINY), 1, 2, kept, 4) == measured


def test_pages_of_gemma_31b() -> None:
    """bf16, block 64: the numbers of the reported assertion."""
    sliding, full = ([64 * heads_per_rank(k.kv_heads, tp) * 2 * k.head_size_k * 2 for tp in TP] for k in GEMMA_31B)
    assert sliding == [1048576, 524288, 262144, 131072]
    assert full == [524288, 262144, 131072, 131072]


def blocks_seen(tokens: int, block: int, window: int) -> int:
    """Blocks with a token that the next query can see, one by one."""
    return len({at // block for at in range(max(0, tokens - window + 1) if window else 0, tokens)})


def kept_tokens(layout: Layout, kinds: list[LayerKind], tokens: int) -> dict[str, int]:
    """Kind of layer -> tokens that the blocks of its groups hold together, from the planner's choice of blocks alone."""
    kept = {}
    for kind in kinds:
        wanted = "sliding" if kind.name == "sliding_attention" and layout.shape.hybrid_manager else "full"
        (block, window) = {(g.first.block_size, g.first.window or 0) for g in layout.groups if g.first.kind == wanted}.pop()
        kept[kind.name] = block * blocks_seen(tokens, block, window if wanted == "sliding" else 0)
    return kept


PRICED = [c for c in CASES if c[1] in ("local", "local-gpu", "example") and not c[0].startswith("mocker") and "agg" not in c[0]]


@pytest.mark.parametrize(("name", "site"), PRICED)
def test_drawn_reads_planned_bytes_and_the_prediction_of_the_verdict_agree(name: str, site: str) -> None:
    """geometry.py counts heads per read, planner/transfer.py pages per rank, spec.json blocks per group: three ways to one number."""
    found = recipe.load(ROOT / name if name.endswith(".yaml") else ROOT / "recipes" / f"{name}.yaml")
    assert found.engines.prefill is not None
    where = cluster.load(ROOT / "clusters" / f"{site}.yaml")
    config = load_config(config_path(found, where, ROOT))
    model, kinds = read_model(config), layer_kinds(config)
    prediction = build(name, site).spec.proof.prediction
    shape = modelcheck.role_shape(found, "decode", where)
    pair = found.engines.prefill.tensor_parallel, shape.tensor_parallel
    for hybrid in (True, False):
        layout = plan_layout(model, shape.with_changes(hybrid_manager=hybrid))
        width = {"float32": 4, "bfloat16": 2}[model_dtype(model, shape)]
        for tokens in (1, 63, 64, 65, 511, 512, 513, 800, 1023, 1024, 1025, 1088, 8192, 12_503):
            planned = transfer(layout, tokens).total_bytes
            assert read_bytes(kinds, *pair, kept_tokens(layout, kinds, tokens), width) == planned, (hybrid, tokens)
            if hybrid == shape.hybrid_manager and prediction is not None:
                assert prediction.bytes_of_prompt(tokens) == planned, (hybrid, tokens)


@pytest.mark.parametrize(("sliding", "full", "free"), [(16, 4, 4), (8, 2, 2), (4, 1, 1)])
def test_stock_is_refused_in_the_cells_of_the_connectors_matrix(sliding: int, full: int, free: int) -> None:
    """The cells that fail on stock 0.31.0 in patches/tests/test_matrix.py: both sizes above what the global layers split to."""
    config = {**TINY, "architectures": ["Gemma4ForCausalLM"], "sliding_window": 512, "num_attention_heads": 32}
    config |= {"num_key_value_heads": sliding, "per_layer_config": {"5": {"head_dim": 128, "num_key_value_heads": full}}}
    off = RoleShape(max_model_len=4096, block_size=64, hybrid_manager=False)
    for p in TP:
        for d in TP:
            fails = p != d and (max(p, d) > free) and not (sliding == 4 and (p, d) == (4, 8))
            found = check_pair(config, off.with_changes(tensor_parallel=p), off.with_changes(tensor_parallel=d))
            assert any(f.severity == "error" for f in found) == fails, (p, d, found)


@pytest.mark.parametrize(("p", "d"), [(4, 6), (3, 8), (0, 1)])
def test_tp_sizes_that_do_not_divide_are_refused(p: int, d: int) -> None:
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
)
def test_every_decode_rank_gets_each_of_its_heads_exactly_once(heads: int, p: int, d: int) -> None:
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
