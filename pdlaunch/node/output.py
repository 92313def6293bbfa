"""Lines for whoever reads along. A reader that went away, a terminal that closed or a full disk is no reason to end a run."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TextIO


def say(text: str, stream: TextIO | None = None) -> None:
    """One line on stream (standard output), flushed; never raises. A stream that fails once gets nothing any more, also not at exit."""
    out = sys.stdout if stream is None else stream
    if out is None:  # Python's word for a stream that was closed before it started
        return
    try:
        encoding = getattr(out, "encoding", None) or "utf-8"
        print(text.encode(encoding, "backslashreplace").decode(encoding), file=out, flush=True)
    except (OSError, ValueError):
        _give_up(out)


def as_typed(text: str, launcher: int) -> str:
    """text without the current folder of the process `launcher` at its start: a path as whoever started it may type it. 0: unchanged."""
    if not launcher:
        return text
    try:
        return text.removeprefix(f"{str(Path(f'/proc/{launcher}/cwd').readlink()).rstrip('/')}/")
    except OSError:
        return text


def _give_up(out: TextIO) -> None:
    """What is left in its buffer would raise when the interpreter flushes it, and turn the exit code into 120."""
    with contextlib.suppress(OSError, ValueError):
        null = os.open(os.devnull, os.O_WRONLY)
        try:
            os.dup2(null, out.fileno())
        finally:
            os.close(null)
