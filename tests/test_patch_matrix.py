"""The per-region patch under vLLM's own connector classes: patches/tests, run by the engine environments' own Python."""

from __future__ import annotations

import subprocess
import xml.etree.ElementTree as ET
from collections import Counter
from pathlib import Path

import pytest

from tests.envs import PER_REGION, ROOT, engine_python

pytestmark = pytest.mark.engine
TESTS = ROOT / "patches" / "tests"
FILES = {"test_matrix": 117, "test_requests": 27, "test_refusals": 19, "test_skew": 20, "test_mutations": 9}
# About 80 s of CPU time; the limit is for a machine that is busy with other things.
LIMIT_S = 1200


def run_pytest(python: Path, names: list[str], report: Path) -> ET.Element:
    """Run files of patches/tests in an engine environment; their JUnit report. Any failure shows the run's tail."""
    command = [str(python), "-m", "pytest", "-q", *names, f"--junitxml={report}"]
    done = subprocess.run(command, cwd=TESTS, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    suite = ET.parse(report).getroot().find("testsuite")
    assert suite is not None
    assert suite.get("skipped") == "0"
    return suite


@pytest.mark.timeout(LIMIT_S + 60)
def test_patched_connector(tmp_path: Path) -> None:
    suite = run_pytest(engine_python([PER_REGION]), [f"{name}.py" for name in FILES], tmp_path / "report.xml")
    ran = Counter(str(case.get("classname")).split(".")[-1] for case in suite.iter("testcase"))
    assert {name: ran[name] for name in FILES if ran[name] < FILES[name]} == {}


@pytest.mark.timeout(LIMIT_S + 60)
def test_stock_still_fails_exactly_as_reported(tmp_path: Path) -> None:
    """The drop rule: once stock moves every byte, the canary says so and this test asks for the patch to go."""
    suite = run_pytest(engine_python([]), ["test_canary.py"], tmp_path / "report.xml")
    seen = {p.get("value") for p in suite.iter("property") if p.get("name") == "stock"}
    assert seen == {"fails as reported"}, "stock vLLM moves every byte now: drop the patch (patches/README.md)"
