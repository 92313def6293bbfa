"""One job from its first process to its verdict: the stages in order, and evidence and verdict whatever happens on the way."""

from __future__ import annotations

import contextlib
import functools
import os
import secrets
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

from . import afterwards, finish, gate, smoke, snapshots
from .allocation import job_id
from .contracts import Events, Verdict
from .deployment import Deployment, redactor_of
from .folders import make_run_dir, new_run_dir, remove_abandoned
from .output import as_typed, say
from .process import StageFailed, StopRequested, kill_descendants, wait_until
from .procfs import adopt_orphans, die_with_parent
from .spec import LoadPhase, RecallTime, Spec, load_spec

EXIT_VALID, EXIT_VERDICT, EXIT_BAD_INPUT, EXIT_UNEXPECTED, EXIT_INTERRUPTED = 0, 1, 2, 3, 130
_STOP_BUDGET_S = {"local": 6.0, "slurm": 16.0}
"""From a signal to the last process. A person waits at most 10 s, judging included; Slurm kills 30 s (KillWait) after TERM."""
_SIGNAL_RACE_S = 0.5
_HALT_S = 2.0
_PROGRESS_S, _POLL_S = 10.0, 0.1
_PAGE_BY_S = 15.0
"""From a signal to the end of the page of a local run; local.LAST_RESORT_S kills later."""


class EndedEarly(Exception):
    """The deployment is known to be wrong, so the rest of the run would measure noise; the message says what was seen."""


