"""Lines for a reader that may go away, and temporary folders of owners that may be killed."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from pdlaunch.node import folders
from pdlaunch.node.output import say
from pdlaunch.node.procfs import started_ticks
from tests.envs import ROOT

TALKER = """
import sys
from pdlaunch.node.output import say
say("one"); say("two", sys.stderr)
sys.stdin.read()
for _ in range(3):
    say("x" * 200000); say("y" * 200000, sys.stderr)
print("left in the buffer")
sys.exit(7)
"""


def talker(script: str, stdout: int, stderr: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdin=subprocess.PIPE, stdout=stdout, stderr=stderr)


def test_a_reader_that_went_away_changes_neither_what_is_done_nor_the_exit_code() -> None:
    child = talker(TALKER, subprocess.PIPE, subprocess.STDOUT)
    assert child.stdout is not None and child.stdin is not None
    assert child.stdout.readline() == b"one\n"
    child.stdout.close()
    child.stdin.close()
    assert child.wait(30) == 7


def test_print_would_have_ended_it() -> None:
    """The same without say: the test above can fail."""
    child = talker(TALKER.replace("say(", "print(").replace(", sys.stderr", ", file=sys.stderr"), subprocess.PIPE, subprocess.DEVNULL)
    assert child.stdout is not None and child.stdin is not None
    child.stdout.read(1)
    child.stdout.close()
    child.stdin.close()
    assert child.wait(30) != 7


def test_a_full_disk_is_no_reason_either() -> None:
    with Path("/dev/full").open("wb") as full:
        child = talker(TALKER, full.fileno(), full.fileno())
        assert child.stdin is not None
        child.stdin.close()
        assert child.wait(30) == 7


def test_text_that_the_stream_cannot_hold_and_streams_that_are_closed(capsys: pytest.CaptureFixture[str]) -> None:
    raw = io.BytesIO()
    narrow = io.TextIOWrapper(raw, encoding="ascii")
    say("a\udcff…", narrow)
    assert raw.getvalue() == b"a\\udcff\\u2026\n"
    narrow.close()
    say("closed", narrow)
    say("seen")
    assert capsys.readouterr().out == "seen\n"


def owned(parent: Path, **changes: object) -> Path:
    folder = folders.temporary(parent)
    owner = json.loads((folder / folders.OWNER).read_text())
    (folder / folders.OWNER).write_text(json.dumps(owner | changes))
    return folder


def process_start(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19])


def test_only_folders_whose_owner_is_known_to_be_gone_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    gone = subprocess.Popen(["true"])
    os.waitid(os.P_PID, gone.pid, os.WEXITED | os.WNOWAIT)
    zombie = owned(tmp_path, pid=gone.pid, started_ticks=process_start(gone.pid))
    assert folders.remove_abandoned() == [zombie]
    gone.wait()
    ticks = started_ticks(os.getpid())
    assert ticks is not None
    dead, recycled = owned(tmp_path, pid=gone.pid), owned(tmp_path, started_ticks=ticks - 1)
    (dead / "etcd").mkdir()
    (dead / "etcd" / "data").touch()
    kept = [
        owned(tmp_path),
        owned(tmp_path, pid=gone.pid, boot="another"),
        owned(tmp_path, pid=gone.pid, pid_namespace="pid:[1]"),
        owned(tmp_path, pid="x"),
        tmp_path / "pdl-unmarked",
        tmp_path / "pdl-cut",
        tmp_path / "other",
        tmp_path / "pdl-link",
    ]
    for folder in kept[4:7]:
        folder.mkdir()
    (tmp_path / "pdl-cut" / folders.OWNER).write_text('{"pid": ')
    elsewhere = owned(tmp_path / "other", pid=gone.pid)
    kept[7].symlink_to(elsewhere)
    assert sorted(folders.remove_abandoned()) == sorted([dead, recycled])
    assert [f for f in (dead, recycled) if f.exists()] == []
    assert [f for f in (*kept, elsewhere) if not f.exists()] == []


def test_a_folder_of_another_user_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders.tempfile, "gettempdir", lambda: str(tmp_path))
    folder = owned(tmp_path, started_ticks=1)
    with monkeypatch.context() as other:
        other.setattr(folders.os, "getuid", lambda: folder.stat().st_uid + 1)
        assert folders.remove_abandoned() == []
    assert folders.remove_abandoned(tmp_path) == [folder]
