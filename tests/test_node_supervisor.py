"""Whole jobs with real etcd and NATS: failing ones with a fake engine or frontend, a good one with Dynamo's mocker."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from pdlaunch import local
from pdlaunch.archive import verify
from pdlaunch.modelcheck import page_smoke
from pdlaunch.node import afterwards, supervisor
from pdlaunch.node.contracts import SNAPSHOTS, write_json
from pdlaunch.node.folders import make_run_dir
from pdlaunch.node.process import StageFailed
from pdlaunch.node.spec import Deadlines, LoadPhase, LoadSpec, Proof, RecallSpec, ServiceSpec, to_json
from pdlaunch.node.supervisor import Run, supervise
from tests.envs import aiperf, engine_python
from tests.fakes import specs
from tests.fakes.raw_server import answering, raw_server, respond

ROOT = Path(__file__).parent.parent
CHILD, FRONTEND = (str(Path(__file__).parent / "fakes" / name) for name in ("child.py", "frontend.py"))
TEXT = Proof(disaggregated=True, kv_load_failure_policy="fail", prediction=None, mixed_heads=False, patches=(), file_sha256={}, versions={})


def fake_frontend(mode):
    argv = (sys.executable, FRONTEND, "%{head_ip}", "%{http_port}", mode)
    return ServiceSpec("frontend", argv, {"DYN_NAMESPACE": "%{namespace}"}, "http")


def fake_pair(folder, frontend, prefill=("waits",), decode=("waits",), **changes):
    policy = ("", "--kv-transfer-config", '{"kv_connector":"NixlConnector","kv_load_failure_policy":"fail"}')
    engines = tuple(
        specs.engine(role, (sys.executable, CHILD, *argv, *policy[len(argv) - 1 :]), {}, "dynamo.vllm")
        for role, argv in (("prefill", prefill), ("decode", decode))
    )
    deadlines = Deadlines(control_plane_s=60, engines_s=60, gate_s=2, recall_request_s=2, idle_s=5, stop_s=8)
    return specs.spec(folder / "results", (specs.etcd(), specs.nats(), *frontend), engines, **{"deadlines": deadlines, **changes})


class Job:
    """The supervisor as a process of its own."""

    def __init__(self, folder: Path, made) -> None:
        self.run_dir = folder / "run"
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / "spec.json", to_json(made))
        self.out = folder / "out.log"
        with self.out.open("wb") as out:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "pdlaunch.node", "run", "--spec", str(folder / "spec.json"), "--run-dir", str(self.run_dir)],
                cwd=ROOT,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def text(self) -> str:
        return self.out.read_text(encoding="utf-8")

    def wait_for(self, pattern: str) -> None:
        deadline = time.monotonic() + 120
        while not re.search(pattern, self.text()):
            assert time.monotonic() < deadline, self.text()
            assert self.process.poll() is None, self.text()
            time.sleep(0.05)

    def end(self) -> int:
        return self.process.wait(120)

    def events(self) -> list[tuple[str, str]]:
        lines = (self.run_dir / "events.jsonl").read_text(encoding="utf-8").splitlines()
        return [(e["stage"], e["state"]) for e in map(json.loads, lines)]

    def verdict(self) -> dict:
        return json.loads((self.run_dir / "verdict.json").read_text(encoding="utf-8"))

    def pids(self) -> list[int]:
        """Living processes whose command line or folder is of this run."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit():
                try:
                    text = "".join((entry / name).read_bytes().decode(errors="replace") for name in ("cmdline", "environ"))
                except OSError:
                    continue
                if str(self.run_dir) in text or self.tmp_dir() in text:
                    found.append(int(entry.name))
        return found

    def tmp_dir(self) -> str:
        """The private folder of the whole job, which holds those of its engines."""
        facts = self.run_dir / "nodes" / "decode-0.json"
        return str(Path(json.loads(facts.read_text())["environment"]["TMPDIR"]).parent) if facts.exists() else "/no/such"


@pytest.fixture
def job(tmp_path):
    made = []

    def start(spec, name="job"):
        made.append(Job(tmp_path / name, spec))
        return made[-1]

    yield start
    for one in made:
        if one.process.poll() is None:
            one.process.send_signal(signal.SIGTERM)
            one.process.wait(60)


def assert_archived(job):
    """Evidence, verdict and a manifest that fits; nothing runs, nothing lies about."""
    assert verify(job.run_dir).intact, verify(job.run_dir)
    assert job.events()[-1] == ("archived", "end")
    assert job.pids() == []
    assert not Path(job.tmp_dir()).exists()


