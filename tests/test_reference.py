"""The recipe reference is what its tool makes of the docstrings, and every key is in it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.golden_cases import ROOT


def test_committed_reference_is_the_generated_one() -> None:
    program = "import sys; sys.path[:0] = ['.', 'tools']; import make_reference; sys.stdout.write(make_reference.reference())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout == Path(ROOT / "docs" / "recipe-reference.md").read_text(encoding="utf-8"), "run tools/make_reference.py"
    assert "engines_share_gpus" in done.stdout
