"""Ports of this node that no other job of this project can be given while we hold them.

Each reserved port is claimed twice: by an abstract unix socket named after it, which lives as long as the process that holds it, in the
same network namespace as the port and without a file to leave behind or to own, and by a bind probe against everybody else. Ports lie
below the kernel's ephemeral range, so an outgoing connection cannot take one between the claim and the engine's own bind.
"""

from __future__ import annotations

import random
import socket
from pathlib import Path

LOWEST = 20000
_EPHEMERAL = Path("/proc/sys/net/ipv4/ip_local_port_range")


class PortError(Exception):
    """No port can be had; the message says which and why."""


class Ports:
    """The ports that this process holds. close() gives all back."""

    def __init__(self, seed: str) -> None:
        self._random = random.Random(seed)
        self._claims: dict[int, socket.socket] = {}

    def reserve(self, count: int = 1) -> int:
        """The first of `count` consecutive free ports."""
        first, last = port_range()
        span = last - first - count
        start = self._random.randrange(span)
        for step in range(0, span, count):
            port = first + (start + step) % span
            if self._claim_all(port, count):
                return port
        raise PortError(f"no {count} consecutive free ports between {first} and {last}")

    def take(self, port: int, what: str) -> int:
        """Exactly this port; PortError when somebody has it."""
        if not self._claim_all(port, 1):
            raise PortError(f"{what}: port {port} is in use on {socket.gethostname()}; choose another, or 0 for a free one")
        return port

    def _claim_all(self, port: int, count: int) -> bool:
        claimed: list[int] = []
        for one in range(port, port + count):
            claim = None if one in self._claims or not _free(one) else _claim(one)
            if claim is None:
                for other in claimed:
                    self._claims.pop(other).close()
                return False
            self._claims[one] = claim
            claimed.append(one)
        return True

    def close(self) -> None:
        for claim in self._claims.values():
            claim.close()
        self._claims.clear()


def port_range() -> tuple[int, int]:
    """Lowest and highest port to choose from: from 20000 to below the ephemeral range, or above it when it begins too low."""
    try:
        low, high = (int(n) for n in _EPHEMERAL.read_text(encoding="ascii").split())
    except (OSError, ValueError):
        low, high = 32768, 60999
    if low - LOWEST >= 2000:
        return LOWEST, low - 1
    return (high + 1, 65535) if 65535 - high >= 2000 else (10000, 65535)


def _claim(port: int) -> socket.socket | None:
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        claim.bind(f"\0pdlaunch-port-{port}")
    except OSError:
        claim.close()
        return None
    return claim


def _free(port: int) -> bool:
    """Whether a server could listen here now; TIME_WAIT does not count, as servers set SO_REUSEADDR."""
    for family, address in ((socket.AF_INET, "0.0.0.0"), (socket.AF_INET6, "::")):
        try:
            probe = socket.socket(family, socket.SOCK_STREAM)
        except OSError:
            continue  # no IPv6 on this node
        with probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                probe.bind((address, port))
            except OSError as e:
                if e.errno == 98:
                    return False
    return True