def test_an_engine_that_dies_ends_the_wait_at_once_and_shows_its_last_lines(job, tmp_path):
    one = job(fake_pair(tmp_path, (), decode=("dies", "7"), deadlines=Deadlines(engines_s=3600, stop_s=8)))
    assert one.end() == 1
    assert re.search(r"decode-0 on \S+ ended with exit code 7\n  log: \S+decode-0\.log\n(  \| line \d+\n){39}  \| line 60\n", one.text())
    assert one.verdict()["verdict"] == "INCOMPLETE"
    assert ("engines_ready", "failed") in one.events() or ("control_plane", "failed") in one.events()
    assert_archived(one)


def test_engines_that_never_get_ready_end_at_the_deadline_with_what_is_missing(job, tmp_path):
    deadlines = Deadlines(control_plane_s=60, engines_s=12, stop_s=8)
    one = job(fake_pair(tmp_path, (fake_frontend("never_ready"),), deadlines=deadlines))
    assert one.end() == 1
    assert "engines to be ready: not there after 12 s; decode: 0 of 1; not registered: decode-0\n" in one.text()
    assert one.verdict()["verdict"] == "INCOMPLETE"
    assert json.loads((one.run_dir / "gate.json").read_text())["found"] == {"prefill": 1, "decode": 0}
    assert_archived(one)


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_stops_a_job_whose_engines_ignore_term_and_archives_it(job, tmp_path, signum):
    one = job(fake_pair(tmp_path, (fake_frontend("never_ready"),), prefill=("ignores_term",), decode=("ignores_term",)))
    one.wait_for("engines_ready")
    one.process.send_signal(signum)
    assert one.end() == 130
    assert one.verdict()["verdict"] == "INCOMPLETE"
    assert signal.Signals(signum).name in " ".join(one.verdict()["reasons"])
    assert_archived(one)


def test_an_error_event_in_a_200_stream_is_invalid_and_no_load_is_run(job, tmp_path):
    recall = RecallSpec(prompts=3, prompt_tokens=200, when=("before", "during", "after"))
    one = job(fake_pair(tmp_path, (fake_frontend("sse_error"),), proof=TEXT, recall=recall))
    assert one.end() == 1
    assert "SSE error event" in one.text()
    assert "recall_before: 0 of 3 correct" in one.text()
    assert one.verdict()["verdict"] == "INVALID"
    assert ("load", "begin") not in one.events()
    assert_archived(one)


def test_a_prompt_of_the_gate_that_fails_is_invalid_and_no_load_is_run(job, tmp_path):
    """The first completion is right; the frontend then does not say how long the prompt of the hybrid manager's check was."""
    load = LoadSpec("aiperf", "m", (LoadPhase("c1", 64, 8, 4, concurrency=1),))
    one = job(fake_pair(tmp_path, (fake_frontend("ready"),), proof=TEXT, load=load, page_smoke=page_smoke(128, 64, 24)))
    assert one.end() == 1
    rows = [json.loads(line) for line in (one.run_dir / "gate.jsonl").read_text().splitlines()]
    assert [row.get("smoke") for row in rows] == [None, "short_last_page", "beyond_window"]
    assert rows[0]["failure"] == ""
    assert "first_token: FAILED: gate, last page at prefill at most half full: the length is not known" in one.text()
    assert one.verdict()["verdict"] == "INVALID"
    assert one.verdict()["reasons"][0].startswith("gate, last page at prefill at most half full: the length is not known")
    assert ("load", "begin") not in one.events()
    assert_archived(one)


def test_a_completion_that_hangs_is_reported_as_a_hang(job, tmp_path):
    recall = RecallSpec(prompts=3, prompt_tokens=200, when=("before",))
    one = job(fake_pair(tmp_path, (fake_frontend("hang"),), proof=TEXT, recall=recall))
    assert one.end() == 1
    assert "deployment: hang" in one.text()
    assert one.verdict()["verdict"] == "INVALID"
    assert_archived(one)


def test_a_service_that_dies_shows_its_log(job, tmp_path):
    made = fake_pair(tmp_path, ())
    broken = replace(made.services[0], argv=(*made.services[0].argv, "--no-such-flag"))
    one = job(replace(made, services=(broken, made.services[1])))
    assert one.end() == 1
    assert re.search(r"etcd on \S+ ended with exit code \d+\n  log: \S+etcd\.log\n(  \|.*\n)+", one.text())
    assert "no-such-flag" in one.text()
    assert ("engines_started", "end") not in one.events()
    assert_archived(one)


