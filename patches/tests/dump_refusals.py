"""Print, as JSON, which pairs of TP sizes the handshake takes, in an environment with both patches: per model and hybrid manager
on or off, the message of the refusal, '' for a pair that is taken. With the model's config, so that the launcher's `check` can
be asked the same."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import conftest  # noqa: F401 - the environment of vLLM's import
from hybrid_engines import MAX_TOKENS, Side, hybrid
from pair import Geometry, handshake_error, model_dir

MODELS = [Geometry(s, g) for s, g in ((16, 4), (8, 2), (4, 1), (8, 8), (2, 8), (8, 1), (16, 8))]
MODELS += [Geometry(16, 4, global_head_dim=dim) for dim in (32, 128)]
# Tokens per block at prefill and decode.
BLOCKS = ((64, 64), (16, 16), (64, 32), (32, 64))
TP = (1, 2, 4, 8, 16, 32)


def refusal(geometry: Geometry, p: int, d: int, sides: list[Side]) -> str:
    with hybrid(geometry, p, d, *sides) as made:
        for rank in range(d):
            error = handshake_error(made, rank, rank * p // d)  # type: ignore[arg-type]
            if error is not None:
                return f"{type(error).__name__}: {error}"
    return ""


def main() -> None:
    found = []
    for geometry in MODELS:
        config = json.loads((Path(model_dir(geometry)) / "config.json").read_text())
        sizes = [tp for tp in TP if tp <= config["num_attention_heads"]]
        for blocks in BLOCKS if geometry == MODELS[0] else BLOCKS[:1]:
            for on in (True, False):
                sides = [Side(num_blocks=8, hybrid=on, block_size=size) for size in blocks]
                said = [[p, d, refusal(geometry, p, d, sides)] for p in sizes for d in sizes]
                found.append(
                    {"model": str(geometry), "config": config, "manager": on, "blocks": blocks, "tokens": MAX_TOKENS, "pairs": said}
                )
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
