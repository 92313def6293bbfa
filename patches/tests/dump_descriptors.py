"""Print, as JSON, everything that decode ranks give to NIXL to move a cache: per pair and hybrid manager on or off, every
descriptor list (addresses, lengths, devices, order) and every transfer (both lists of indices, in order, and its message).

The same file runs on stock and on patched environments: for pairs that stock handles the outputs must be equal. Addresses are
counted from the registered memory that holds them. Engines that nobody schedules (pair.py) cover every pair and full pages;
engines under vLLM's own scheduler (hybrid_engines.py) add half-full last pages, clipped windows and prefix hits.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
from collections.abc import Iterator
from typing import Any
from unittest import mock

import conftest  # noqa: F401 - the environment of vLLM's import
import numpy as np
import pair as pair_engines
from copying_nixl import Agent
from hybrid_engines import Side, hybrid
from pair import Geometry, Settings, pair

TP = (1, 2, 4, 8)
# For engines that get no further; several of these run at once.
pair_engines.DEADLINE_S = 300.0
HEADS = {
    "16/4": Geometry(16, 4),
    "8/2": Geometry(8, 2),
    "4/1": Geometry(4, 1),
    "8/8": Geometry(8, 8, global_head_dim=32),
    "8": Geometry(8, None),
    "2": Geometry(2, None),
}


def handled(heads: str, p: int, d: int) -> bool:
    """Whether stock handles the pair: both kinds of layers scale alike, and no prefill rank above decode's holds a copy. Of all
    pairs of HEADS and TP, manager on and off, stock was right for exactly these."""
    sliding = HEADS[heads].sliding_heads
    kinds = [[max(1, n // tp) for tp in (p, d)] for n in (sliding, HEADS[heads].global_heads or sliding)]
    return kinds[0][0] * kinds[1][1] == kinds[0][1] * kinds[1][0] and (p <= d or p <= sliding)


UNSCHEDULED = [
    (heads, p, d, on) for heads in HEADS for p in TP for d in TP for on in (False, True) if on <= ("/" in heads) and handled(heads, p, d)
]
UNSCHEDULED += [("16/4", 16, 16, True), ("16/4", 16, 16, False), ("8/8", 1, 16, True), ("8/8", 8, 16, True)]
SCHEDULED = [("16/4", p, d, True) for p in (1, 2, 4) for d in (1, 2, 4)]
SCHEDULED += [("16/4", p, d, False) for p, d in ((1, 2), (4, 2), (2, 2))]
SCHEDULED += [("16/4", 8, 8, True), ("8/2", 1, 2, True), ("8/2", 2, 1, True), ("4/1", 2, 2, True), ("8/8", 1, 8, True), ("8/8", 4, 2, True)]
# Half-full last pages of 64 and 128 tokens, a prefix hit in the third, which is also longer than the window.
LENGTHS = (200, 65, 400)


def digest(*parts: Any) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


class Calls:
    """What every agent was asked for, in order, without anything that differs between two runs of the same code."""

    def __init__(self) -> None:
        self.of_agent: dict[str, list[list[Any]]] = {}
        self.lists: dict[tuple[str, int], int] = {}

    def prepared(self, agent: Agent, to: str, descs: Any, mem_type: str, handle: int) -> None:
        table = np.asarray(descs, dtype=np.uint64).reshape(-1, 3)
        owner = agent if to == "NIXL_INIT_AGENT" else agent.network.agents[to]
        starts = np.array([start for start, _ in owner.memory], dtype=np.uint64)
        order = np.argsort(starts)
        region = order[np.searchsorted(starts[order], table[:, 0], side="right") - 1]
        placed = np.column_stack([region, table[:, 0] - starts[region], table[:, 1:]]).astype(np.uint64)
        calls = self.of_agent.setdefault(agent.name, [])
        calls.append(["list", to, mem_type, len(table), hashlib.sha256(placed.tobytes()).hexdigest()])
        self.lists[agent.name, handle] = sum(call[0] == "list" for call in calls)

    def posted(self, agent: Agent, op: str, local: int, ours: Any, remote: int, theirs: Any, notif: bytes) -> None:
        ids = digest(np.asarray(ours).tolist(), np.asarray(theirs).tolist())
        lists = [self.lists[agent.name, handle] for handle in (local, remote)]
        self.of_agent.setdefault(agent.name, []).append(["transfer", op, *lists, len(ours), ids, notif.decode()])

    def of_decode(self) -> dict[str, list[list[Any]]]:
        """Per decode rank: its lists in order, then its transfers by request; requests overtake one another while they wait for
        the handshake."""
        ranks = {name: calls for name, calls in self.of_agent.items() if name.startswith("decode/")}
        return {name: sorted(calls, key=lambda call: "" if call[0] == "list" else call[-1]) for name, calls in sorted(ranks.items())}


@contextlib.contextmanager
def recorded() -> Iterator[Calls]:
    calls = Calls()
    describe, prepare, post = Agent.get_xfer_descs, Agent.prep_xfer_dlist, Agent.make_prepped_xfer
    given: dict[int, tuple[Any, str]] = {}

    def get_xfer_descs(self: Agent, descs: Any, mem_type: str) -> Any:
        table = describe(self, descs, mem_type)
        given[id(table)] = (np.array(descs, dtype=np.uint64), mem_type)
        return table

    def prep_xfer_dlist(self: Agent, agent: str, table: Any) -> int:
        handle = prepare(self, agent, table)
        calls.prepared(self, agent, *given.pop(id(table)), handle)
        return handle

    def make_prepped_xfer(self: Agent, op: str, local: int, ours: Any, remote: int, theirs: Any, notif_msg: bytes = b"") -> int:
        handle = post(self, op, local, ours, remote, theirs, notif_msg=notif_msg)
        calls.posted(self, op, local, ours, remote, theirs, notif_msg)
        return handle

    changed = {f.__name__: f for f in (get_xfer_descs, prep_xfer_dlist, make_prepped_xfer)}
    with mock.patch.multiple(Agent, **changed):
        yield calls


def unscheduled(heads: str, p: int, d: int, on: bool) -> dict[str, Any]:
    """Three requests, one of them with a prefix hit; {} where the pair is refused or gets wrong bytes."""
    settings = Settings(hybrid=on, num_blocks=120)
    with recorded() as calls, pair(HEADS[heads], p, d, settings, settings) as made:
        made.request(256)
        made.request(512)
        made.request(256, hit_blocks=1)
        outcome = made.run()
        if any(outcome.failed) or made.differences() or made.stray_writes():
            return {}
        return calls.of_decode()


def scheduled(heads: str, p: int, d: int, on: bool) -> dict[str, Any]:
    with recorded() as calls, hybrid(HEADS[heads], p, d, Side(prefix_caching=True, hybrid=on, num_blocks=60)) as made:
        for tokens in LENGTHS:
            if made.serve(tokens).reason != "length":
                return {}
            made.drain()
        if made.prefill.wrong or made.decode.wrong:
            return {}
        return calls.of_decode()


def main() -> None:
    found = {}
    for record, cases in ((unscheduled, UNSCHEDULED), (scheduled, SCHEDULED)):
        for heads, p, d, on in cases:
            found[f"{record.__name__} {heads} P{p} D{d} manager={'on' if on else 'off'}"] = record(heads, p, d, on)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
