from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from pdlaunch.node.ports import PortError, Ports, port_range

ROOT = Path(__file__).parent.parent
HOLDER = """
import sys; sys.path.insert(0, sys.argv[1])
from pdlaunch.node.ports import Ports
p = Ports(sys.argv[2]); print(*[p.reserve(4) for _ in range(20)], flush=True); sys.stdin.read()
"""


@pytest.fixture
def ports():
    made = Ports("seed")
    yield made
    made.close()


def test_ports_are_distinct_free_and_below_the_ephemeral_range(ports):
    first, last = port_range()
    found = [ports.reserve() for _ in range(50)]
    assert len(set(found)) == 50
    for port in found:
        assert first <= port <= last
        with socket.create_server(("127.0.0.1", port)):
            pass


def test_consecutive_ports_do_not_overlap(ports):
    starts = [ports.reserve(8) for _ in range(20)]
    assert len({s + i for s in starts for i in range(8)}) == 160


def test_two_processes_with_the_same_seed_never_meet():
    holders = [
        subprocess.Popen([sys.executable, "-c", HOLDER, str(ROOT), "same"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    try:
        found = [{int(w) + i for w in h.stdout.readline().split() for i in range(4)} for h in holders]
    finally:
        for holder in holders:
            holder.communicate(timeout=30)
    assert len(found[0]) == len(found[1]) == 80
    assert not found[0] & found[1]


def test_a_port_is_free_again_after_its_process():
    done = subprocess.run([sys.executable, "-c", HOLDER, str(ROOT), "again"], input="", capture_output=True, text=True, check=True)
    mine = Ports("again")
    try:
        assert str(mine.reserve(4)) == done.stdout.split()[0]
    finally:
        mine.close()


def test_a_port_that_somebody_listens_on_is_refused_by_name(ports):
    with socket.create_server(("127.0.0.1", 0)) as server:
        busy = server.getsockname()[1]
        with pytest.raises(PortError, match=rf"http_port: port {busy} is in use .*choose another, or 0"):
            ports.take(busy, "http_port")


def test_a_busy_port_in_the_middle_of_a_run_is_stepped_over(ports):
    start = Ports("seed")
    first = start.reserve(4)
    start.close()
    with socket.create_server(("127.0.0.1", first + 2)):
        found = ports.reserve(4)
    assert found + 3 < first + 2 or found > first + 2
