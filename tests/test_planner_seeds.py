"""Published figures, each with its reading; where a published reading does not hold, what holds instead."""

from __future__ import annotations

from math import ceil

import pytest

from pdlaunch.planner.memory import graph_error, ledger
from pdlaunch.planner.shape import GIB, MemoryFacts, RoleShape
from pdlaunch.planner.throughput import per_user_rate, total_to_generated
from tests.planner.models import QWEN_POST, cache_of, layout, model

MIB = 1 << 20
QWEN = "qwen3.8-2.4t"


def test_a_token_costs_2_kib_per_attention_layer() -> None:
    """4 KV heads x 256 x (K and V) x 1 byte of fp8, unsharded."""
    assert layout(QWEN, **QWEN_POST).choice.token_bytes == 2 * 1024


def test_a_state_costs_4216_kib_and_is_worth_2108_tokens() -> None:
    """4 MiB recurrent and 120 KiB of convolution history per layer, in bfloat16."""
    choice = layout(QWEN, **QWEN_POST).choice
    assert choice.state_bytes == 4216 * 1024
    assert choice.state_tokens == 2108


@pytest.mark.parametrize(("tp", "block"), [(1, 2112), (2, 2112), (4, 2112), (8, 1056)])
def test_block_is_2112_tokens_until_heads_are_copied(tp: int, block: int) -> None:
    """align(2108, 16) = 2112 holds while the state and the token shrink together; at TP8 the one KV head stays and the state halves."""
    assert layout(QWEN, **QWEN_POST, tensor_parallel=tp).choice.block_size == block


def test_request_of_9216_tokens_is_184_pages_of_4_125_mib() -> None:
    """5 blocks in each of 23 attention layers and one in each of 69 states. In vLLM's terms: 8 pool blocks of 23 pages."""
    found = layout(QWEN, **QWEN_POST)
    price = found.admission(9216)
    page = found.groups[0].first.page_bytes
    assert page == 4.125 * MIB
    assert [len(group.layers) for group in found.groups] == [23, 23, 23, 23]
    assert price.blocks == 8
    assert price.bytes == 184 * page == 759 * MIB


def test_waste_of_12_7_percent_is_of_the_attention_layers() -> None:
    """5 x 2112 slots for 9216 tokens."""
    block = layout(QWEN, **QWEN_POST).choice.block_size
    slots = ceil(9216 / block) * block
    assert 100 * (1 - 9216 / slots) == pytest.approx(12.7, abs=0.05)
    at_tp8 = layout(QWEN, **QWEN_POST, tensor_parallel=8).choice.block_size
    assert 100 * (1 - 9216 / (ceil(9216 / at_tp8) * at_tp8)) == pytest.approx(3.0, abs=0.05)


def test_states_are_37_5_percent_of_the_request_until_tp8() -> None:
    def share(tp: int) -> float:
        found = layout(QWEN, **QWEN_POST, tensor_parallel=tp)
        price = found.admission(9216)
        states = sum(n for n, group in zip(price.by_group, found.groups, strict=True) if group.first.is_state)
        return 100 * states / price.blocks

    assert share(1) == share(4) == 37.5
    assert share(8) == 25.0


def test_5000_total_tokens_are_556_generated_and_10_4_per_user() -> None:
    factor = total_to_generated(8192, 1024)
    assert factor == 9
    assert 5000 / factor == pytest.approx(556, abs=0.5)
    assert per_user_rate(48, 5000 / factor, 2560) == pytest.approx(10.4, abs=0.05)


@pytest.mark.parametrize(
    ("kv_gib", "claimed", "tp", "mtp", "holds"),
    [(83.00, 112, 8, 3, 303), (133.74, 180, 4, 0, 721), (133.74, 180, 4, 3, 315)],
)
def test_112_and_180_requests_divide_by_an_unsharded_price(kv_gib: float, claimed: int, tp: int, mtp: int, holds: int) -> None:
    """The published counts are bytes per GPU over 759 MiB, the price at TP1. A rank pays its own share, and MTP multiplies it."""
    assert int(kv_gib * 1024 / 759) in (claimed - 1, claimed)
    assert int(cache_of(QWEN, kv_gib, **QWEN_POST, tensor_parallel=tp, speculative_tokens=mtp).concurrency) == holds


def test_the_context_is_not_on_the_ladder() -> None:
    """The published 254.5 - 3.13 - 2.90 = 248.5 subtracts a CUDA context. The measured 83.00 and 133.74 GiB close without it."""
    rows = [(8, 0.72, 169.28, 0.57, 0.91, 2.54, 83.00), (4, 1.98, 108.71, 1.72, 8.35, 3.13, 133.74)]
    for tp, non_torch, weights, activation, graphs, context, published in rows:
        facts = MemoryFacts(weights, non_torch, activation, graphs, None, context, measured=True)
        book = ledger(model(QWEN), RoleShape(tensor_parallel=tp, gpu_memory_gib=276.62, memory=facts))
        assert book is not None
        assert book.complete
        assert book.kv_gib == pytest.approx(published, abs=0.015)
        assert book.kv_gib - context != pytest.approx(published, abs=1)
        added = sum(row.gib for row in book.rows if row.gib is not None and not row.inside)
        assert added == pytest.approx(book.kv_gib, abs=1e-6)


