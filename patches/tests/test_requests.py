"""Requests as an engine sees them: several at once, prefix-cache hits, host buffers, and reference counts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from pair import Geometry, Settings, pair

HEADS = Geometry(16, 4, layers=12)
PAIRS = [(2, 8), (4, 8), (8, 4), (8, 1)]


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_several_requests_in_flight(p: int, d: int) -> None:
    settings = Settings(num_blocks=32)
    with pair(HEADS, p, d, settings, settings) as made:
        for tokens in (64, 320, 128, 448, 64):
            made.request(tokens)
        outcome = made.run(hold_first=True)
        assert not any(outcome.failed)
        assert made.differences() == []
        assert made.stray_writes() == []
        assert outcome.freed == [{r.name for r in made.requests}] * p


@pytest.mark.parametrize("hits", [1, 3])
@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_partial_prefix_hits_read_only_the_rest(p: int, d: int, hits: int) -> None:
    settings = Settings(num_blocks=24)
    with pair(HEADS, p, d, settings, settings) as made:
        made.request(320, hit_blocks=hits)
        made.request(320)
        outcome = made.run()
        assert not any(outcome.failed)
        assert made.differences() == []
        assert made.stray_writes() == []
        assert sum(r.nbytes for r in made.network.reads) == HEADS.minimum_bytes(d, 64 * (10 - hits))
        assert outcome.freed == [{"req0", "req1"}] * p


@pytest.mark.parametrize(("p", "d"), PAIRS)
def test_full_prefix_hit_frees_prefill_without_a_read(p: int, d: int) -> None:
    with pair(HEADS, p, d) as made:
        made.request(192, hit_blocks=3)
        made.request(64)
        outcome = made.run()
        assert sum(r.nbytes for r in made.network.reads) == HEADS.minimum_bytes(d, 64)
        assert made.differences() == []
        assert outcome.freed == [{"req0", "req1"}] * p


@pytest.mark.parametrize(("p", "d"), [(2, 4), (4, 8), (1, 8), (8, 4)])
def test_host_buffers(p: int, d: int) -> None:
    settings = Settings(host_buffer=True)
    with pair(HEADS, p, d, settings, settings) as made:
        made.request(192)
        outcome = made.run()
        assert not any(outcome.failed)
        assert made.differences() == []
        assert made.stray_writes() == []
        assert outcome.freed == [{"req0"}] * p


def test_prefill_frees_only_after_the_last_of_two_readers() -> None:
    with pair(HEADS, 4, 8) as made:
        made.request(64)
        made.run()
        name, worker = "again", made.prefill.workers[0]
        worker._reqs_to_process.add(name)
        for reader, freed in ((0, set()), (1, {name})):
            made.decode.workers[reader].nixl_wrapper.send_notif("prefill/0", f"{name}:2".encode())
            assert worker.get_transfer_results().finished_sending == freed


@contextmanager
def log_lines(name: str) -> Iterator[list[str]]:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger(name)
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    try:
        yield lines
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


@pytest.mark.parametrize(
    ("p", "d", "split", "replicated"), [(4, 8, 10, 2), (2, 8, 12, 0), (8, 4, 10, 2), (8, 1, 12, 0), (2, 4, None, None), (8, 8, None, None)]
)
def test_one_plan_line_per_decode_rank_and_one_active_line_per_rank(
    p: int, d: int, split: int | None, replicated: int | None
) -> None:
    """What a run's evidence counts: the formats are documented in patches/README.md."""
    with log_lines("vllm.distributed.kv_transfer.kv_connector.v1.nixl.region_heads") as lines, pair(HEADS, p, d) as made:
        made.request(64)
        made.run()
    active = [line for line in lines if line.startswith("NIXL per-region KV heads active: ")]
    plans = [line for line in lines if line.startswith("NIXL per-region KV heads plan: ")]
    local = f"regions=12 heads={max(1, 16 // p)}x10,{max(1, 4 // p)}x2"
    assert f"NIXL per-region KV heads active: rank=0/{p} {local}" in active
    assert len(active) == p + d
    if split is None:
        assert plans == []
        return
    nbytes = HEADS.minimum_bytes(d, 64) // d
    assert sorted(plans) == [
        f"NIXL per-region KV heads plan: engine=prefill rank={rank}/{d} remote_tp={p} regions=12 "
        f"split={split} replicated={replicated} bytes_per_block={nbytes}"
        for rank in range(d)
    ]
