"""Pairs of roles: what would be refused or answered wrongly, the fix, and its price."""

from __future__ import annotations

import json

import pytest

from pdlaunch.errors import PlanError
from pdlaunch.planner.capacity import capacity, plan_layout
from pdlaunch.planner.compat import check_concurrency, check_pair, check_roles
from pdlaunch.planner.families import read_model
from pdlaunch.planner.pair import PER_GROUP_PATCH, PER_REGION_PATCH
from pdlaunch.planner.rules import Finding
from pdlaunch.planner.shape import RoleShape
from pdlaunch.planner.transfer import transfer
from tests.planner.models import GEMMA4, QWEN_POST, layout, model

GEMMA = RoleShape(max_model_len=9216, block_size=64, hybrid_manager=False)
QWEN = RoleShape().with_changes(**QWEN_POST)


def errors(found: list[Finding]) -> list[str]:
    return [f.code for f in found if f.severity == "error"]


def codes(name: str, prefill: RoleShape, decode: RoleShape, *patches: str) -> list[str]:
    return errors(check_roles(model(name), prefill, decode, frozenset(patches)))


def tp(shape: RoleShape, size: int, **changes: object) -> RoleShape:
    return shape.with_changes(tensor_parallel=size, **changes)


@pytest.mark.parametrize("prefill", [1, 2, 4, 8])
@pytest.mark.parametrize("decode", [1, 2, 4, 8])
def test_stock_gemma4_matrix_with_the_hybrid_manager_off(prefill: int, decode: int) -> None:
    """Measured on vLLM 0.31.0: a pair with TP8 on one side only is refused, everything else works."""
    refused = prefill != decode and 8 in (prefill, decode)
    assert codes("gemma-4-31b-it", tp(GEMMA, prefill), tp(GEMMA, decode)) == (["mixed-heads"] if refused else [])
    assert codes("gemma-4-31b-it", tp(GEMMA, prefill), tp(GEMMA, decode), PER_REGION_PATCH) == []


@pytest.mark.parametrize(("prefill", "decode", "stock"), [(1, 2, True), (2, 4, True), (4, 8, False), (1, 8, False), (4, 4, True)])
def test_gemma4_with_the_hybrid_manager_on_needs_both_patches(prefill: int, decode: int, stock: bool) -> None:
    on = GEMMA.with_changes(hybrid_manager=True)
    assert codes("gemma-4-31b-it", tp(on, prefill), tp(on, decode)) == ([] if stock else ["mixed-heads"])
    assert codes("gemma-4-31b-it", tp(on, prefill), tp(on, decode), PER_REGION_PATCH) == ([] if stock else ["mixed-heads"])
    assert codes("gemma-4-31b-it", tp(on, prefill), tp(on, decode), PER_REGION_PATCH, PER_GROUP_PATCH) == []


def test_prefill_above_decode_with_the_manager_on_cannot_be_patched() -> None:
    on = GEMMA.with_changes(hybrid_manager=True)
    assert codes("gemma-4-31b-it", tp(on, 8), tp(on, 4), PER_REGION_PATCH, PER_GROUP_PATCH) == ["mixed-heads-direction"]


def test_the_fix_of_mixed_heads_names_the_patch_and_what_the_manager_off_costs() -> None:
    on = GEMMA.with_changes(hybrid_manager=True, gpu_memory_gib=80.0)
    found = [f for f in check_roles(model("gemma-4-31b-it"), tp(on, 4), tp(on, 8), frozenset()) if f.code == "mixed-heads"]
    assert PER_REGION_PATCH in found[0].fix
    assert PER_GROUP_PATCH in found[0].fix
    assert found[0].price_requests is not None
    assert found[0].price_requests > 150
    assert "full 4 x 512: 1 -> 1" in found[0].message
    assert "4 -> 2" in found[0].message


@pytest.mark.parametrize(
    ("change", "code"),
    [
        ({"hybrid_manager": True}, "hybrid-manager"),
        ({"kv_cache_dtype": "fp8"}, "kv-dtype"),
        ({"dtype": "float16"}, "dtype"),
        ({"backend": "TRITON_ATTN"}, "attention-backend"),
        ({"block_size": 32}, "block-size"),
        ({"max_model_len": 4096}, "max-model-len-pair"),
    ],
)
def test_what_must_be_equal_on_both_roles(change: dict[str, object], code: str) -> None:
    assert code in codes("gemma-4-31b-it", GEMMA, GEMMA.with_changes(**change))


def test_a_drafter_on_one_role_only_is_refused_at_the_handshake() -> None:
    drafting = tp(QWEN, 8, speculative_tokens=3)
    assert "speculation" in codes("qwen3.8-2.4t", tp(QWEN, 8), drafting)
    assert "speculation" not in codes("qwen3.8-2.4t", drafting, tp(QWEN, 8, speculative_tokens=1))


def test_ratio_of_tensor_parallel_sizes() -> None:
    config = {**json.loads(GEMMA4.read_text())}
    config["num_attention_heads"], config["num_key_value_heads"] = 48, 24
    config["per_layer_config"] = {}
    config["num_global_key_value_heads"] = 24
    found = check_pair(config, tp(GEMMA, 3), tp(GEMMA, 8))
    assert errors(found) == ["tp-ratio"]


