from __future__ import annotations

import multiprocessing
import os
import re
import sys
import threading
import time
from pathlib import Path

import pytest

from pdlaunch.node.process import Child, StageFailed, StopRequested, stop_together, tail, wait_until
from pdlaunch.node.procfs import descendants, group_members, shm_held_by

CHILD = str(Path(__file__).parent / "fakes" / "child.py")


@pytest.fixture
def start(tmp_path):
    children = []

    def make(*argv, wait_for="up"):
        log = tmp_path / "logs" / f"prefill-{len(children)}.log"
        child = Child(log.stem, [sys.executable, CHILD, *argv], dict(os.environ), log, node="node1")
        children.append(child)
        wait_for_line(child.log, wait_for)
        return child

    yield make
    for child in children:
        child.kill_group()


def wait_for_line(path: Path, wanted: str) -> str:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if found := re.search(wanted, text):
            return found.group(0)
        time.sleep(0.02)
    raise AssertionError(f"{wanted!r} never came: {text!r}")


def test_a_death_shows_node_exit_code_log_and_the_last_forty_lines(start):
    child = start("dies", "7", wait_for="line 60")
    assert child.wait(30) is not None
    message = child.failure()
    assert "prefill-0 on node1 ended with exit code 7" in message
    assert str(child.log) in message
    shown = re.findall(r"line \d+", message)
    assert shown == [f"line {n}" for n in range(21, 61)]


def test_a_death_by_signal_is_128_plus_its_number(start):
    child = start("signal", "SIGSEGV")
    assert child.wait(30).code == 139


def test_term_is_enough_for_a_willing_child(start):
    child = start("waits")
    ended = child.stop(30)
    assert (ended.code, ended.asked, ended.killed, child.killed) == (143, True, False, False)


def test_a_child_that_ignores_term_is_killed(start):
    child = start("ignores_term")
    assert child.stop(0.3).code == 137
    assert child.killed


def test_what_the_leader_leaves_in_its_group_is_killed(start):
    child = start("leaves_child")
    orphan = int(wait_for_line(child.log, r"child \d+").split()[1])
    assert orphan in group_members(child.pid)
    assert orphan in descendants(os.getpid())
    child.stop(30)
    assert not group_members(child.pid)
    assert not Path(f"/proc/{orphan}/exe").exists()


def test_poll_does_not_reap_so_the_group_id_stays_ours(start):
    child = start("dies", wait_for="line 60")
    assert child.wait(30).code == 3
    assert Path(f"/proc/{child.pid}").exists()
    child.kill_group()
    assert not Path(f"/proc/{child.pid}").exists()
    assert child.poll().code == 3


def test_stop_together_waits_once_for_all(start):
    stubborn = [start("ignores_term") for _ in range(3)]
    willing = start("waits")
    stop_together([*stubborn, willing], 0.5)
    assert [c.killed for c in (*stubborn, willing)] == [True, True, True, False]


def test_a_program_that_is_not_there_is_said(tmp_path):
    with pytest.raises(StageFailed, match=r"etcd on n1 could not be started: .*No such file.*\n  command: /no/such"):
        Child("etcd", ["/no/such"], {}, tmp_path / "etcd.log", node="n1")


def test_children_die_with_the_process_that_started_them(tmp_path):
    code = (
        "import os, sys, pathlib; sys.path.insert(0, sys.argv[1]); from pdlaunch.node.process import Child\n"
        f"c = Child('x', [sys.executable, {CHILD!r}, 'waits'], dict(os.environ), pathlib.Path(sys.argv[2]))\n"
        "print(c.pid, flush=True)\nimport time; time.sleep(3600)"
    )
    parent = Child(
        "parent",
        [sys.executable, "-c", code, str(Path(__file__).parent.parent), str(tmp_path / "x.log")],
        dict(os.environ),
        tmp_path / "parent.log",
    )
    try:
        pid = int(wait_for_line(parent.log, r"\d+\n"))
        wait_for_line(tmp_path / "x.log", "up")
        os.kill(parent.pid, 9)
        deadline = time.monotonic() + 30
        while pid in group_members(pid) and time.monotonic() < deadline:
            time.sleep(0.02)
        assert pid not in group_members(pid)
    finally:
        parent.kill_group()


def nothing() -> None:
    pass


def test_a_wait_ends_when_ready():
    answers = iter([False, False, True])
    wait_until(lambda: next(answers), "x", 30, check=nothing, stop=threading.Event(), poll_s=0.001)


def test_a_wait_that_passes_its_deadline_says_what_was_missing():
    with pytest.raises(StageFailed, match=r"engines: not there after 0\.05 s; decode: 0 of 1"):
        wait_until(lambda: False, "engines", 0.05, check=nothing, stop=threading.Event(), poll_s=0.01, waiting_for=lambda: "decode: 0 of 1")


def test_a_wait_ends_at_once_when_a_child_dies():
    def check():
        raise StageFailed("decode-0 died")

    with pytest.raises(StageFailed, match="decode-0 died"):
        wait_until(lambda: False, "engines", 3600, check=check, stop=threading.Event())


def test_a_wait_ends_at_once_when_stopped():
    stop = threading.Event()
    stop.set()
    with pytest.raises(StopRequested, match="engines"):
        wait_until(lambda: True, "engines", 3600, check=nothing, stop=stop)


def test_tail_of_missing_empty_and_long_files(tmp_path):
    assert "no log" in tail(tmp_path / "none")
    (tmp_path / "empty").touch()
    assert tail(tmp_path / "empty") == "(the log is empty)"
    (tmp_path / "long").write_text("x" * 200_000 + "\nlast\n")
    assert tail(tmp_path / "long", 1) == "last"


def test_shm_of_a_process_is_seen(start, tmp_path):
    child = start("leaves_shm", str(tmp_path / "name"))
    name = (tmp_path / "name").read_text()
    assert name in shm_held_by([child.pid])
    assert name not in shm_held_by([os.getpid()])
    child.stop(30)
    (Path("/dev/shm") / name).unlink(missing_ok=True)


def test_a_semaphore_is_found_with_its_maker_although_glibc_maps_another_name() -> None:
    lock = multiprocessing.get_context("spawn").Lock()
    name = "sem." + str(lock._semlock.name).lstrip("/")  # type: ignore[attr-defined]
    assert name in shm_held_by([os.getpid()])
    assert name not in shm_held_by([os.getppid()])
