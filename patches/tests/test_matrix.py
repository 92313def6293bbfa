"""Every pair of TP sizes, byte for byte on every rank, layer and block. Needs no patch by name: it passes on any vLLM
whose NIXL connector is right, so that on a stock release it is the drop rule of the patch."""

from __future__ import annotations

import pytest
from pair import Geometry, Settings, pair

TP = (1, 2, 4, 8)
MIXED = {"16/4": Geometry(16, 4, layers=12), "8/2": Geometry(8, 2, layers=12), "4/1": Geometry(4, 1, layers=12)}
TOKENS = 192


def check(geometry: Geometry, p: int, d: int, **settings: object) -> None:
    with pair(geometry, p, d, Settings(**settings), Settings(**settings)) as made:
        made.request(TOKENS)
        outcome = made.run()
        assert not any(outcome.failed), f"failed on ranks {[i for i, f in enumerate(outcome.failed) if f]}"
        assert made.differences() == []
        assert made.stray_writes() == []
        assert outcome.freed == [{"req0"}] * p
        blocks = TOKENS // 64
        assert sum(read.nbytes for read in made.network.reads) == geometry.minimum_bytes(d, TOKENS)
        assert max(read.descriptors for read in made.network.reads) <= geometry.layers * blocks


@pytest.mark.parametrize("d", TP)
@pytest.mark.parametrize("p", TP)
@pytest.mark.parametrize("heads", MIXED)
def test_mixed_heads(heads: str, p: int, d: int) -> None:
    check(MIXED[heads], p, d)


@pytest.mark.parametrize(
    ("p", "d"), [(2, 16), (4, 16), (8, 16), (8, 32), (16, 32), (16, 2), (16, 8), (32, 8), (32, 16), (32, 1), (16, 16)]
)
def test_larger_tp(p: int, d: int) -> None:
    check(MIXED["16/4"], p, d)


@pytest.mark.parametrize("d", TP)
@pytest.mark.parametrize("p", TP)
def test_three_head_counts(p: int, d: int) -> None:
    """Odd shapes: more sliding heads than a power of two, and a global layer with more heads than the sliding ones."""
    check(Geometry(24, 8, layers=6), p, d)
    check(Geometry(2, 8, layers=6), p, d)


@pytest.mark.parametrize("layout", ["LBHNC", "BLHNC"])
@pytest.mark.parametrize(("p", "d"), [(4, 8), (8, 4)])
def test_layouts_that_keep_the_heads_of_a_block_together(layout: str, p: int, d: int) -> None:
    check(MIXED["16/4"], p, d, layout=layout)


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (2, 4), (4, 2), (1, 4), (4, 4)])
def test_hybrid_manager_on_keeps_working_where_heads_scale_alike(p: int, d: int) -> None:
    """16/4 up to TP4: the pages of both kinds shrink alike, and stock handles them with shared regions."""
    settings = Settings(hybrid=True, num_blocks=48)
    with pair(MIXED["16/4"], p, d, settings, settings) as made:
        made.request(384)
        outcome = made.run()
        assert not any(outcome.failed)
        assert made.differences() == []
        assert outcome.freed == [{"req0"}] * p


@pytest.mark.parametrize("d", TP)
@pytest.mark.parametrize("p", TP)
@pytest.mark.parametrize("heads", [8, 2])
def test_uniform_heads(heads: int, p: int, d: int) -> None:
    check(Geometry(heads, None), p, d)
