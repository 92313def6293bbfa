"""Where the pages of one kind do not fill those of the other, vLLM pads them; between TP sizes heads are then cut out of the padded
length. The request ends as usual and the bytes are wrong: what `check` refuses as padded-pages. A release in which the first test
fails needs the rule no more. Runs on stock and on patched environments alike, since the patches leave such a pair to stock."""

from __future__ import annotations

import pytest
from hybrid_engines import Side, hybrid
from pair import Geometry

PADDED = Geometry(24, 8)  # 24 x 32 beside 8 x 64: 1.5 times the bytes


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 1), (4, 8)])
def test_between_tp_sizes_bytes_are_wrong_without_an_error(p: int, d: int) -> None:
    with hybrid(PADDED, p, d, Side()) as made:
        assert made.serve(385).reason == "length"
        assert made.decode.wrong != []


@pytest.mark.parametrize("tp", [1, 2, 8])
def test_equal_tp_is_right(tp: int) -> None:
    with hybrid(PADDED, tp, tp, Side()) as made:
        assert made.serve(385).reason == "length"
        assert made.decode.wrong == []
