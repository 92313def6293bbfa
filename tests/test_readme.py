"""The README is a promise: its links lead somewhere, its verbs and make targets exist, and no verb is missing."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path

import pytest

from tests.envs import ROOT, launcher_python

README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCUMENTS = sorted([ROOT / "README.md", ROOT / "patches" / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "models").rglob("*.md")])


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: str(p.relative_to(ROOT)))
def test_links_lead_to_files(document: Path) -> None:
    links = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", document.read_text(encoding="utf-8"))
    missing = [x for x in links if "://" not in x and not (document.parent / x).exists()]
    assert missing == []


def test_every_verb_of_the_command_line_is_in_the_table_and_no_other() -> None:
    shown = subprocess.run([launcher_python(), "launch.py", "--help"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    verbs = set(re.findall(r"^  ([a-z]+)  ", shown.split("Commands:")[1], re.MULTILINE))
    table = README.split("## Commands")[1].split("##")[0]
    told = {verb for row in re.findall(r"^\| (`[^|]*`) \|", table, re.MULTILINE) for verb in re.findall(r"`([a-z]+)`", row)}
    assert told == verbs
    used = set(re.findall(r"launch\.py ([a-z]+)", README))
    assert used <= verbs


def test_make_targets_that_it_names_exist() -> None:
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert set(re.findall(r"make ([a-z-]+)", README)) <= targets


def test_its_recipes_and_clusters_exist() -> None:
    names = set(re.findall(r"--recipe ([a-z0-9-]+)", README)) | set(re.findall(r"RECIPE=([a-z0-9-]+)", README))
    assert {n for n in names if not (ROOT / "recipes" / f"{n}.yaml").exists()} == set()
