"""Hybrid manager on, prefill TP below decode TP, pages that stock cannot pair: every key that decode attends, byte for byte."""

from __future__ import annotations

import pytest
from hybrid_engines import CPU, Side, hybrid
from pair import Geometry

SMALL = Geometry(4, 1)
# Around every boundary of blocks of 64, 128 and 256 tokens and of the window of 256 tokens; half-full last pages.
LENGTHS = (1, 63, 64, 65, 127, 128, 129, 130, 193, 255, 256, 257, 320, 321, 383, 385, 512, 513, 640, 700, 771)


def serve_all(geometry: Geometry, p: int, d: int, side: Side, lengths: tuple[int, ...]) -> None:
    with hybrid(geometry, p, d, side) as made:
        predicted = 0
        for family, tokens in enumerate(lengths):
            done = made.serve(tokens, family)
            assert done.reason == "length", (tokens, done)
            predicted += made.predicted_bytes(tokens)
        assert made.prefill.wrong == []
        assert made.decode.wrong == []
        made.drain()
        assert made.moved_bytes() == predicted


@pytest.mark.parametrize("backend", ["CPU_ATTN", "FLASH_ATTN", "TRITON_ATTN"])
def test_half_full_last_pages_and_boundaries(backend: str) -> None:
    side = CPU if backend == "CPU_ATTN" else Side(backend)
    serve_all(SMALL, 1, 2, side, LENGTHS)