class Run:
    """State of one job. The stages are methods, in the order in which run() calls them."""

    def __init__(self, spec: Spec, spec_path: Path, run_dir: Path, job: str, launcher: int = 0) -> None:
        self.spec, self.run_dir, self.launcher = spec, run_dir, launcher
        self.began = time.monotonic()
        self.stop_event = threading.Event()
        self.signal_name = ""
        self.signalled = 0.0
        self.events = Events(run_dir / "events.jsonl")
        self.seed = f"{run_dir.name}-{secrets.token_hex(4)}"
        self.deployment = Deployment(spec, spec_path, run_dir, f"pdl-{job}-{secrets.token_hex(2)}", self.stop_event, self.say)
        self.wrong: list[str] = []
        self.threads: list[threading.Thread] = []
        self.unwritable = ""
        self.loading = False

    def say(self, text: str) -> None:
        say(f"[{time.monotonic() - self.began:7.1f} s] {text}")

    def listen(self) -> None:
        """TERM and INT, and HUP unless it is ignored (nohup); a launcher that is gone counts as TERM."""
        for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            if signum != signal.SIGHUP or signal.getsignal(signum) != signal.SIG_IGN:
                signal.signal(signum, self._on_signal)
        if self.launcher:
            die_with_parent(signal.SIGTERM)
            if os.getppid() != self.launcher:
                os.kill(os.getpid(), signal.SIGTERM)

    def _on_signal(self, signum: int, frame: Any) -> None:
        if not self.signal_name:
            orphaned = self.launcher and os.getppid() != self.launcher
            self.signal_name = "the end of launch.py" if orphaned else signal.Signals(signum).name
            self.signalled = time.monotonic()
            self.stop_event.set()

    def note(self, stage: str, state: Literal["begin", "end", "failed", "note"], **detail: Any) -> None:
        """One event. A disk that is full must not keep the job from being stopped: it ends the next stage instead."""
        try:
            self.events.add(stage, state, **detail)
        except OSError as e:
            self.unwritable = f"{self.events.path} cannot be written: {e.strerror}"
            self.say(self.unwritable)

    @contextlib.contextmanager
    def stage(self, name: str, text: str = "", **detail: Any) -> Iterator[dict[str, Any]]:
        """Events of one stage; the dictionary that it gives is added to the end event."""
        self.say(f"{name}{': ' + text if text else ''}")
        self.note(name, "begin", **detail)
        if self.unwritable:
            raise StageFailed(self.unwritable)
        result: dict[str, Any] = {}
        try:
            yield result
        except (StageFailed, StopRequested, EndedEarly) as e:
            self.note(name, "failed", **detail, reason=str(e))
            raise
        self.note(name, "end", **detail, **result)

    def wrong_text(self, name: str, what: str, **detail: Any) -> None:
        """A check has failed for good; the run goes on only as far as it helps to say why."""
        self.note(name, "note", failure=what, **detail)
        self.say(f"{name}: FAILED: {what}")
        self.wrong.append(what)

    def watch(self, works: Sequence[Callable[[threading.Event], None]]) -> None:
        """Run the functions in threads while watching every child; a death or a stop halts them, an exception of theirs is raised here."""
        halt = threading.Event()
        errors: list[BaseException] = []

        def guarded(work: Callable[[threading.Event], None]) -> None:
            try:
                work(halt)
            except BaseException as e:  # noqa: BLE001 - handed to the main thread, which raises it
                errors.append(e)
                halt.set()

        threads = [threading.Thread(target=guarded, args=(w,), daemon=True) for w in works]
        self.threads += threads
        for thread in threads:
            thread.start()
        try:
            while any(t.is_alive() for t in threads):
                if self.stop_event.is_set():
                    raise StopRequested("while requests were running")
                if errors:
                    break
                self.deployment.check()
                threads[0].join(0.1) if threads[0].is_alive() else time.sleep(0.1)
        finally:
            halt.set()
            if not self.stop_event.is_set():  # shut_down waits for them, while the engines stop
                self._join(_HALT_S)
        if errors:
            raise errors[0]
        self.deployment.check()

    def _join(self, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        for thread in self.threads:
            thread.join(max(0.0, deadline - time.monotonic()))

    def snapshot(self, when: str) -> None:
        for process, reason in snapshots.take(self.deployment.metrics_urls(), when, self.run_dir / "metrics").items():
            self.note("metrics", "note", process=process, when=when, failure=reason)
            self.say(f"metrics of {process} at {when}: {reason}")

    def start(self) -> None:
        spec, deployment = self.spec, self.deployment
        with self.stage("control_plane", ", ".join(s.name for s in spec.services)):
            deployment.find_nodes()
            deployment.wait_services(deployment.start_services(("etcd", "nats")), spec.deadlines.control_plane_s)
            frontend = deployment.start_services(("frontend",))
            deployment.start_engines()
            self.note("engines_started", "end", engines=[r.process for r in deployment.ranks])
            self.say(f"engines_started: {', '.join(r.process for r in deployment.ranks)}")
            deployment.wait_services(frontend, spec.deadlines.control_plane_s)
        with self.stage("engines_ready", f"deadline {spec.deadlines.engines_s:g} s") as result:
            result["workers"] = deployment.wait_engines().found
        self.snapshot("ready")

    def first_token(self) -> None:
        targets = [("deployment", self.deployment.base_url)] if gate.expected_workers(self.spec.engines) else []
        if self.spec.engines_of("control"):
            targets.append(("control", self.deployment.control_url()))
        with self.stage("first_token"):
            for target, url in targets:
                self.watch([functools.partial(self._complete, target, url)])
            if self.spec.page_smoke and not self.wrong:
                self.watch([functools.partial(self._page_smoke, dict(targets))])

    def _page_smoke(self, urls: dict[str, str], halt: threading.Event) -> None:
        failures = smoke.run_smoke(self.spec, urls, self.seed, self.run_dir / "gate.jsonl", halt)
        if failures and not halt.is_set():
            self.wrong_text("first_token", f"gate, {'; '.join(failures)}")

    def _complete(self, target: str, url: str, halt: threading.Event) -> None:
        failure = gate.first_completion(self.spec, url, self.seed, self.run_dir / "gate.jsonl", halt, target)
        if failure and not halt.is_set():
            self.wrong_text("first_token", f"{target}: {failure}")

    def recall(self, when: RecallTime, halt: threading.Event) -> None:
        """One pass of the recall check; a wrong answer is noted, not raised."""
        from .recall import run_recall

        spec = self.spec
        if spec.recall is None or when not in spec.recall.when:
            return
        with self.stage(f"recall_{when}", f"{spec.recall.prompts} prompts of about {spec.recall.prompt_tokens} tokens") as result:
            found = run_recall(self.deployment.base_url, spec.model.served_name, spec.recall, when, self.seed, self.run_dir / "recall",
                               spec.deadlines.recall_request_s, halt)
            result |= {"correct": found.correct, "asked": found.asked}
            self.say(f"recall_{when}: {found.correct} of {found.asked} correct")
            if not found.passed and not halt.is_set():
                self.wrong_text(f"recall_{when}", f"recall {when} load: {found.correct} of {found.asked}, {found.hangs} hangs")

    def behaviour(self) -> None:
        from .behaviour import run_behaviour
        from .build import BuildFacts

        spec = self.spec
        nodes = {r.process: r.facts() or {} for r in self.deployment.ranks}
        with self.stage("behaviour", ", ".join(spec.behaviour)):
            self.watch([lambda halt: self._note("behaviour", run_behaviour(
                self.deployment.base_url, spec.model.served_name, spec.behaviour, self.run_dir / "behaviour.jsonl",
                spec.deadlines.behaviour_request_s, BuildFacts(nodes, spec.proof), halt).passed)])

    def agreement(self) -> None:
        from .agreement import run_agreement

        asked = self.spec.agreement
        if asked is None:
            return
        with self.stage("agreement", f"{asked.prompts} prompts, token for token against the control engine"):
            self.watch([lambda halt: self._note("agreement", run_agreement(
                self.deployment.base_url, self.deployment.control_url(), self.spec.model.served_name, asked, self.seed,
                self.run_dir / "agreement.jsonl", self.spec.deadlines.recall_request_s, halt).passed)])

    def _note(self, name: str, passed: bool) -> None:
        if not passed and not self.stop_event.is_set():
            self.wrong_text(name, f"{name} checks did not all pass")

    def load(self) -> None:
        if self.spec.load is None:
            return
        self.snapshot("before_load")
        phases = self.spec.load.phases
        heaviest = max(range(len(phases)), key=lambda i: (phases[i].concurrency or 0, phases[i].request_rate_per_s or 0.0))
        for number, phase in enumerate(phases):
            self.loading = True
            during = [self._recall_during] if number == heaviest else []
            self.watch([functools.partial(self._phase, phase), self._progress(phase.name), *during])
        self.snapshot("after_load")

    def _phase(self, phase: LoadPhase, halt: threading.Event) -> None:
        from .load import run_phase

        assert self.spec.load is not None
        urls = [url for process, url in self.deployment.metrics_urls().items() if process != "frontend"]
        try:
            with self.stage("load", phase.name, phase=phase.name):
                found = run_phase(self.spec.load, phase, self.deployment.base_url, self.spec.model.served_name, urls,
                                  self.run_dir / "load" / phase.name, halt)
                if not found.passed and not halt.is_set():
                    self.wrong_text("load", f"phase {phase.name} did not pass", phase=phase.name)
        finally:
            self.loading = False

    def _progress(self, name: str) -> Callable[[threading.Event], None]:
        """Says every _PROGRESS_S that the phase still runs, and what the frontend has in flight."""
        urls = {"frontend": f"{self.deployment.base_url}/metrics"}
        began = said = time.monotonic()

        def work(halt: threading.Event) -> None:
            nonlocal said
            while self.loading and not halt.wait(_POLL_S):
                if time.monotonic() - said > _PROGRESS_S:
                    said = time.monotonic()
                    busy = snapshots.in_flight(urls, halt).get("frontend")
                    self.say(f"load: {name}: {said - began:.0f} s" + ("" if busy is None else f", {busy:.0f} requests in flight"))

        return work

    def _recall_during(self, halt: threading.Event) -> None:
        """Recall while the load tool has requests in flight: it starts when the frontend says that some are."""
        if self.spec.recall is None or "during" not in self.spec.recall.when:
            return
        frontend = {"frontend": f"{self.deployment.base_url}/metrics"}
        while not halt.is_set() and self.loading:
            if snapshots.in_flight(frontend, halt).get("frontend", 0):
                self.recall("during", halt)
                return
            halt.wait(0.1)
        if not halt.is_set():
            self.note("recall_during", "failed", reason="the load was over before a request of it was seen in flight")

    def idle(self) -> None:
        urls = self.deployment.metrics_urls()
        busy: dict[str, float] = {}

        def none_left() -> bool:
            busy.clear()
            busy.update({p: n for p, n in snapshots.in_flight(urls, self.stop_event).items() if n})
            return not busy

        with contextlib.suppress(StageFailed), self.stage("idle"):
            wait_until(none_left, "requests in flight to reach zero", self.spec.deadlines.idle_s, check=self.deployment.check,
                       stop=self.stop_event, poll_s=0.2, waiting_for=lambda: f"in flight: {busy}")

    def run(self) -> None:
        """Every stage from the control plane to idle. Raises StageFailed, StopRequested or EndedEarly."""
        self.start()
        self.first_token()
        self.watch([lambda halt: self.recall("before", halt)])
        if self.spec.behaviour:
            self.behaviour()
        if not self.wrong:
            self.agreement()
        if self.wrong:
            self.idle()
            self.snapshot("end")
            raise EndedEarly("; ".join(self.wrong))
        self.load()
        self.watch([lambda halt: self.recall("after", halt)])
        self.idle()
        self.snapshot("end")

    def shut_down(self) -> None:
        self.say("stopping")
        self.note("stopped", "begin", log_bytes=self.deployment.log_bytes())
        budget_s = min(self.spec.deadlines.stop_s, 60.0)
        if self.signal_name:
            budget_s = self.signalled + _STOP_BUDGET_S[self.spec.run.launcher] - time.monotonic()
        killed = self.deployment.stop(budget_s, at_once=bool(self.signal_name))
        self._join(_HALT_S)
        kill_descendants()  # of a wrapper that was itself killed, and a load tool that does not leave
        self._join(_HALT_S)
        self.deployment.clean_up()
        self.note("stopped", "end", killed=killed)

    def finish(self, ended: str) -> Verdict:
        self.note("judged", "begin", ended=ended)
        verdict = finish.judge(self.run_dir, ended)
        if why := afterwards.plan(self.spec, self.run_dir, self.stop_event):
            self.note("judged", "note", plan=why)
        self.note("judged", "end", verdict=verdict.verdict, line=verdict.line)
        self.note("archived", "end")
        finish.write_manifest(self.spec, self.run_dir, ended)
        return verdict

    def page(self) -> str:
        """Where the page is, or why there is none. Of a run that was interrupted it has the rest of a short time; Slurm leaves none."""
        if self.signal_name and self.spec.run.launcher == "local":
            return afterwards.page(self.spec, self.run_dir, threading.Event(), self.signalled + _PAGE_BY_S - time.monotonic())
        return afterwards.page(self.spec, self.run_dir, self.stop_event)


def supervise(spec_path: Path, run_dir: Path | None = None, launcher: int = 0) -> int:
    """Run the job of spec_path to its verdict; the exit code is 0 VALID, 1 INVALID or INCOMPLETE, 2, 3 or 130.

    launcher: the parent whose end stops the run, or 0.
    """
    spec_path = spec_path.resolve()
    spec = load_spec(spec_path)
    job = job_id(os.environ)
    run_dir = (run_dir or new_run_dir(spec, job)).resolve()
    try:
        make_run_dir(run_dir)
        finish.copy_bundle(spec_path.parent, spec_path, run_dir, redactor_of(spec))
    except OSError as e:
        say(f"{run_dir}: the run folder cannot be made: {e.strerror or e}", sys.stderr)
        return EXIT_BAD_INPUT
    afterwards.model_config(spec, run_dir)
    adopt_orphans()
    run = Run(spec, spec_path, run_dir, job, launcher)
    run.listen()
    run.say(f"run: {run_dir}")
    for folder in remove_abandoned(Path("/tmp")):
        run.say(f"removed {folder}, which a run that was killed had left")
    run.note("job_started", "end", job=job, host=os.uname().nodename, pid=os.getpid(), run_dir=str(run_dir),
             tmp_dir=str(run.deployment.tmp_dir))
    ended, code = _until_the_end(run)
    run.shut_down()
    try:
        verdict = run.finish(ended)
    except OSError as e:
        say(f"{run_dir}: the run cannot be archived: {e}", sys.stderr)
        return EXIT_UNEXPECTED
    say(verdict.line)
    for reason in verdict.reasons:
        say(f"  {reason}")
    say(f"archive: {as_typed(str(run_dir), launcher)}")
    say(f"page: {as_typed(run.page(), launcher)}")
    if run.stop_event.is_set():
        return code or EXIT_INTERRUPTED
    return code or (EXIT_VALID if verdict.verdict == "VALID" else EXIT_VERDICT)


def _until_the_end(run: Run) -> tuple[str, int]:
    """(why the run ended early or '', exit code that the end forces or 0)."""
    try:
        run.run()
    except StopRequested as e:
        return f"interrupted by {run.signal_name} {e}", EXIT_INTERRUPTED
    except (StageFailed, EndedEarly) as e:
        # scancel and the time limit send TERM to every process of the job at once: a child may die of it before this process hears it.
        if run.stop_event.wait(_SIGNAL_RACE_S):
            return f"interrupted by {run.signal_name}, after: {str(e).splitlines()[0]}", EXIT_INTERRUPTED
        run.say(str(e))
        return str(e), 0
    except Exception as e:  # noqa: BLE001 - the top level of the node: whatever it was, the job is stopped, judged and archived
        trace = traceback.format_exc()
        run.note("job_started", "failed", reason=trace)
        say(trace, sys.stderr)
        return f"unexpected: {type(e).__name__}: {e}", EXIT_UNEXPECTED
    return "", 0
