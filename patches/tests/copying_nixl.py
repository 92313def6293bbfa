"""A NIXL agent that really copies bytes between the registered memories of one process, and checks every descriptor.

It has the methods of nixl_agent that vLLM's connector calls. Descriptors outside registered memory, lists of unequal
length and pairs of unequal size are errors, as they are for NIXL with UCX.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass, field
from itertools import count
from types import SimpleNamespace
from typing import Any

import numpy as np


class NixlError(RuntimeError):
    """Named like NIXL's own status codes."""


@dataclass
class Network:
    """All agents of one test, and what they moved."""

    agents: dict[str, Agent] = field(default_factory=dict)
    reads: list[Read] = field(default_factory=list)
    # Transfers stay in progress until the test says so.
    held: bool = False

    def agent(self, name: str, config: Any = None) -> Agent:
        agent = Agent(name, self)
        self.agents[name] = agent
        return agent


@dataclass(frozen=True)
class Read:
    """One posted transfer. reader, source: agent names. nbytes: bytes moved. descriptors: pairs posted."""

    reader: str
    source: str
    nbytes: int
    descriptors: int


class Agent:
    def __init__(self, name: str, network: Network) -> None:
        self.name, self.network = name, network
        self.memory: list[tuple[int, int]] = []
        self.peers: set[str] = set()
        self.lists: dict[int, tuple[str, np.ndarray]] = {}
        self.transfers: dict[int, dict[str, Any]] = {}
        self.notifs: dict[str, list[bytes]] = {}
        self.ids = count(1)
        self.calls: list[str] = []

    # --- memory ---
    def get_reg_descs(self, ranges: list[tuple[int, int, int, str]], mem_type: str) -> list[tuple[int, int]]:
        return [(start, start + length) for start, length, _, _ in ranges]

    def register_memory(self, descs: list[tuple[int, int]], backends: Any = None) -> None:
        self.memory.extend(descs)

    def deregister_memory(self, descs: list[tuple[int, int]]) -> None:
        for desc in descs:
            self.memory.remove(desc)

    def _covers(self, table: np.ndarray) -> np.ndarray:
        inside = np.zeros(len(table), dtype=bool)
        for start, end in self.memory:
            inside |= (table[:, 0] >= start) & (table[:, 0] + table[:, 1] <= end)
        return inside

    # --- peers ---
    def get_agent_metadata(self) -> bytes:
        return self.name.encode()

    def add_remote_agent(self, metadata: bytes) -> str:
        self.calls.append("add_remote_agent")
        name = metadata.decode()
        if name not in self.network.agents:
            raise NixlError(f"NIXL_ERR_NOT_FOUND: agent {name}")
        self.peers.add(name)
        return name

    def remove_remote_agent(self, name: str) -> None:
        self.peers.discard(name)

    # --- descriptor lists ---
    def get_xfer_descs(self, descs: Any, mem_type: str) -> np.ndarray:
        table = np.asarray(descs, dtype=np.uint64).reshape(-1, 3)
        return table[:, :2].astype(np.int64)

    def prep_xfer_dlist(self, agent: str, table: np.ndarray) -> int:
        self.calls.append("prep_xfer_dlist")
        owner = self if agent == "NIXL_INIT_AGENT" else self.network.agents[agent]
        if owner is not self and agent not in self.peers:
            raise NixlError(f"NIXL_ERR_NOT_FOUND: {agent} was not added")
        outside = np.flatnonzero(~owner._covers(table))
        if len(outside):
            at = int(outside[0])
            raise NixlError(
                f"NIXL_ERR_NOT_FOUND: descriptor {at} of {len(table)} ({len(outside)} in all) leaves the memory of "
                f"{owner.name}: address {table[at, 0]:#x}, {table[at, 1]} bytes"
            )
        handle = next(self.ids)
        self.lists[handle] = (owner.name, table)
        return handle

    def release_dlist_handle(self, handle: int) -> None:
        del self.lists[handle]

    # --- transfers ---
    def make_prepped_xfer(
        self, op: str, local: int, local_ids: Any, remote: int, remote_ids: Any, notif_msg: bytes = b""
    ) -> int:
        local_owner, local_table = self.lists[local]
        remote_owner, remote_table = self.lists[remote]
        ours, theirs = local_table[np.asarray(local_ids)], remote_table[np.asarray(remote_ids)]
        if op != "READ" or local_owner != self.name:
            raise NixlError(f"NIXL_ERR_INVALID_PARAM: {op} into {local_owner}")
        if len(ours) != len(theirs) or not len(ours):
            raise NixlError(f"NIXL_ERR_INVALID_PARAM: {len(ours)} local, {len(theirs)} remote descriptors")
        if (ours[:, 1] != theirs[:, 1]).any():
            at = int(np.flatnonzero(ours[:, 1] != theirs[:, 1])[0])
            raise NixlError(f"NIXL_ERR_INVALID_PARAM: pair {at} is {ours[at, 1]} local, {theirs[at, 1]} remote bytes")
        handle = next(self.ids)
        self.transfers[handle] = {"ours": ours, "theirs": theirs, "peer": remote_owner, "notif": notif_msg}
        return handle

    def transfer(self, handle: int) -> str:
        self.transfers[handle]["state"] = "PROC"
        return "PROC"

    def check_xfer_state(self, handle: int) -> str:
        transfer = self.transfers[handle]
        if transfer["state"] == "PROC" and not self.network.held:
            for (to, length), (source, _) in zip(transfer["ours"].tolist(), transfer["theirs"].tolist(), strict=True):
                ctypes.memmove(to, source, length)
            nbytes = int(transfer["ours"][:, 1].sum())
            self.network.reads.append(Read(self.name, transfer["peer"], nbytes, len(transfer["ours"])))
            transfer["state"] = "DONE"
            if transfer["notif"]:
                self.send_notif(transfer["peer"], transfer["notif"])
        return transfer["state"]

    def get_xfer_telemetry(self, handle: int) -> SimpleNamespace:
        ours = self.transfers[handle]["ours"]
        return SimpleNamespace(
            xferDuration=1.0, postDuration=1.0, totalBytes=int(ours[:, 1].sum()), descCount=len(ours)
        )

    def release_xfer_handle(self, handle: int) -> None:
        del self.transfers[handle]

    # --- notifications ---
    def send_notif(self, agent_name: str, notif_msg: bytes) -> None:
        self.network.agents[agent_name].notifs.setdefault(self.name, []).append(notif_msg)

    def get_new_notifs(self) -> dict[str, list[bytes]]:
        fresh, self.notifs = self.notifs, {}
        return fresh
