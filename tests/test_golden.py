"""Rendered bundles, compared whole: what a change does to every shipped recipe is seen in review."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest

from pdlaunch.node.spec import PLACEHOLDERS, Spec, from_json, placeholders_in
from tests.golden_cases import CASES, GOLDEN, files_of, folder_of

IDS = [folder_of(*case).name for case in CASES]


def test_no_golden_folder_without_a_case() -> None:
    assert {p.name for p in GOLDEN.iterdir()} == set(IDS)


@pytest.mark.parametrize(("name", "site"), CASES, ids=IDS)
def test_bundle_equals_its_golden_files(name: str, site: str) -> None:
    rendered, folder = files_of(name, site), folder_of(name, site)
    assert {p.name for p in folder.iterdir()} == set(rendered), "tools/update_golden.py renders them again"
    for file, text in rendered.items():
        assert text == (folder / file).read_text(encoding="utf-8"), f"{folder.name}/{file}: tools/update_golden.py renders it again"


@pytest.mark.parametrize(("name", "site"), CASES, ids=IDS)
def test_spec_of_golden_bundle_loads_and_names_only_known_placeholders(name: str, site: str) -> None:
    text = (folder_of(name, site) / "spec.json").read_text(encoding="utf-8")
    spec = from_json(Spec, json.loads(text))
    assert placeholders_in(text) <= PLACEHOLDERS
    for engine in spec.engines:
        assert all(rank.node < len(spec.nodes) for rank in engine.ranks)
        assert all(not rank.gpus or max(rank.gpus) < max(spec.nodes[rank.node].gpus, 4) for rank in engine.ranks)


SCRIPTS = sorted(GOLDEN.glob("*/*.sbatch")) + sorted(GOLDEN.glob("*/submit.sh"))


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda p: f"{p.parent.name}/{p.name}")
def test_script_is_sound_bash(script: Path) -> None:
    subprocess.run(["bash", "-n", script], check=True, timeout=30)
    done = subprocess.run(["shellcheck", script], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout


def test_the_template_is_thin() -> None:
    template = (GOLDEN.parent.parent / "slurm" / "job.sbatch.j2").read_text(encoding="utf-8")
    assert len(template.splitlines()) <= 120
    for word in ("for role", "prefill", "decode", "$(("):
        assert word not in template