def test_public_log_line_to_the_token() -> None:
    """srtctl's test log: TP1 DP16, bfloat16 cache and state, 46.50 GiB left of 276.62 x 0.92 - 168.89 - 2.36 - 3.68 - 33.06."""
    facts = MemoryFacts(168.89, 2.36, 3.68, 33.06, measured=True)
    book = ledger(model(QWEN), RoleShape(gpu_memory_gib=276.62, memory=facts))
    assert book is not None
    assert book.kv_gib == pytest.approx(46.50, abs=0.005)
    found = cache_of(QWEN, 46.50, **{**QWEN_POST, "kv_cache_dtype": "auto"})
    assert found.layout.choice.block_size == 1056
    assert found.layout.choice.state_padding_percent == pytest.approx(0.19, abs=0.005)
    assert found.line == "KV cache size: 394,633 tokens, Maximum concurrency for 10,240 tokens per request: 38.54x"


def test_graph_error_costs_more_requests_than_759_mib_says_and_may_cost_none() -> None:
    """Over-reserving 1.89 GiB is published as 2.5 requests; at the price of a TP8 rank with MTP it is more than twice that. An
    estimate that is too small loses no request: it is an out-of-memory risk."""
    price = layout(QWEN, **QWEN_POST, tensor_parallel=8, speculative_tokens=3).admission(10240)
    over = graph_error(RoleShape(memory=MemoryFacts(graph_estimate_gib=3.5, graph_actual_gib=1.61)), price.bytes)
    assert over is not None
    assert over.error_gib * GIB / (759 * MIB) == pytest.approx(2.5, abs=0.05)
    assert over.requests == pytest.approx(1.89 * GIB / (22 * 12.75 * MIB))
    assert "lost" in over.meaning
    under = graph_error(RoleShape(memory=MemoryFacts(graph_estimate_gib=7.46, graph_actual_gib=9.80)), price.bytes)
    assert under is not None
    assert under.requests < 0
    assert "out-of-memory risk" in under.meaning


def test_mtp_multiplies_the_price_and_changes_the_block() -> None:
    """Four states per layer instead of one, one convolution row per draft, a 24th attention layer that pads every group to 24."""
    without, with_mtp = (layout(QWEN, **QWEN_POST, tensor_parallel=4, speculative_tokens=n) for n in (0, 3))
    assert (without.choice.block_size, with_mtp.choice.block_size) == (2112, 2176)
    assert without.admission(10240).mib == 189.75
    assert with_mtp.admission(10240).mib == 433.5
    assert with_mtp.grouping.padding_layers == 3


def test_float32_states_double_the_block() -> None:
    """The config pins mamba_ssm_dtype float32; only --mamba-ssm-cache-dtype bfloat16 gives 2112."""
    pinned = {**QWEN_POST, "mamba_ssm_cache_dtype": "auto"}
    assert [layout(QWEN, **pinned, tensor_parallel=tp).choice.block_size for tp in (4, 8)] == [4160, 2080]


@pytest.mark.parametrize(
    ("changes", "blocks"),
    [
        ({}, (2112, 1056)),
        ({"speculative_tokens": 3}, (2176, 1088)),
        ({"block_size": 64}, (2112, 1088)),
        ({"block_size": 2176}, (2176, 2176)),
        ({"backend": "FLASH_ATTN_HD256"}, (2176, 1152)),
    ],
)
def test_block_size_at_tp4_and_tp8(changes: dict[str, object], blocks: tuple[int, int]) -> None:
    found = [layout(QWEN, **{**QWEN_POST, **changes}, tensor_parallel=tp).choice.block_size for tp in (4, 8)]
    assert tuple(found) == blocks


@pytest.mark.parametrize(
    ("tp", "sliding_block", "full_block", "charged_2048", "charged_16384", "off", "held"),
    [
        (1, 16, 32, 3132.5, 7932.5, 7920.0, 1532.5),
        (2, 16, 32, 1566.25, 3966.25, 3960.0, 766.25),
        (4, 16, 32, 783.125, 1983.125, 1980.0, 383.125),
        (8, 16, 16, 481.5625, 1081.5625, 1080.0, 281.5625),
    ],
)
def test_gemma4_prices(
    tp: int, sliding_block: int, full_block: int, charged_2048: float, charged_16384: float, off: float, held: float
) -> None:
    """gemma-4-31B, 9,216 tokens, block 16: the window saves almost nothing of what vLLM charges, and most of what decode holds."""

    def price(batched: int, *, hybrid: bool = True) -> float:
        changed = layout("gemma-4-31b-it", tensor_parallel=tp, max_num_batched_tokens=batched, hybrid_manager=hybrid)
        return changed.admission(9216).mib

    found = layout("gemma-4-31b-it", tensor_parallel=tp)
    assert {group.first.block_size for group in found.groups if group.first.kind == "sliding"} == {sliding_block}
    assert {group.first.block_size for group in found.groups if group.first.kind == "full"} == {full_block}
    assert (price(1024), price(8192), price(8192, hybrid=False)) == (charged_2048, charged_16384, off)
    assert found.steady(9216).mib == held


def test_gemma4_printed_concurrency_hides_the_window() -> None:
    """5.16x with the hybrid manager and 5.17x without, per 40 GiB at TP1; between decode steps 26 requests fit with it, 5 without."""
    on, off = (
        cache_of("gemma-4-31b-it", 40, max_model_len=9216, max_num_batched_tokens=8192, hybrid_manager=flag) for flag in (True, False)
    )
    assert (round(on.concurrency, 2), round(off.concurrency, 2)) == (5.16, 5.17)
    assert (on.requests(9216, held=True), off.requests(9216, held=True)) == (26, 5)


def test_cost_of_sharing_one_block_size_at_tp8() -> None:
    """--block-size 2176 on both roles, the published recipes' choice with MTP, costs the TP8 side a third of its requests."""
    arguments = {**QWEN_POST, "tensor_parallel": 8, "speculative_tokens": 3}
    small, large = (cache_of(QWEN, 83.0, **arguments, block_size=size).concurrency for size in (None, 2176))
    assert large / small == pytest.approx(201 / 311, abs=0.01)
