"""Traffic and error counters of the RDMA devices: a KV transfer that silently fell back to TCP leaves them unchanged."""

from __future__ import annotations

from pathlib import Path

ROOT = Path("/sys/class/infiniband")


def read_counters(root: Path = ROOT) -> tuple[dict[str, int], str]:
    """({"mlx5_0/1/port_xmit_data": n}, "") for every integer below <device>/ports/<port>/counters and hw_counters, or ({}, reason).

    port_xmit_data and port_rcv_data count units of four bytes (InfiniBand specification, PortCounters). A name that stands in both folders
    keeps the value of `counters`; hw_counters get their own names otherwise.
    """
    if not root.is_dir():
        return {}, f"no {root}: no RDMA device on this node"
    found: dict[str, int] = {}
    for port in sorted(root.glob("*/ports/*")):
        device, number = port.parent.parent.name, port.name
        for folder in ("hw_counters", "counters"):
            for counter in sorted((port / folder).glob("*")):
                try:
                    found[f"{device}/{number}/{counter.name}"] = int(counter.read_text(encoding="ascii").strip())
                except (OSError, ValueError):
                    continue  # `lifespan` and vendor files are no counters, some are write-only
    return found, "" if found else f"{root} holds no readable counter"
