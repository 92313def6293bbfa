"""Unified diffs applied exactly: every line at its stated place, no fuzz, no offset, forwards or backwards.

Why not patch(1): serving images do not always have it, its exit code hides an offset, and here a sha256 guards the text
on both sides, so that nothing but an exact match may ever be applied.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from pdlaunch.errors import PatchError, Where

_HUNK = re.compile(rb"@@ -(\d+)(?:,(\d+))? \+(\d+)(?:,(\d+))? @@")
_NO_NEWLINE = b"\\ No newline at end of file"


@dataclass(frozen=True)
class Hunk:
    """Starts: 1-based line in the old and the new text (0 for an empty text). Lines: as in the file, with newlines."""

    old_start: int
    new_start: int
    old: tuple[bytes, ...]
    new: tuple[bytes, ...]


def read_patch(path: Path) -> dict[str, tuple[Hunk, ...]]:
    """Relative path (one leading folder stripped, like -p1) -> hunks. PatchError names the line that is no diff."""
    lines = path.read_bytes().splitlines(keepends=True)
    files: dict[str, tuple[Hunk, ...]] = {}
    at = 0
    while at < len(lines):
        if lines[at].startswith(b"--- ") and at + 1 < len(lines) and lines[at + 1].startswith(b"+++ "):
            name = _stripped(lines[at + 1][4:])
            hunks: list[Hunk] = []
            at += 2
            while at < len(lines) and lines[at].startswith(b"@@"):
                hunk, at = _read_hunk(path, lines, at)
                hunks.append(hunk)
            if not hunks or name in files:
                raise PatchError(
                    f"{name} has {'no hunk' if not hunks else 'two sections'}",
                    where=Where(path, at),
                    rule="one section per file",
                )
            files[name] = tuple(hunks)
        elif files and lines[at].strip():
            raise PatchError(
                f"not a line of a diff: {lines[at][:60]!r}",
                where=Where(path, at + 1),
                rule="text only before the first section",
            )
        else:
            at += 1
    return files


def _stripped(header: bytes) -> str:
    name = header.split(b"\t")[0].strip().decode()
    return name.partition("/")[2]


def _read_hunk(path: Path, lines: list[bytes], at: int) -> tuple[Hunk, int]:
    match = _HUNK.match(lines[at])
    if not match:
        raise PatchError(
            f"not a hunk header: {lines[at][:60]!r}", where=Where(path, at + 1), rule="@@ -line,count +line,count @@"
        )
    start = at
    old_count, new_count = (1 if match[i] is None else int(match[i]) for i in (2, 4))
    old: list[bytes] = []
    new: list[bytes] = []
    at += 1
    while len(old) < old_count or len(new) < new_count or (at < len(lines) and lines[at].startswith(_NO_NEWLINE)):
        line = lines[at] if at < len(lines) else b""
        kind, text = line[:1], line[1:]
        if line.startswith(_NO_NEWLINE):
            for side in _ends(lines[at - 1][:1], old, new):
                side[-1] = side[-1].rstrip(b"\n")
        elif kind in (b" ", b"\n", b"-", b"+"):
            for side in _ends(kind, old, new):
                side.append(text if kind != b"\n" else b"\n")
        else:
            raise PatchError(
                f"the hunk ends early: {line[:60]!r}",
                where=Where(path, at + 1),
                rule=f"{old_count} old and {new_count} new lines",
            )
        at += 1
    if (len(old), len(new)) != (old_count, new_count):
        raise PatchError(
            f"{len(old)} old and {len(new)} new lines",
            where=Where(path, start + 1),
            rule=f"{old_count} and {new_count}",
        )
    return Hunk(int(match[1]), int(match[3]), tuple(old), tuple(new)), at


def _ends(kind: bytes, old: list[bytes], new: list[bytes]) -> list[list[bytes]]:
    return {b"-": [old], b"+": [new]}.get(kind, [old, new])


def patched(text: bytes, hunks: tuple[Hunk, ...], *, reverse: bool = False) -> bytes:
    """The new text; with reverse, the old text from the new one. PatchError if any line is not exactly as stated."""
    lines = text.splitlines(keepends=True)
    result: list[bytes] = []
    done = 0
    for hunk in hunks:
        start, expected, replacement = (
            (hunk.new_start, hunk.new, hunk.old) if reverse else (hunk.old_start, hunk.old, hunk.new)
        )
        begin = max(0, start - 1) if expected else start
        if begin < done or tuple(lines[begin : begin + len(expected)]) != expected:
            raise PatchError(
                f"line {start} is not what the patch expects", rule="every context line exactly, at its place"
            )
        result += lines[done:begin]
        result += replacement
        done = begin + len(expected)
    return b"".join(result + lines[done:])
