"""What /proc says about processes: groups, descendants, and who holds a file of /dev/shm. Linux only, like everything under node/."""

from __future__ import annotations

import ctypes
import signal
from collections.abc import Iterable
from pathlib import Path

PROC = Path("/proc")
SHM = Path("/dev/shm")
_LIBC = ctypes.CDLL(None, use_errno=True)
"""Loaded before any fork: a child of a process with threads may not load anything."""
_PR_SET_PDEATHSIG, _PR_SET_CHILD_SUBREAPER = 1, 36


def die_with_parent(signum: int = signal.SIGKILL) -> None:
    """Ask the kernel to send signum to this process when the thread that made it ends (prctl(2))."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0)


def adopt_orphans() -> None:
    """Make this process the parent of every descendant whose own parent ends, so that none can escape (prctl(2))."""
    _LIBC.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _stat(pid: int) -> tuple[str, int, int] | None:
    """(state, parent pid, process group) of a process, or None when it is gone."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return fields[0], int(fields[1]), int(fields[2])


def started_ticks(pid: int) -> int | None:
    """When a process started, in clock ticks since boot: with the pid it names a process for good (proc(5)). None when it is gone; a
    zombie is."""
    try:
        text = (PROC / str(pid) / "stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()
    return None if fields[0] in "ZX" else int(fields[19])


def _all() -> dict[int, tuple[str, int, int]]:
    found = {}
    for entry in PROC.iterdir():
        if entry.name.isdigit():
            stat = _stat(int(entry.name))
            if stat is not None:
                found[int(entry.name)] = stat
    return found


def group_members(pgid: int) -> list[int]:
    """Living processes of a process group; a zombie is not alive."""
    return [pid for pid, (state, _, group) in _all().items() if group == pgid and state not in "ZX"]


def descendants(root: int) -> list[int]:
    """Living processes below root, root itself not included."""
    processes = _all()
    children: dict[int, list[int]] = {}
    for pid, (_, parent, _) in processes.items():
        children.setdefault(parent, []).append(pid)
    found, queue = [], [root]
    while queue:
        for pid in children.get(queue.pop(), []):
            queue.append(pid)
            if processes[pid][0] not in "ZX":
                found.append(pid)
    return found


def shm_held_by(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm that these processes map or hold open.

    By inode, not by the name in the map: sem_open of glibc maps a temporary name and links it to the real one afterwards.
    """
    inodes: set[int] = set()
    prefix = f"{SHM}/"
    for pid in pids:
        try:
            maps = (PROC / str(pid) / "maps").read_text(encoding="utf-8", errors="replace")
            inodes |= {int(line.split()[4]) for line in maps.splitlines() if prefix in line}
            for fd in (PROC / str(pid) / "fd").iterdir():
                if str(fd.readlink()).startswith(prefix):
                    inodes.add(fd.stat().st_ino)
        except OSError:
            continue
    return {name for name, inode in _shm_inodes().items() if inode in inodes}


def _shm_inodes() -> dict[str, int]:
    found = {}
    try:
        for path in SHM.iterdir():
            found[path.name] = path.lstat().st_ino
    except OSError:
        pass
    return found


def command_line(pid: int) -> str:
    """Words of a process's command line, or '' when it is gone."""
    try:
        return (PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode("utf-8", errors="replace")
    except OSError:
        return ""


def every_pid() -> list[int]:
    return list(_all())