def test_a_busy_frontend_port_is_said_before_anything_starts(job, tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = job(fake_pair(tmp_path, (), http_port=server.getsockname()[1]))
        assert one.end() == 1
    assert "is in use" in one.text()
    assert not (one.run_dir / "logs" / "etcd.log").exists()


def test_an_existing_run_folder_is_refused_and_left_alone(job, tmp_path):
    (tmp_path / "job" / "run").mkdir(parents=True)
    one = job(fake_pair(tmp_path, ()))
    assert one.end() == 2
    assert "each run needs a new one" in one.text()
    assert list(one.run_dir.iterdir()) == []


def test_nothing_outlives_a_supervisor_that_is_killed(job, tmp_path):
    one = job(fake_pair(tmp_path, (fake_frontend("never_ready"),), decode=("leaves_child", "own_session")))
    one.wait_for("engines_ready")
    log = one.run_dir / "logs" / "decode-0.log"
    deadline = time.monotonic() + 60
    while not (log.exists() and (said := re.search(r"child (\d+)", log.read_text()))):
        assert time.monotonic() < deadline, one.text()
        time.sleep(0.05)
    assert int(said.group(1)) in one.pids()
    one.process.kill()
    one.process.wait()
    tmp_dir = Path(one.tmp_dir())
    while one.pids():
        assert time.monotonic() < deadline, one.pids()
        time.sleep(0.05)
    assert [p.name for p in tmp_dir.iterdir() if p.name.startswith("pdl-")] == []
    shutil.rmtree(tmp_dir)


def test_a_full_disk_ends_the_next_stage_and_is_said(tmp_path, capsys):
    write_json(tmp_path / "spec.json", to_json(fake_pair(tmp_path, ())))
    run = Run(fake_pair(tmp_path, ()), tmp_path / "spec.json", tmp_path, "test")
    run.events.path = Path("/dev/full")
    with pytest.raises(StageFailed, match="/dev/full cannot be written: No space left"), run.stage("load"):
        raise AssertionError("the stage was begun")
    (tmp_path / "logs").mkdir()
    run.shut_down()
    assert "No space left" in capsys.readouterr().out


def test_a_load_phase_says_that_it_runs(tmp_path, monkeypatch, capsys):
    write_json(tmp_path / "spec.json", to_json(fake_pair(tmp_path, ())))
    run = Run(fake_pair(tmp_path, ()), tmp_path / "spec.json", tmp_path, "test")
    monkeypatch.setattr(supervisor, "_PROGRESS_S", 0.0)
    metrics = respond(200, "dynamo_frontend_inflight_requests 7\n", "text/plain")
    said = []

    def say(text):
        said.append(text)
        run.loading = len(said) < 3

    with raw_server(answering(metrics)) as url:
        run.deployment.values |= {"head_ip": "127.0.0.1", "http_port": url.rpartition(":")[2]}
        monkeypatch.setattr(run, "say", say)
        run.loading = True
        run._progress("c4")(threading.Event())
    shutil.rmtree(run.deployment.tmp_dir)
    assert said == ["load: c4: 0 s, 7 requests in flight"] * 3


def test_an_interruption_after_the_verdict_leaves_it_and_ends_with_130(tmp_path, monkeypatch, capsys):
    """The signal comes while the page is made; what the verdict was before does not change."""
    write_json(tmp_path / "spec.json", to_json(fake_pair(tmp_path, ())))
    monkeypatch.setattr(Run, "run", lambda self: None)
    before = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}

    def interrupted(spec, run_dir, stop):
        os.kill(os.getpid(), signal.SIGINT)
        assert stop.wait(10)
        return f"none; {afterwards.INTERRUPTED}"

    monkeypatch.setattr(afterwards, "page", interrupted)
    monkeypatch.setattr(supervisor, "adopt_orphans", lambda: None)
    monkeypatch.setattr(supervisor, "kill_descendants", list)
    try:
        assert supervise(tmp_path / "spec.json", tmp_path / "run") == 130
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)
    assert "page: none; the run was interrupted" in capsys.readouterr().out
    assert json.loads((tmp_path / "run" / "manifest.json").read_text())["ended"] == ""
    assert verify(tmp_path / "run").intact


@pytest.mark.parametrize(("launcher", "asked"), [("local", True), ("slurm", False)])
def test_a_run_that_was_interrupted_here_has_a_short_time_for_its_page(tmp_path, monkeypatch, launcher, asked):
    made = fake_pair(tmp_path, ())
    made = replace(made, run=replace(made.run, launcher=launcher, tool_argv=(sys.executable, __file__)))
    write_json(tmp_path / "spec.json", to_json(made))
    run = Run(made, tmp_path / "spec.json", tmp_path / "run", "test")
    shutil.rmtree(run.deployment.tmp_dir)
    run._on_signal(signal.SIGINT, None)
    seen = []

    def ran(spec, arguments, log, deadline_s, stop):
        seen.append((deadline_s, stop.is_set()))
        return afterwards.INTERRUPTED if stop.is_set() else ""

    monkeypatch.setattr(afterwards, "_run", ran)
    assert run.page() == (str(tmp_path / "run.html") if asked else "none; the run was interrupted")
    ((deadline_s, stopped),) = seen
    assert stopped is not asked
    assert not asked or 10 < deadline_s < local.LAST_RESORT_S / 2