def test_a_role_that_cannot_start_is_reported_before_the_pair() -> None:
    assert codes("llama-3.1-8b", tp(RoleShape(), 5), tp(RoleShape(), 8))[0] == "tp-attention-heads"
    assert codes("qwen3-next-80b-a3b", RoleShape(hybrid_manager=False), RoleShape(hybrid_manager=False)) == ["role-refused"] * 2


def test_recurrent_blocks() -> None:
    """TP4 settles on 2112 and TP8 on 1056. Legal in whole kernel blocks without prefix caching, and never with it."""
    qwen = "qwen3.8-2.4t"
    assert codes(qwen, tp(QWEN, 8), tp(QWEN, 4)) == []
    cached = QWEN.with_changes(prefix_caching=True)
    assert codes(qwen, tp(cached, 8), tp(cached, 4)) == ["state-blocks-prefix"]
    mtp = QWEN.with_changes(speculative_tokens=3, backend="FLASHINFER_SM100")
    assert codes(qwen, tp(mtp, 4), tp(mtp, 8)) == ["kernel-blocks"]
    flash = QWEN.with_changes(backend="FLASH_ATTN", speculative_tokens=3)
    assert codes(qwen, tp(flash, 4), tp(flash, 8)) == ["kernel-blocks"]
    assert codes(qwen, tp(flash, 8), tp(flash, 4)) == []


def test_the_fix_of_recurrent_blocks_has_its_price() -> None:
    mtp = QWEN.with_changes(speculative_tokens=3, backend="FLASHINFER_SM100", kv_cache_memory_bytes=83 << 30)
    found = [f for f in check_roles(model("qwen3.8-2.4t"), tp(mtp, 4), tp(mtp, 8), frozenset()) if f.code == "kernel-blocks"]
    assert found[0].fix == "block_size: 2176 on both roles"
    assert found[0].price_requests == 302 - 196


def test_sequences_against_the_cache() -> None:
    small = tp(QWEN, 8, kv_cache_memory_bytes=1 << 30, max_num_seqs=512)
    found = check_roles(model("qwen3.8-2.4t"), small, small, frozenset())
    assert "seqs-above-blocks" in errors(found)
    assert "seqs-above-capacity" in [f.code for f in found if f.severity == "info"]
    tiny = small.with_changes(kv_cache_memory_bytes=64 << 20)
    assert "does-not-fit" in codes("qwen3.8-2.4t", tiny, tiny)


def test_concurrency_against_copies_sequences_and_cache() -> None:
    assert [f.code for f in check_concurrency(4, 100, 64, 2)] == ["idle-copies"]
    assert [f.code for f in check_concurrency(4, 100, 64, 300)] == ["concurrency-above-seqs"]
    assert [f.code for f in check_concurrency(4, 10, 64, 60)] == ["concurrency-above-capacity"]
    assert check_concurrency(4, 100, 64, 200) == []


def test_unneeded_patch_is_mentioned() -> None:
    found = check_roles(model("llama-3.1-8b"), tp(RoleShape(), 4), tp(RoleShape(), 8), frozenset({PER_REGION_PATCH}))
    assert [f.code for f in found if f.severity == "info" and f.code.startswith("patch")] == ["patch-not-needed"]
    assert errors(found) == []


def test_transfer_of_gemma4_with_and_without_the_hybrid_manager() -> None:
    """T = 8192 to TP8, block 64: (5 x 16 + 128) blocks of 1.25 MiB with the manager on, 128 of 7.5 MiB with it off."""
    on, off = (transfer(layout("gemma-4-31b-it", tensor_parallel=8, block_size=64, hybrid_manager=flag), 8192) for flag in (True, False))
    assert on.bytes_per_rank == (5 * 16 + 128) * 1.25 * (1 << 20)
    assert off.bytes_per_rank == 960 << 20


def test_transfer_of_the_small_model_to_the_byte() -> None:
    """Measured on CPU: nine prompts in 118 blocks of 64 tokens to TP2 in float32 moved 92,798,976 bytes."""
    config = json.loads(GEMMA4.read_text()) | {
        "num_hidden_layers": 6,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
        "per_layer_config": {"5": {"num_key_value_heads": 1, "head_dim": 128}},
        "sliding_window": 64,
    }
    shape = RoleShape(tensor_parallel=2, block_size=64, hybrid_manager=False, dtype="float32", backend="CPU_ATTN")
    decode = plan_layout(read_model(config), shape)
    lengths = [13 * 64] * 8 + [14 * 64]
    assert sum(transfer(decode, tokens).total_bytes for tokens in lengths) == 92_798_976


def test_no_length_is_advised_where_none_fits() -> None:
    small = plan_layout(model("gemma-4-31b-it"), RoleShape(tensor_parallel=8, max_model_len=32768, block_size=64))
    with pytest.raises(PlanError) as none:
        capacity(small, small.block_bytes)
    assert none.value.hint == "more memory, or more tensor parallelism"
    with pytest.raises(PlanError) as some:
        capacity(small, 100 * small.block_bytes)
    assert "max_model_len of at most" in str(some.value.hint)
