"""Whole runs through a real sbatch: slurmctld and two slurmd on loopback, eight pretended GPUs each; the engines compute on the CPU."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import runs
from tests.e2e.slurm_cluster import SlurmCluster

pytestmark = pytest.mark.stack

FINISHED = {"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "DEADLINE"}


@pytest.fixture(scope="module")
def slurm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SlurmCluster]:
    cluster = SlurmCluster(tmp_path_factory.mktemp("slurm"))
    cluster.start()
    yield cluster
    cluster.stop()


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    before = runs.shared_memory()
    yield
    assert runs.processes_with(str(tmp_path)) == []
    assert runs.shared_memory() - before == set()


def submit(slurm: SlurmCluster, recipe: str, results: Path, *settings: str) -> Path:
    """The bundle of a submitted recipe."""
    bundle = results / f"bundle {recipe}"
    arguments = ["submit", "--recipe", recipe, "--cluster", "local-slurm", "--out", str(bundle), "--set", f"cluster.results_dir={results}"]
    for setting in settings:
        arguments += ["--set", setting]
    done = runs.launch(*arguments, env=slurm.env)
    assert done.returncode == 0, done.stdout + done.stderr
    return bundle


def job_id(bundle: Path) -> str:
    return str(json.loads((bundle / "receipt.json").read_text())["job_id"])


def state(slurm: SlurmCluster, job: str) -> str:
    answer = slurm.command("scontrol", "show", "job", job).stdout
    return answer.split("JobState=")[1].split()[0]


def wait_for_end(slurm: SlurmCluster, job: str, deadline_s: float = runs.DEADLINE_S) -> str:
    end = time.monotonic() + deadline_s
    while (now := state(slurm, job)) not in FINISHED:
        assert time.monotonic() < end, slurm.command("scontrol", "show", "job", job).stdout
        time.sleep(0.5)
    return now


def finished(slurm: SlurmCluster, recipe: str, results: Path, bundle: Path) -> runs.Run:
    job = job_id(bundle)
    ended = wait_for_end(slurm, job)
    output = "".join(path.read_text(errors="replace") for path in sorted(bundle.glob("*.out")))
    detail = slurm.command("scontrol", "show", "job", job).stdout
    assert (results / recipe).is_dir(), f"{ended}\n{output[-4000:]}\n{detail}"
    return runs.Run(runs.only_run(results, recipe), 0 if ended == "COMPLETED" else 1, f"{ended}\n{output}\n{detail}")


def test_one_gpu_each_on_two_nodes(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = submit(slurm, "tiny-p1d1", tmp_path, "cluster.nodes.gpus_per_node=1")
    run = finished(slurm, "tiny-p1d1", tmp_path, bundle)
    assert run.verdict()["verdict"] == "VALID", run.explain()
    status = runs.launch("status", str(bundle), "--format", "json", env=slurm.env)
    assert status.returncode == 0, status.stderr
    assert "VALID" in status.stdout


def test_heterogeneous_job_of_one_and_two_gpus(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = submit(slurm, "tiny-p1d2", tmp_path, "cluster.nodes.gpus_per_node=2")
    assert "hetjob" in (bundle / "job.sbatch").read_text()
    run = finished(slurm, "tiny-p1d2", tmp_path, bundle)
    assert run.verdict()["verdict"] == "VALID", run.explain()
    assert run.evidence("transfer.decode.total.bytes") == run.evidence("transfer.decode.total.predicted_bytes") > 0, run.explain()


def test_cancelled_job_is_archived_as_incomplete(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = submit(slurm, "mocker-p1d1", tmp_path)
    end = time.monotonic() + 120
    while not any('"first_token"' in path.read_text() for path in tmp_path.glob("mocker-p1d1/*/events.jsonl")):
        assert time.monotonic() < end, sorted(tmp_path.iterdir())
        time.sleep(0.1)
    cancelled = runs.launch("cancel", str(bundle), env=slurm.env)
    assert cancelled.returncode == 0, cancelled.stderr
    run = finished(slurm, "mocker-p1d1", tmp_path, bundle)
    assert run.verdict()["verdict"] == "INCOMPLETE", run.explain()


def test_time_limit_is_archived_as_incomplete(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = submit(slurm, "mocker-p1d1", tmp_path, "time_limit_minutes=1",
                    "load=[{name: long, input_tokens: 64, output_tokens: 64, request_rate_per_s: 0.2, requests: 100}]")
    run = finished(slurm, "mocker-p1d1", tmp_path, bundle)
    assert run.verdict()["verdict"] == "INCOMPLETE", run.explain()


def test_a_second_submission_of_one_bundle_is_refused(slurm: SlurmCluster, tmp_path: Path) -> None:
    bundle = submit(slurm, "mocker-p1d1", tmp_path)
    again = runs.launch("submit", "--bundle", str(bundle), env=slurm.env)
    assert again.returncode == 2
    assert job_id(bundle) in again.stderr
    runs.launch("cancel", str(bundle), env=slurm.env)
    wait_for_end(slurm, job_id(bundle))


def test_two_jobs_on_one_node_do_not_meet(slurm: SlurmCluster, tmp_path: Path) -> None:
    first, second = tmp_path / "a", tmp_path / "b"
    first.mkdir()
    second.mkdir()
    bundles = [submit(slurm, "mocker-p1d1", folder) for folder in (first, second)]
    for folder, bundle in zip((first, second), bundles, strict=True):
        run = finished(slurm, "mocker-p1d1", folder, bundle)
        assert run.verdict()["verdict"] != "INCOMPLETE", run.explain()
        assert run.verdict()["verdict"] == "VALID", run.explain()
