"""The harness must see a wrong plan: each mutant has to give wrong bytes or a failed request."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hybrid_engines import CPU, Side, hybrid
from pair import Geometry
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import group_pages
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.group_pages import GroupPagePlan

cut_page, pair_blocks, describe_groups = group_pages.cut_page, GroupPagePlan.pair_blocks, group_pages.describe_groups


def other_half(self: Any, *args: Any) -> Any:
    ids, sources, parts = pair_blocks(self, *args)
    return ids, sources, 1 - parts if parts.any() else parts


def end_trimmed(self: Any, group: int, local: Any, remote: Any, num_tokens: int) -> Any:
    """As stock pairs lists: by the end of both, counted in local blocks."""
    ratio = self.remote[group].block_tokens // self.local[group].block_tokens
    halves = np.arange(len(remote) * ratio)[-len(local) :]
    return np.asarray(local), np.asarray(remote)[halves // ratio], halves % ratio


def one_head_further(ours: Any, theirs: Any, first: int) -> Any:
    return cut_page(ours, theirs, (first + 1) % max(1, theirs.heads - 1))


MUTANTS = {
    "wrong half": (Side(), GroupPagePlan, "pair_blocks", other_half),
    "always the first half": (Side(), GroupPagePlan, "pair_blocks", lambda *a: (*pair_blocks(*a)[:2], 0 * pair_blocks(*a)[2])),
    "lists trimmed at the end": (Side(), GroupPagePlan, "pair_blocks", end_trimmed),
    "next block": (Side(), GroupPagePlan, "pair_blocks", lambda *a: (pair_blocks(*a)[0], pair_blocks(*a)[1] % 100 + 1, pair_blocks(*a)[2])),
    "first head for every rank": (Side(), group_pages, "cut_page", lambda ours, theirs, first: cut_page(ours, theirs, 0)),
    "one head further": (Side(), group_pages, "cut_page", one_head_further),
    "keys of the CPU as token rows": (CPU, group_pages, "_TOKEN_ROWS", None),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_mutant_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    side, owner, name, wrong = MUTANTS[mutant]
    if wrong is None:
        real = group_pages.GroupPage

        def as_rows(tokens: int, heads: int, strips: Any, *rest: Any) -> Any:
            return real(tokens, heads, ((1, sum(count * size for count, size in strips)),), *rest)

        monkeypatch.setattr(group_pages, "GroupPage", as_rows)
    else:
        monkeypatch.setattr(owner, name, wrong)
    with hybrid(Geometry(4, 1), 1, 2, side) as made:
        reasons = [made.serve(tokens, tokens).reason for tokens in (65, 193, 385, 450)]
        assert made.decode.wrong or "error" in reasons
        assert made.prefill.wrong == []
