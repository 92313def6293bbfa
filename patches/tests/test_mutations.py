"""The harness must see a wrong plan: each mutant of the per-region arithmetic has to make the matrix fail."""

from __future__ import annotations

from typing import Any

import pytest
from pair import Geometry, pair
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.region_heads import RegionHeadPlan

HEADS = Geometry(16, 4)
remote_slice, local_slice, reads = RegionHeadPlan.remote_slice, RegionHeadPlan.local_slice, RegionHeadPlan.reads


def stock_offset(self: Any, region: int, local_len: int) -> tuple[int, int]:
    """One factor for all regions, as with the check of stock only relaxed."""
    return self.tp_rank % (self.local_tp // self.remote_tp) * local_len, local_len


def one_head_further(self: Any, region: int, local_len: int) -> tuple[int, int]:
    offset, length = remote_slice(self, region, local_len)
    return offset + local_len // self.heads[region][0], length


MUTANTS = {
    "stock offset": ("remote_slice", stock_offset, (4, 8)),
    "offset always zero": ("remote_slice", lambda self, region, n: (0, n), (4, 8)),
    "one head further": ("remote_slice", one_head_further, (1, 8)),
    "one byte short": ("remote_slice", lambda *a: (remote_slice(*a)[0], remote_slice(*a)[1] - 2), (4, 8)),
    "slot always zero": ("local_slice", lambda *a: (0, local_slice(*a)[1]), (8, 4)),
    "equal chunks as stock": ("local_slice", lambda self, region, q, n: (q * n // 2, n // 2), (8, 4)),
    "a copy is never read": ("reads", lambda self, region, rank: region != 5, (8, 4)),
    "second source dropped": ("reads", lambda self, region, rank: rank == self.source_ranks.start, (8, 4)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name, wrong, (p, d) = MUTANTS[mutant]
    monkeypatch.setattr(RegionHeadPlan, name, wrong)
    with pair(HEADS, p, d) as made:
        made.request(128)
        outcome = made.run()
        assert any(outcome.failed) or made.differences()


def test_the_same_pairs_pass_unmutated() -> None:
    for p, d in sorted({pair_ for _, _, pair_ in MUTANTS.values()}):
        with pair(HEADS, p, d) as made:
            made.request(128)
            outcome = made.run()
            assert not any(outcome.failed)
            assert made.differences() == []
