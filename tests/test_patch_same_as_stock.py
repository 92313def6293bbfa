"""For pairs that stock vLLM handles, the patches give NIXL exactly what stock gives it: the same lists and transfers, in the same order."""

from __future__ import annotations

import json
import subprocess
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.envs import PER_GROUP, PER_REGION, engine_python
from tests.test_patch_matrix import LIMIT_S, TESTS, run_pytest

pytestmark = pytest.mark.engine


@cache
def dumps() -> dict[str, dict[str, Any]]:
    """Environment -> pair -> what each decode rank asked of NIXL; {} where a request failed or got wrong bytes."""
    sets: dict[str, list[str]] = {"stock": [], "per-region": [PER_REGION], "both": [PER_REGION, PER_GROUP]}
    running = {
        name: subprocess.Popen(
            [str(engine_python(patches)), "dump_descriptors.py"], cwd=TESTS, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for name, patches in sets.items()
    }
    found = {}
    try:
        for name, process in running.items():
            said, errors = process.communicate(timeout=LIMIT_S)
            assert process.returncode == 0, errors[-4000:]
            found[name] = json.loads(said)
    finally:
        for process in running.values():
            process.kill()
            process.communicate()
    return found


@pytest.mark.timeout(LIMIT_S + 60)
def test_stock_is_right_for_every_pair_of_the_dump() -> None:
    """Uniform heads at every TP, mixed heads up to as many ranks as both kinds have heads, equal TP; manager on and off."""
    stock = dumps()["stock"]
    assert [pair for pair, calls in stock.items() if not calls] == []
    kinds = Counter((name.split()[0], name.split("manager=")[1]) for name in stock)
    assert kinds == {("unscheduled", "on"): 40, ("unscheduled", "off"): 65, ("scheduled", "on"): 15, ("scheduled", "off"): 3}


@pytest.mark.timeout(LIMIT_S + 60)
@pytest.mark.parametrize("patched", ["per-region", "both"])
def test_what_nixl_is_given_is_what_stock_gives(patched: str) -> None:
    stock, ours = dumps()["stock"], dumps()[patched]
    assert [pair for pair, calls in stock.items() if ours[pair] != calls] == []


@pytest.mark.timeout(LIMIT_S + 60)
def test_the_comparison_sees_what_bytes_do_not_show(tmp_path: Path) -> None:
    run_pytest(engine_python([PER_REGION, PER_GROUP]), ["test_dump.py"], tmp_path / "report.xml")
