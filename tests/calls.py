"""launch.py called as a person would, in this process."""

from __future__ import annotations

import contextlib
import io
import sys

import pytest

import launch


def call(words: list[str], monkeypatch: pytest.MonkeyPatch) -> tuple[object, str]:
    monkeypatch.setattr(sys, "argv", ["launch.py", *words])
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        code = launch.main()
    return code, out.getvalue()
