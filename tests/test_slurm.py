"""The submit transaction against Slurm commands that refuse, hang, lose their answer, or answer nonsense."""

from __future__ import annotations

import fcntl
import functools
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from pdlaunch import bundle, preflight, session, slurm
from pdlaunch.errors import SubmitError
from tests.fakes import slurm_commands
from tests.test_bundle import make

OK = {"test_only": {"err": "sbatch: Job 7 to start at 2026-01-01T00:00:00 using 1 processors on nodes node1 in partition gpu\n"}}


class Site:
    """A bundle, fake commands first in PATH, and a clock."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.commands = tmp_path / "bin"
        self.bundle = bundle.render(make(), tmp_path / "it's a bundle")
        self.clock = 1000.0
        self.slept: list[float] = []
        monkeypatch.setenv("PATH", f"{self.commands}:{os.environ['PATH']}")

    def plan(self, **plan: Any) -> None:
        slurm_commands.install(self.commands, OK | plan)

    def submit(self) -> slurm.Receipt:
        return slurm.submit(self.bundle, now=lambda: self.clock, sleep=self.slept.append)

    def refused(self) -> str:
        with pytest.raises(SubmitError) as e:
            self.submit()
        return str(e.value)

    def called(self, key: str) -> list[list[str]]:
        return [c["argv"] for c in slurm_commands.calls(self.commands) if c["key"] == key]


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Site:
    return Site(tmp_path, monkeypatch)


def test_a_job_is_tested_then_submitted_once(site: Site) -> None:
    site.plan(sbatch={"out": "4711\n"})
    receipt = site.submit()
    assert (receipt.state, receipt.job_id, receipt.how) == ("submitted", "4711", "sbatch")
    assert slurm.read_receipt(site.bundle) == receipt
    script = str(site.bundle / "job.sbatch")
    assert site.called("test_only") == [["--test-only", script]]
    assert site.called("sbatch") == [["--parsable", f"--job-name={receipt.job_name}", script]]
    assert receipt.token in receipt.job_name
    assert "was submitted as job 4711" in site.refused()
    assert len(site.called("sbatch")) == 1


def test_the_cluster_name_behind_the_id_is_not_part_of_it(site: Site) -> None:
    site.plan(sbatch={"out": "4711;alps\n"})
    assert site.submit().job_id == "4711"


def test_what_test_only_refuses_is_never_submitted(site: Site) -> None:
    site.plan(
        test_only={
            "rc": 1,
            "err": "sbatch: error: Batch job submission failed: Requested node configuration is not available\n",
        }
    )
    assert "Slurm would refuse this job" in site.refused()
    assert site.called("sbatch") == []
    assert slurm.read_receipt(site.bundle) is None


def test_slurm_that_does_not_answer_is_no_refusal(site: Site) -> None:
    site.plan(test_only={"rc": 1, "err": "sbatch: error: Unable to contact slurm controller (connect failure)\n"})
    message = site.refused()
    assert "Slurm does not answer: Unable to contact slurm controller" in message
    assert "change the recipe" not in message
    assert site.called("sbatch") == []


REFUSAL = {"rc": 1, "err": "sbatch: error: Batch job submission failed: Invalid account\n"}


@pytest.mark.parametrize(
    ("plan", "kept"),
    [
        ({"test_only": REFUSAL}, False),
        ({"sbatch": REFUSAL}, False),
        ({"sbatch": {"rc": 1}}, True),
        ({"sbatch": {"rc": 1}, "squeue": {"rc": 1, "err": "squeue: error: Unable to contact slurm controller\n"}}, True),
    ],
    ids=["test-only", "refused", "unknown", "unknown and squeue is down"],
)
def test_only_a_bundle_whose_job_may_exist_stays(
    site: Site, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, plan: dict[str, Any], kept: bool
) -> None:
    site.plan(**plan)
    monkeypatch.setattr(preflight, "check_job", lambda *_, **__: None)
    monkeypatch.setattr(slurm, "submit", functools.partial(slurm.submit, sleep=site.slept.append))
    out = tmp_path / "out folder"
    with pytest.raises(SubmitError) as e:
        session.start(make(), out, say=print, live=False)
    assert out.exists() == kept
    assert (f"launch.py submit --bundle '{out}'" in str(e.value)) == kept, "the same command again could submit it twice"


def test_a_refusal_leaves_no_receipt(site: Site) -> None:
    site.plan(sbatch={"rc": 1, "err": "sbatch: error: Batch job submission failed: Invalid account\n"})
    assert "Invalid account" in site.refused()
    assert slurm.read_receipt(site.bundle) is None
    site.plan(sbatch={"out": "12\n"})
    assert site.submit().job_id == "12"


LOST = [
    {"rc": 1, "err": "sbatch: error: Batch job submission failed: Socket timed out on send/recv operation\n"},
    {"rc": 0, "out": ""},
    {"rc": 0, "out": "Submitted batch job 4711\n"},
    {"rc": 137},
]


@pytest.mark.parametrize("answer", LOST, ids=["timeout", "empty", "nonsense", "killed"])
def test_a_lost_answer_is_looked_up_not_repeated(site: Site, answer: dict[str, Any]) -> None:
    site.plan(sbatch=answer, squeue=[{"out": ""}, {"out": "4711\n"}])
    receipt = site.submit()
    assert (receipt.job_id, receipt.how) == ("4711", "squeue")
    assert len(site.called("sbatch")) == 1
    assert f"--name={receipt.job_name}" in site.called("squeue")[0]


def test_a_job_that_ended_already_is_found_by_sacct(site: Site) -> None:
    site.plan(sbatch=LOST[0], sacct={"out": "4711\n4711+1\n"})
    assert site.submit().how == "sacct"


def test_an_answer_that_stays_unknown_keeps_its_receipt_and_is_reconciled_later(site: Site) -> None:
    site.plan(sbatch=LOST[0])
    assert "it is not known whether the job was submitted" in site.refused()
    kept = slurm.read_receipt(site.bundle)
    assert kept is not None
    assert kept.state == "submitting"
    assert site.slept == [1.0, 2.0, 4.0]
    assert "still not known" in site.refused()
    assert len(site.called("sbatch")) == 1
    site.plan(squeue={"out": "99\n"})
    assert site.submit().job_id == "99"
    assert len(site.called("sbatch")) == 1


def test_only_a_job_that_is_certainly_absent_is_submitted_again(site: Site) -> None:
    site.plan(sbatch=LOST[0])
    site.refused()
    site.clock += slurm.SETTLE_S + 1
    site.plan(sbatch={"out": "5\n"}, squeue={"rc": 1, "err": "slurm_load_jobs error: Unable to contact slurm controller\n"})
    assert "squeue does not answer" in site.refused()
    assert len(site.called("sbatch")) == 1
    site.plan(sbatch={"out": "5\n"})
    assert site.submit().job_id == "5"


def test_a_hanging_sbatch_is_unknown(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    site.plan(sbatch={"sleep_s": 30}, squeue={"out": "8\n"})
    real = slurm.run_command

    def short(argv: Any) -> slurm.Answer:
        monkeypatch.setattr(slurm, "COMMAND_TIMEOUT_S", 1.0 if "--parsable" in argv else 30.0)
        return real(argv)

    receipt = slurm.submit(site.bundle, run=short, sleep=site.slept.append)
    assert (receipt.job_id, receipt.how) == ("8", "squeue")


def test_killed_before_the_answer_came(site: Site) -> None:
    """A launcher that dies leaves 'submitting'; the next one looks first."""
    site.plan(sbatch={"out": "1\n"})

    def killed(argv: Any) -> slurm.Answer:
        if "--parsable" in argv:
            raise KeyboardInterrupt
        return slurm.run_command(argv)

    with pytest.raises(KeyboardInterrupt):
        slurm.submit(site.bundle, run=killed, now=lambda: site.clock)
    kept = slurm.read_receipt(site.bundle)
    assert kept is not None
    assert kept.state == "submitting"
    site.plan(squeue={"out": "31\n"})
    assert site.submit().job_id == "31"


def test_two_submissions_at_once(site: Site) -> None:
    site.plan(sbatch={"out": "1\n"})
    with (site.bundle / ".submit.lock").open("w", encoding="utf-8") as f:
        fcntl.flock(f, fcntl.LOCK_EX)
        assert "another submission" in site.refused()
    assert site.called("sbatch") == []


def test_a_damaged_receipt_is_not_ignored(site: Site) -> None:
    site.plan(sbatch={"out": "1\n"})
    (site.bundle / "receipt.json").write_text('{"state": "subm', encoding="utf-8")
    assert "is not a receipt" in site.refused()
    assert site.called("sbatch") == []


def test_a_local_bundle_has_nothing_to_submit(tmp_path: Path, site: Site) -> None:
    site.plan()
    local = bundle.render(make("local"), tmp_path / "local")
    with pytest.raises(SubmitError, match=r"job\.sbatch does not exist"):
        slurm.submit(local)


def write_run(site: Site, job_id: str) -> Path:
    spec = json.loads((site.bundle / "spec.json").read_text(encoding="utf-8"))
    run = Path(spec["run"]["results_dir"]) / "tiny-p1d2" / f"20260101T000000Z-{job_id}"
    run.mkdir(parents=True)
    event = {"utc": "2026-01-01T00:00:01Z", "monotonic_s": 1.0, "stage": "load", "state": "begin"}
    (run / "events.jsonl").write_text(json.dumps(event) + "\n{half", encoding="utf-8")
    return run


def test_status_joins_slurm_and_the_run_folder(site: Site, tmp_path: Path) -> None:
    spec = json.loads((site.bundle / "spec.json").read_text(encoding="utf-8"))
    spec["run"]["results_dir"] = str(tmp_path / "results")
    (site.bundle / "spec.json").write_text(json.dumps(spec), encoding="utf-8")
    site.plan(sbatch={"out": "4711\n"}, squeue={"out": "RUNNING|None\n"})
    with pytest.raises(SubmitError, match="was not submitted"):
        slurm.status(site.bundle)
    site.submit()
    found = slurm.status(site.bundle)
    assert found == {"job_id": "4711", "state": "RUNNING", "reason": "None", "run": "", "stage": "", "verdict": ""}
    run = write_run(site, "4711")
    found = slurm.status(site.bundle)
    assert (found["run"], found["stage"]) == (str(run), "load begin at 2026-01-01T00:00:01Z")
    (run / "verdict.json").write_text('{"line": "VALID  tiny-p1d2"}', encoding="utf-8")
    site.plan(squeue={"rc": 1, "err": "slurm_load_jobs error: Invalid job id specified\n"}, sacct={"out": "COMPLETED|0:0\n"})
    found = slurm.status(site.bundle)
    assert (found["state"], found["reason"], found["verdict"]) == ("COMPLETED", "exit code 0:0", "VALID  tiny-p1d2")
    site.plan(squeue={"rc": 1, "err": "x\n"}, sacct={"rc": 1, "err": "Slurm accounting storage is disabled\n"})
    assert slurm.status(site.bundle)["state"] == "UNKNOWN"


def test_status_of_a_run_folder_is_what_its_files_say(site: Site, tmp_path: Path) -> None:
    (run := tmp_path / "run").mkdir()
    shutil.copy(site.bundle / "spec.json", run)
    (run / "events.jsonl").write_text('{"stage": "load", "state": "begin", "utc": "T"}\n', encoding="utf-8")
    found = slurm.status(run)
    assert (found["state"], found["stage"], found["verdict"]) == ("NOT ARCHIVED", "load begin at T", "")
    (run / "verdict.json").write_text('{"line": "VALID  tiny-p1d2"}', encoding="utf-8")
    (run / "manifest.json").write_text("{}", encoding="utf-8")
    found = slurm.status(run)
    assert (found["state"], found["verdict"]) == ("ARCHIVED", "VALID  tiny-p1d2")
    (run / "verdict.json").write_text("{", encoding="utf-8")
    (run / "events.jsonl").write_bytes(b"\xff}\n")
    found = slurm.status(run)
    assert "damaged" in found["verdict"]
    assert "damaged" in found["stage"]
    with pytest.raises(SubmitError, match="is a run folder"):
        slurm.cancel(run)
    with pytest.raises(SubmitError, match="is a run folder"):
        session.submit_folder(run, say=print, live=False)


def test_what_is_no_submitted_bundle_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for name, text in (("list", "[]"), ("half", "{"), ("old", '{"schema": 0}'), ("binary", "\0\1")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "spec.json").write_text(text, encoding="utf-8")
    local = bundle.render(make("local"), tmp_path / "local")
    cases = {"nowhere": "is no bundle", "file": "is no bundle", "list": "is damaged", "half": "is damaged", "old": "is damaged",
             "binary": "is damaged", local.name: "is a bundle of a local run"}  # fmt: skip
    for name, said in cases.items():
        for ask in (slurm.status, slurm.cancel):
            with pytest.raises(SubmitError, match=said):
                ask(tmp_path / name)


def test_cancel(site: Site) -> None:
    site.plan(sbatch={"out": "4711\n"})
    with pytest.raises(SubmitError, match="was not submitted"):
        slurm.cancel(site.bundle)
    site.submit()
    assert slurm.cancel(site.bundle) == "4711"
    assert site.called("scancel") == [["4711"]]
    site.plan(scancel={"rc": 1, "err": "scancel: error: Kill job error on job id 4711: Access/permission denied\n"})
    with pytest.raises(SubmitError, match="permission denied"):
        slurm.cancel(site.bundle)
