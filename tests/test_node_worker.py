from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdlaunch.node.allocation import local_hosts
from pdlaunch.node.contracts import write_json
from pdlaunch.node.engines import start_rank, stop_ranks
from pdlaunch.node.procfs import group_members
from pdlaunch.node.spec import EngineRank, to_json
from pdlaunch.node.worker import EXIT_NOT_STARTED
from tests.fakes.specs import engine, spec

CHILD = str(Path(__file__).parent / "fakes" / "child.py")
SMI = """#!/bin/sh
case "$*" in
  *compute-apps*) echo "GPU-bb, 4711, 41200" ;;
  *) printf '0, NVIDIA B300, GPU-aa, 3, 275040\\n1, NVIDIA B300, GPU-bb, 41234, 275040\\n' ;;
esac
"""


class Bench:
    """Starts engine ranks as the supervisor does, in one run folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.run_dir, self.ranks = folder, folder / "run", []
        self.values = {
            "run_dir": str(self.run_dir),
            "bundle_dir": str(folder),
            "namespace": "test",
            "head_ip": "127.0.0.1",
            "tmp_dir": str(folder),
        }

    def start(self, *argv: str, env: dict[str, str] | None = None, rank: int = 0, **changes: object):
        made = engine("prefill", (sys.executable, CHILD, *argv), env or {}, "dynamo.vllm")
        made = replace(made, **{k: v for k, v in changes.items() if k in made.__dataclass_fields__})
        whole = spec(self.folder / "results", (), (made,))
        whole = replace(whole, run=replace(whole.run, device=changes.get("device", "cpu")))
        write_json(self.folder / "spec.json", to_json(whole))
        started = start_rank(whole, self.folder / "spec.json", made, rank, local_hosts(whole)[0], self.values)
        self.ranks.append(started)
        return started


@pytest.fixture
def bench(tmp_path):
    made = Bench(tmp_path)
    yield made
    stop_ranks(made.ranks, 2.0)


def until(found, what):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if value := found():
            return value
        time.sleep(0.02)
    raise AssertionError(f"{what} never came")


def line(rank, pattern):
    def look():
        return rank.log.exists() and re.search(pattern, rank.log.read_text(encoding="utf-8"))

    return until(look, pattern)


def test_facts_come_before_the_engine_and_its_environment_is_its_own(bench, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    monkeypatch.setenv("DYN_NAMESPACE", "production")
    monkeypatch.setenv("HF_TOKEN", "planted-secret-77")
    env = {"VLLM_HOST_IP": "%{node_ip}", "MY_API_KEY": "abcdef99"}
    rank = bench.start("shows", "%{system_port}/%{side_channel_port}/%{namespace}", env=env)
    shown = json.loads(line(rank, r"\{.*\}").group(0))
    facts = rank.facts()
    assert shown["argument"] == f"{facts['ports']['system_port']}/{facts['ports']['side_channel_port']}/test"
    assert shown["env"]["VLLM_HOST_IP"] == facts["node_ip"] == "127.0.0.1"
    assert not {"SLURM_JOB_ID", "DYN_NAMESPACE"} & set(shown["env"])
    assert shown["cwd"] == shown["env"]["TMPDIR"]
    assert Path(shown["cwd"]).is_dir()
    assert facts["removed_environment"][:2] == ["DYN_NAMESPACE", "SLURM_JOB_ID"]
    assert facts["metrics_url"] == f"http://127.0.0.1:{facts['ports']['system_port']}/metrics"
    assert facts["exit"] is None
    stop_ranks([rank], 20)
    assert not Path(shown["cwd"]).exists()
    written = "".join(p.read_text() for p in bench.run_dir.rglob("*") if p.is_file())
    assert "planted-secret-77" not in written
    assert "abcdef99" not in written
    assert rank.facts()["exit"]["asked"] is True
    assert rank.child.poll().code == 0


def test_a_death_shows_the_engines_last_lines_and_its_code(bench):
    rank = bench.start("dies", "7")
    assert rank.child.wait(60).code == 7
    message = rank.failure()
    assert "prefill-0" in message
    assert "exit code 7" in message
    assert "line 60" in message
    assert "line 20\n" not in message
    assert rank.facts()["exit"] == {**rank.facts()["exit"], "code": 7, "asked": False, "killed": False}


def test_an_engine_that_cannot_be_started_is_said(bench):
    other = engine("decode", ("/no/such/python", "-m", "x"), {}, "dynamo.vllm")
    whole = spec(bench.folder / "results", (), (other,))
    write_json(bench.folder / "spec2.json", to_json(whole))
    rank = start_rank(whole, bench.folder / "spec2.json", other, 0, local_hosts(whole)[0], bench.values)
    bench.ranks.append(rank)
    assert rank.child.wait(60).code == EXIT_NOT_STARTED
    assert "/no/such/python" in rank.failure()


def test_an_engine_that_ignores_term_is_killed_in_time(bench):
    rank = bench.start("ignores_term")
    line(rank, "up")
    stop_ranks([rank], 4.5)
    assert rank.child.poll().code == 0
    assert rank.facts()["exit"] == {**rank.facts()["exit"], "code": 137, "asked": True, "killed": True}


@pytest.mark.parametrize("where", ["same_group", "own_session"])
def test_nothing_of_an_engine_is_left(bench, where):
    rank = bench.start("leaves_child", where)
    orphan = int(line(rank, r"child (\d+)").group(1))
    stop_ranks([rank], 20)
    assert not Path(f"/proc/{orphan}").exists() or orphan not in group_members(orphan)
    if where == "own_session":
        assert rank.facts()["removed"]["processes"] == [orphan]


def test_only_its_own_shared_memory_is_removed(bench, tmp_path):
    foreign = Path("/dev/shm/psm_0000test")
    rank = bench.start("leaves_shm", str(tmp_path / "name"))
    line(rank, "up")
    foreign.write_bytes(b"another job's")
    mine = Path("/dev/shm") / (tmp_path / "name").read_text()
    try:
        assert mine.exists()
        stop_ranks([rank], 20)
        assert rank.facts()["removed"]["shm"] == [mine.name]
        assert not mine.exists()
        assert foreign.exists()
    finally:
        foreign.unlink()


def test_logs_have_no_escape_sequences(bench):
    rank = bench.start("prints", r"\x1b[32mINFO\x1b[0m ready\r\n")
    line(rank, "up")
    assert rank.log.read_text().splitlines()[0] == "INFO ready"


def test_the_end_of_the_supervisor_ends_the_engine(bench):
    rank = bench.start("waits")
    line(rank, "up")
    rank.child.popen.stdin.close()
    assert rank.child.wait(60).code == 0
    assert rank.facts()["exit"]["why"] == "the supervisor is gone"


def test_term_to_the_wrapper_ends_the_engine(bench):
    rank = bench.start("waits")
    line(rank, "up")
    os.kill(rank.child.pid, signal.SIGTERM)
    assert rank.child.wait(60).code == 0
    assert rank.facts()["exit"]["why"] == "SIGTERM"


def test_rank_1_meets_rank_0_where_rank_0_says(bench):
    argv = (sys.executable, CHILD, "shows", "%{master_ip}:%{master_port}")
    ranks = (EngineRank(0, (), argv), EngineRank(0, (), argv))
    second = bench.start("shows", rank=1, ranks=ranks)
    first = bench.start("shows", rank=0, ranks=ranks)
    seen = [json.loads(line(r, r"\{.*\}").group(0))["argument"] for r in (first, second)]
    assert seen[0] == seen[1] == f"127.0.0.1:{first.facts()['ports']['master_port']}"
    assert second.process == "prefill-0.r1"
    assert second.facts()["metrics_url"] == ""


def test_gpus_that_are_not_free_stop_the_start_and_nothing_is_killed(bench, tmp_path, monkeypatch):
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "nvidia-smi").write_text(SMI)
    (tmp_path / "bin" / "nvidia-smi").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    argv = (sys.executable, CHILD, "shows")
    rank = bench.start(device="cuda", ranks=(EngineRank(0, (1,), argv),))
    assert rank.child.wait(60).code == EXIT_NOT_STARTED
    assert "GPU 1 (GPU-bb) has 41234 MiB in use, processes: [4711]" in rank.failure()
    assert "nothing was killed" in rank.failure()
    free = bench.start(device="cuda", ranks=(EngineRank(0, (0,), argv),))
    shown = json.loads(line(free, r"\{.*\}").group(0))
    assert shown["env"]["CUDA_VISIBLE_DEVICES"] == "0"
    assert [g["uuid"] for g in free.facts()["gpus"]] == ["GPU-aa"]
