"""Hybrid manager on, prefill TP below decode TP, pages that stock cannot pair: every key that decode attends, byte for byte.
Names no patch: it passes on any vLLM whose NIXL connector is right, so that on a stock release it is the drop rule."""

from __future__ import annotations

from typing import Any

import pytest
from hybrid_engines import CPU, Hybrid, Side, hybrid
from pair import Geometry
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata

SMALL = Geometry(4, 1)
MIXED = {"16/4": Geometry(16, 4, layers=12), "8/2": Geometry(8, 2)}
# Around every boundary of blocks of 64, 128 and 256 tokens and of the window of 256 tokens; half-full last pages.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 130, 193, 255, 256, 257, 320, 321, 383, 385, 512, 513, 640, 700, 771)
FEW = (65, 129, 385, 700)


def right(made: Hybrid) -> None:
    assert made.prefill.wrong == []
    assert made.decode.wrong == []


def serve_all(geometry: Geometry, p: int, d: int, side: Side, lengths: tuple[int, ...]) -> None:
    with hybrid(geometry, p, d, side) as made:
        predicted = 0
        for family, tokens in enumerate(lengths):
            done = made.serve(tokens, family)
            assert done.reason == "length", (tokens, done)
            predicted += made.predicted_bytes(tokens)
        right(made)
        made.drain()
        assert made.moved_bytes() == predicted


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"])
def test_boundaries_and_half_full_last_pages(backend: str) -> None:
    serve_all(SMALL, 1, 2, CPU if backend == "CPU_ATTN" else Side(backend), LENGTHS)


@pytest.mark.parametrize(
    ("heads", "p", "d"),
    [
        *(("16/4", p, 8) for p in (1, 2, 4)),
        *(("8/2", p, 4) for p in (1, 2)),
    ],
)
def test_pairs(heads: str, p: int, d: int) -> None:
    serve_all(MIXED[heads], p, d, Side(), FEW)


@pytest.mark.parametrize(("heads", "p", "d"), [("16/4", 4, 8), ("16/4", 1, 8), ("8/2", 2, 4)])
def test_pairs_with_the_pages_of_the_cpu(heads: str, p: int, d: int) -> None:
    serve_all(MIXED[heads], p, d, CPU, FEW)


@pytest.mark.parametrize(("block", "window"), [(16, 256), (32, 1024), (128, 100)])
def test_block_sizes_and_windows(block: int, window: int) -> None:
    serve_all(MIXED["16/4"], 4, 8, Side(block_size=block, window=window, num_blocks=500), (17, 100, 1040, 1200))


@pytest.mark.parametrize(("p", "d"), [(1, 2), (1, 4), (2, 4), (2, 1), (4, 2)])
def test_pairs_that_stock_handles_take_its_path(p: int, d: int) -> None:
    with hybrid(MIXED["16/4"], p, d, Side()) as made:
        for family, tokens in enumerate(FEW):
            assert made.serve(tokens, family).reason == "length"
        right(made)
        assert {getattr(w.tp_mappings["prefill"], "group_plan", None) for w in made.decode.workers} == {None}


def test_chunked_prefill() -> None:
    serve_all(SMALL, 1, 2, Side(batch_tokens=96), (95, 97, 385, 700))


@pytest.mark.parametrize("side", [Side(prefix_caching=True), Side("CPU_ATTN", "float32", prefix_caching=True)])
def test_prefix_hits_that_start_inside_a_remote_page(side: Side) -> None:
    """Decode's blocks are half of prefill's here: hits of an odd number of them start in the second half of a page."""
    with hybrid(SMALL, 1, 2, side) as made:
        saved = []
        for tokens in (150, 300, 420, 421, 700, 900):
            before = made.moved_bytes()
            assert made.serve(tokens, family=7).reason == "length"
            saved.append(made.predicted_bytes(tokens) - (made.moved_bytes() - before))
        right(made)
        assert saved[0] == 0
        assert min(saved[1:]) > 0


