"""The per-region patch under vLLM's own connector classes: patches/tests, run by the engine environments' own Python."""

from __future__ import annotations

import json
import subprocess
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from tests.envs import PER_REGION, ROOT, engine_python

pytestmark = pytest.mark.engine
TESTS = ROOT / "patches" / "tests"
# Enough for the slowest file on two busy cores; a hang is a failure with its output.
LIMIT_S = 540


def run_pytest(python: Path, name: str, report: Path) -> ET.Element:
    """Run one file of patches/tests in an engine environment; its JUnit report. Any failure shows the run's tail."""
    command = [str(python), "-m", "pytest", "-q", name, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    assert suite.get("skipped") == "0"
    return suite


@pytest.mark.parametrize(
    ("name", "at_least"),
    [("test_matrix.py", 117), ("test_requests.py", 25), ("test_refusals.py", 19), ("test_skew.py", 20), ("test_mutations.py", 9)],
)
def test_patched_connector(name: str, at_least: int, tmp_path: Path) -> None:
    suite = run_pytest(engine_python([PER_REGION]), name, tmp_path / "report.xml")
    assert int(suite.get("tests", "0")) >= at_least


def test_stock_still_fails_exactly_as_reported(tmp_path: Path) -> None:
    """The drop rule: once stock moves every byte, the canary says so and this test asks for the patch to go."""
    suite = run_pytest(engine_python([]), "test_canary.py", tmp_path / "report.xml")
    seen = {p.get("value") for p in suite.iter("property") if p.get("name") == "stock"}
    assert seen == {"fails as reported"}, "stock vLLM moves every byte now: drop the patch (patches/README.md)"


def test_descriptors_of_pairs_that_stock_handles_are_those_of_stock() -> None:
    dumps = []
    for patches in ([], [PER_REGION]):
        command = [str(engine_python(patches)), "dump_descriptors.py"]
        done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT_S, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        dumps.append(json.loads(done.stdout))
    stock, patched = dumps
    assert len(stock) == 47
    assert patched == stock