def test_a_results_folder_without_room_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("shutil.disk_usage", lambda path: shutil._ntuple_diskusage(100, 99, 2**20))
    with pytest.raises(OSError, match=r"0\.00 GiB free, 0\.25 GiB are needed"):
        make_run_dir(tmp_path / "results" / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_verdict_can_be_had_again_from_the_archive_alone(job, tmp_path):
    one = job(fake_pair(tmp_path, (), decode=("dies",)))
    assert one.end() == 1
    again = subprocess.run(
        [sys.executable, "-m", "pdlaunch.node", "judge", str(one.run_dir)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert again.returncode == 1
    assert again.stdout.splitlines()[0] == one.verdict()["line"]
    assert "otherwise" not in again.stdout
    assert_archived(one)


def test_two_jobs_at_once_share_neither_ports_nor_folders(job, tmp_path):
    jobs = [job(fake_pair(tmp_path, (fake_frontend("never_ready"),)), name) for name in ("one", "two")]
    for one in jobs:
        one.wait_for("engines_ready")
    ports = [json.loads((one.run_dir / "nodes" / "head.json").read_text())["ports"].values() for one in jobs]
    assert not set(ports[0]) & set(ports[1])
    for one in jobs:
        one.process.send_signal(signal.SIGTERM)
    assert [one.end() for one in jobs] == [130, 130]
    for one in jobs:
        assert_archived(one)


def test_secrets_of_the_environment_are_in_no_file_of_the_run(job, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "planted-secret-12345")
    made = fake_pair(tmp_path, (), decode=("dies",), prefill=("shows",))
    engines = tuple(replace(e, env={"SITE_PASSWORD": "planted-password-6789", "SHOWN": "planted-secret-12345"}) for e in made.engines)
    one = job(replace(made, engines=engines))
    assert one.end() == 1
    for path in one.run_dir.rglob("*"):
        if path.is_file():
            assert "planted-" not in path.read_text(encoding="utf-8"), path
    assert "planted-" not in one.text()


@pytest.mark.engine
@pytest.mark.stack
def test_a_mocker_pair_from_its_bundle_to_a_verdict(tmp_path):
    python = engine_python([])
    phase = LoadPhase(name="c2", input_tokens=64, output_tokens=8, requests=6, concurrency=2, warmup_requests=2)
    load = LoadSpec(str(aiperf()), str(specs.MOCKER_MODEL), (phase,))
    spec_path = specs.write_bundle(tmp_path / "a bundle", specs.mocker_pair(tmp_path / "results", python, load=load))
    done = subprocess.run(
        [sys.executable, "-B", "-m", "node", "run", "--spec", str(spec_path)],
        cwd=spec_path.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "DYN_NAMESPACE": "production", "NATS_SERVER": "nats://127.0.0.1:1"},
    )
    (run_dir,) = (tmp_path / "results" / "hand-written").iterdir()
    assert f"archive: {run_dir}" in done.stdout, done.stdout + done.stderr
    verdict = json.loads((run_dir / "verdict.json").read_text())
    assert (verdict["verdict"], verdict["text_checked"], done.returncode) == ("VALID", False, 0), verdict
    assert "text NOT checked" in verdict["line"]
    stages = [(e["stage"], e["state"]) for e in map(json.loads, (run_dir / "events.jsonl").read_text().splitlines())]
    both = ("begin", "end")
    expected = [
        ("job_started", "end"),
        ("control_plane", "begin"),
        ("engines_started", "end"),
        ("control_plane", "end"),
        *((stage, state) for stage in ("engines_ready", "first_token", "load", "idle", "stopped", "judged") for state in both),
        ("archived", "end"),
    ]
    assert stages == expected
    assert verify(run_dir).intact, verify(run_dir)
    for process in ("prefill-0", "decode-0"):
        facts = json.loads((run_dir / "nodes" / f"{process}.json").read_text())
        assert facts["versions"]["ai-dynamo"] == "1.6.1"
        assert (facts["exit"]["asked"], facts["exit"]["killed"]) == (True, False)
        for when in SNAPSHOTS:
            assert (run_dir / "metrics" / f"{process}.{when}.prom").read_text()
        assert "\x1b" not in (run_dir / "logs" / f"{process}.log").read_text()