@pytest.mark.parametrize("side", [Side(prefix_caching=True, batch_tokens=160), CPU])
def test_several_requests_in_flight_over_reused_and_scrambled_pools(side: Side) -> None:
    with hybrid(SMALL, 1, 2, side) as made:
        for wave in range(3):
            made.prefill.shuffle_pool(wave)
            made.decode.shuffle_pool(50 + wave)
            made.network.held = True
            jobs = [(*made.compute(tokens, tokens % 3), tokens) for tokens in (130, 385, 64, 700, 257)]
            for name, params, tokens in jobs:
                made.send(name, params, tokens, tokens % 3)
            made.until(lambda: all(len(w._recving_transfers) >= 4 for w in made.decode.workers), made.decode)
            made.network.held = False
            made.until(lambda jobs=jobs: all(name in made.decode.done for name, _, _ in jobs), made.decode)
            assert {made.decode.done[name].reason for name, _, _ in jobs} == {"length"}
            made.drain()
        right(made)


def test_abort_while_a_read_is_in_flight() -> None:
    """The blocks stay taken until the read is over; then others may use them, and prefill has freed its own."""
    with hybrid(SMALL, 1, 2, Side(), Side(num_blocks=48)) as made:
        name, params = made.compute(700, 1)
        made.network.held = True
        made.send(name, params, 700, 1)
        made.until(lambda: all(w._recving_transfers.get(name) for w in made.decode.workers), made.decode)
        made.decode.abort(name)
        made.decode.step()
        made.network.held = False
        assert made.serve(513, 2).reason == "length"
        assert made.serve(700, 3).reason == "length"
        right(made)
        made.drain()


def test_abort_before_anything_is_read_frees_prefill() -> None:
    with hybrid(SMALL, 1, 2, Side()) as made:
        made.serve(100)
        moved = made.moved_bytes()
        name, params = made.compute(700, 1)
        made.send(name, params, 700, 1)
        made.decode.abort(name)
        made.until(made.drained, made.decode, made.prefill)
        assert made.moved_bytes() == moved
        right(made)


def test_preempted_requests_compute_again_and_stay_right() -> None:
    with hybrid(SMALL, 1, 2, Side(), Side(num_blocks=66)) as made:
        jobs = [(*made.compute(tokens, tokens), tokens) for tokens in (430, 420)]
        for name, params, tokens in jobs:
            made.send(name, params, tokens, tokens, output=60)
        made.until(lambda: all(name in made.decode.done for name, _, _ in jobs), made.decode)
        assert any(made.decode.tracked[name].request.num_preemptions for name, _, _ in jobs)
        right(made)


def test_full_hit_only_tells_prefill() -> None:
    with hybrid(SMALL, 1, 2, Side()) as made:
        made.serve(100)
        moved = made.moved_bytes()
        name, params = made.compute(700)
        for worker in made.decode.workers:
            metadata = NixlConnectorMetadata()
            metadata.add_new_req_to_recv(name, [], params, awaiting_kvs=False)
            worker.start_load_kv(metadata)
        made.drain()
        assert made.moved_bytes() == moved


def without_tokens(params: dict[str, Any]) -> None:
    del params["remote_num_tokens"]


def one_block_less(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = [list(group)[1:] for group in params["remote_block_ids"]]


def many_blocks_more(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = [list(group) * 4 for group in params["remote_block_ids"]]


def a_group_less(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = list(params["remote_block_ids"])[:-1]


def null_blocks(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = [[0] * len(group) for group in params["remote_block_ids"]]


def blocks_outside_the_pool(params: dict[str, Any]) -> None:
    params["remote_block_ids"] = [[10_000] * len(group) for group in params["remote_block_ids"]]


@pytest.mark.parametrize(
    "damage", [without_tokens, one_block_less, many_blocks_more, a_group_less, null_blocks, blocks_outside_the_pool]
)
def test_a_router_that_damages_the_parameters_fails_the_request_and_not_the_engine(damage: Any) -> None:
    with hybrid(SMALL, 1, 2, Side()) as made:
        made.serve(100, 1)
        moved = made.moved_bytes()
        name, params = made.compute(385, 2)
        damage(params)
        made.send(name, params, 385, 2)
        made.until(lambda: name in made.decode.done, made.decode)
        assert made.decode.done[name].reason == "error"
        assert made.moved_bytes() == moved
        assert made.serve(700, 3).reason == "length"
        right(made)
