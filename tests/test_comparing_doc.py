"""docs/comparing.md is a promise: every command in it runs, with real archived runs for its RUN, NAME, FILE and FOLDER."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest

from tests.calls import call
from tests.envs import ROOT

TEXT = (ROOT / "docs" / "comparing.md").read_text(encoding="utf-8")
REFERENCE = ROOT / "results" / "reference"
RUNS = [min((REFERENCE / recipe).glob("*/")) for recipe in ("gpu-tiny-p1d2", "gpu-tiny-p1d2-hybrid")]


def commands(text: str) -> list[list[str]]:
    """Words after `python launch.py` of every command, in code spans and code blocks."""
    return [shlex.split(words) for words in re.findall(r"(?:`|^)python launch\.py ([^`\n]+)", text, re.MULTILINE)]


def filled(words: list[str], scratch: Path) -> list[str]:
    """Placeholders as values; a command that names no run reads the committed ones."""
    runs = iter(RUNS)
    values = {"NAME": "gpu-tiny-p1d2", "N": "2", "FOLDER": str(scratch / "out"), "FILE": str(min(scratch.glob("out/*"), default="none"))}
    found = [str(next(runs)) if w == "RUN" else str(scratch / w) if w.endswith((".html", ".json")) else values.get(w, w) for w in words]
    found = [str(ROOT / w) if w.startswith("data/") else w for w in found]
    if words[0] in ("runs", "compare") and "RUN" not in words:
        found += ["--results", str(scratch / "two" if words[0] == "compare" else REFERENCE)]
    return found


def test_every_command_of_the_document_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (1, 2):  # --last N needs two runs of one recipe
        shutil.copytree(RUNS[0], tmp_path / "two" / "gpu-tiny-p1d2" / f"20261130T00000{number}Z-{number}")
    found = commands(TEXT)
    assert {words[0] for words in found} == {"runs", "compare", "report", "utilisation", "export", "import", "verify"}
    for words in found:
        code, said = call(filled(words, tmp_path), monkeypatch)
        assert code == 0, (words, said)
        assert said.strip(), words


def test_a_wrong_key_would_be_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (words,) = commands("| x | `python launch.py runs --where colour~red` |")
    assert call(filled(words, tmp_path), monkeypatch)[0] == 2


def test_options_that_the_document_names_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    helped = "".join(call([verb, "--help"], monkeypatch)[1] for verb in {words[0] for words in commands(TEXT)})
    assert set(re.findall(r"(?<=`)--[a-z-]+", TEXT)) <= set(re.findall(r"--[a-z-]+", helped))
