"""Print, as JSON, every descriptor list that a decode rank builds for uniform models and for mixed pairs that stock
handles: the same file runs on stock and on a patched environment, and the outputs must be equal."""

from __future__ import annotations

import hashlib
import json
import sys
from typing import Any

import conftest  # noqa: F401 - the environment of vLLM's import
from pair import Geometry, Settings, handshake_error, pair

PAIRS = [(p, d) for p in (1, 2, 4, 8) for d in (1, 2, 4, 8)]
CASES = [(Geometry(8, None), p, d, False) for p, d in PAIRS]
CASES += [(Geometry(2, None), p, d, False) for p, d in PAIRS if p <= d or p <= 2]
CASES += [(Geometry(16, 4), p, d, hybrid) for p, d in PAIRS if max(p, d) <= 4 or p == d for hybrid in (False, True)]


def lists(made: Any, rank: int) -> list[list[Any]]:
    """Descriptor lists of one rank with addresses relative to their memory, and their owners."""
    agent = made.network.agents[f"decode/{rank}"]
    out = []
    for owner, table in agent.lists.values():
        base = min(start for start, _ in made.network.agents[owner].memory)
        relative = table - [base, 0]
        out.append([owner, len(table), hashlib.sha256(relative.tobytes()).hexdigest()])
    return out


def main() -> None:
    found = {}
    for geometry, p, d, hybrid in CASES:
        settings = Settings(hybrid=hybrid, num_blocks=16)
        with pair(geometry, p, d, settings, settings) as made:
            for rank in range(d):
                sources = [rank * p // d] if d >= p else range(rank * p // d, (rank + 1) * p // d)
                for source in sources:
                    error = handshake_error(made, rank, source)
                    if error is not None:
                        raise error
            name = f"{geometry.sliding_heads}/{geometry.global_heads} P{p} D{d} hybrid={hybrid}"
            found[name] = [lists(made, rank) for rank in range(d)]
    json.dump(found, sys.stdout, indent=1)


if __name__ == "__main__":
    main()
