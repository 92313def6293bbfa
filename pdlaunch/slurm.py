"""Submission as a transaction: tested first, locked, with a receipt; an answer that is not known is looked up, never simply tried again.

The receipt's token is part of the job name, because squeue and sacct show job names on every site, comments only on some.
"""

from __future__ import annotations

import fcntl
import json
import re
import secrets
import shlex
import shutil
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from pdlaunch.errors import SubmitError
from pdlaunch.node.contracts import utc_now, write_json
from pdlaunch.node.spec import Spec, load_spec

RECEIPT = "receipt.json"
COMMAND_TIMEOUT_S = 60.0
UNKNOWN = re.compile(r"timed? ?out|Unable to contact|Zero Bytes|Connection|Communication|Transport|temporarily|Interrupted", re.IGNORECASE)
"""Messages after which the job may exist: slurmctld can have stored it before the answer was lost."""
REFUSED = re.compile(r"^sbatch: (error|fatal): ", re.MULTILINE)
"""A refusal says so; an sbatch that was killed says nothing."""
SETTLE_S = 60.0
"""A job that neither squeue nor sacct knows this long after sbatch was last alive was not stored."""


@dataclass(frozen=True)
class Answer:
    rc: int | None
    """None: killed at its deadline."""
    out: str
    err: str


Run = Callable[[Sequence[str]], Answer]


def run_command(argv: Sequence[str]) -> Answer:
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except subprocess.TimeoutExpired:
        return Answer(None, "", f"no answer within {COMMAND_TIMEOUT_S:g} s")
    return Answer(done.returncode, done.stdout, done.stderr)


@dataclass(frozen=True)
class Receipt:
    state: str
    """submitting: sbatch was started and its answer is not known. submitted: job_id is known."""
    token: str
    job_name: str
    utc: str
    epoch_s: float
    job_id: str = ""
    how: str = ""
    """sbatch: its own answer. squeue or sacct: found by name after the answer was lost."""

    def write(self, bundle: Path) -> None:
        write_json(bundle / RECEIPT, asdict(self))


def read_receipt(bundle: Path) -> Receipt | None:
    """None when nothing was submitted; SubmitError on a receipt that cannot be read."""
    try:
        return Receipt(**json.loads((bundle / RECEIPT).read_text(encoding="utf-8")))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (ValueError, TypeError, RecursionError) as e:
        raise SubmitError(
            f"{bundle / RECEIPT} is not a receipt: {e}", hint="look for the job with squeue --me; then remove the file"
        ) from None


@contextmanager
def _lock(bundle: Path) -> Iterator[None]:
    with (bundle / ".submit.lock").open("w", encoding="utf-8") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SubmitError(f"another submission of {bundle} is running", rule="one at a time", hint="wait for it") from None
        yield


def require_slurm() -> None:
    for program in ("sbatch", "squeue"):
        if shutil.which(program) is None:
            raise SubmitError(
                f"{program} is not in PATH",
                rule="launcher: slurm needs Slurm's commands on this machine",
                hint="run on a login node, or use --local",
            )


def submit(
    bundle: Path, run: Run = run_command, now: Callable[[], float] = time.time, sleep: Callable[[float], None] = time.sleep
) -> Receipt:
    """Submit a bundle once. SubmitError: refused by Slurm (nothing was stored), submitted before, or not known (the receipt stays).

    Calling it again after an unknown answer looks for the job by its name; only when it is certainly absent is the bundle submitted.
    """
    require_slurm()
    script = bundle / "job.sbatch"
    if not script.is_file():
        raise SubmitError(
            f"{script} does not exist", rule="a bundle of a cluster with launcher: slurm", hint="render it with launch.py render"
        )
    with _lock(bundle):
        before = read_receipt(bundle)
        if before is not None and before.state == "submitted":
            raise SubmitError(
                f"this bundle was submitted as job {before.job_id} at {before.utc}",
                rule="a bundle is submitted once",
                hint=f"launch.py status {bundle}, or render a new bundle",
            )
        if before is not None:
            found = reconcile(before, run)
            if found is not None:
                found.write(bundle)
                return found
            if now() < before.epoch_s + SETTLE_S:
                raise SubmitError(
                    f"the answer of the submission at {before.utc} is still not known",
                    rule="never submitted twice",
                    hint=f"run the same command again in {before.epoch_s + SETTLE_S - now():.0f} s",
                )
        recipe = spec_of(bundle).run.recipe
        _test_only(script, run)
        token = secrets.token_hex(4)
        receipt = Receipt("submitting", token, f"pdlaunch-{recipe}-{token}", utc_now(), now())
        receipt.write(bundle)
        return _send(bundle, script, receipt, run, sleep)


def _test_only(script: Path, run: Run) -> None:
    answer = run(["sbatch", "--test-only", str(script)])
    if answer.rc is None or (answer.rc != 0 and UNKNOWN.search(answer.err)):
        raise SubmitError(
            f"Slurm does not answer: {_last(answer)}",
            rule="sbatch --test-only passes",
            hint="run the same command again when it does; nothing was submitted",
        )
    if answer.rc != 0:
        raise SubmitError(
            f"Slurm would refuse this job: {_last(answer)}",
            rule="sbatch --test-only passes",
            hint="change the recipe or the cluster file; nothing was submitted",
        )


def _send(bundle: Path, script: Path, receipt: Receipt, run: Run, sleep: Callable[[float], None]) -> Receipt:
    answer = run(["sbatch", "--parsable", f"--job-name={receipt.job_name}", str(script)])
    match = re.fullmatch(r"(\d+)(;\S+)?\s*", answer.out)
    if answer.rc == 0 and match:
        done = replace(receipt, state="submitted", job_id=match.group(1), how="sbatch")
        done.write(bundle)
        return done
    if answer.rc == 1 and REFUSED.search(answer.err) and not UNKNOWN.search(answer.err):
        (bundle / RECEIPT).unlink()
        raise SubmitError(f"Slurm refused this job: {_last(answer)}", rule="sbatch", hint="nothing was submitted")
    for pause_s in (1.0, 2.0, 4.0):
        sleep(pause_s)
        found = None
        with suppress(SubmitError):
            found = reconcile(receipt, run)
        if found is not None:
            found.write(bundle)
            return found
    raise SubmitError(
        f"it is not known whether the job was submitted: {_last(answer)}",
        rule="an unknown answer is never tried again",
        hint=f"run launch.py submit --bundle {shlex.quote(str(bundle))}: it looks for {receipt.job_name} before it submits anything",
    )


def _last(answer: Answer) -> str:
    lines = [line for line in (answer.err or answer.out).splitlines() if line.strip()]
    return lines[-1].removeprefix("sbatch: ").removeprefix("error: ") if lines else f"exit code {answer.rc}"


def reconcile(receipt: Receipt, run: Run) -> Receipt | None:
    """The receipt with the job id that squeue or sacct knows under its name; None when squeue answers and does not know it.

    SubmitError when squeue itself does not answer: then nothing is known.
    """
    answer = run(["squeue", "--noheader", "--states=all", f"--name={receipt.job_name}", "--format=%i"])
    if answer.rc != 0:
        raise SubmitError(
            f"squeue does not answer: {_last(answer)}",
            rule="the job is looked up before anything is submitted again",
            hint="run the same command again when Slurm answers",
        )
    ids, how = re.findall(r"^\d+", answer.out, re.MULTILINE), "squeue"
    if not ids and shutil.which("sacct"):
        answer, how = run(["sacct", "--noheader", "--parsable2", "--allocations", f"--name={receipt.job_name}", "--format=JobID"]), "sacct"
        ids = re.findall(r"^\d+", answer.out, re.MULTILINE) if answer.rc == 0 else []
    return replace(receipt, state="submitted", job_id=ids[0], how=how) if ids else None


@dataclass(frozen=True)
class JobState:
    job_id: str
    state: str
    """Slurm's word, as RUNNING or COMPLETED; UNKNOWN when neither squeue nor sacct knows the job."""
    reason: str
    source: str


def job_state(job_id: str, run: Run = run_command) -> JobState:
    answer = run(["squeue", "--noheader", "--states=all", f"--jobs={job_id}", "--format=%T|%r"])
    rows = [line.split("|") for line in answer.out.splitlines() if "|" in line] if answer.rc == 0 else []
    if rows:
        return JobState(job_id, rows[0][0].strip(), rows[0][1].strip(), "squeue")
    if shutil.which("sacct"):
        answer = run(["sacct", "--noheader", "--parsable2", "--allocations", f"--jobs={job_id}", "--format=State,ExitCode"])
        rows = [line.split("|") for line in answer.out.splitlines() if "|" in line] if answer.rc == 0 else []
        if rows:
            return JobState(job_id, rows[0][0].split()[0], f"exit code {rows[0][1]}", "sacct")
    return JobState(job_id, "UNKNOWN", _last(answer) if answer.rc != 0 else "squeue and sacct do not know it", "none")


def status(bundle: Path, run: Run = run_command) -> dict[str, Any]:
    """Slurm's state, the run folder, the last stage and the verdict of a submitted bundle; of a run folder, what its files say."""
    if is_run(bundle):
        return _status_of_run(bundle)
    receipt = _submitted(bundle)
    if receipt.state != "submitted":
        found = reconcile(receipt, run)
        if found is None:
            return {
                "job_id": "",
                "state": "UNKNOWN",
                "reason": f"Slurm does not know {receipt.job_name}",
                "run": "",
                "stage": "",
                "verdict": "",
            }
        found.write(bundle)
        receipt = found
    state = job_state(receipt.job_id, run)
    run_dir = run_dir_of(bundle, receipt.job_id)
    return {
        "job_id": receipt.job_id,
        "state": state.state,
        "reason": state.reason,
        "run": str(run_dir or ""),
        "stage": last_stage(run_dir),
        "verdict": verdict_line(run_dir),
    }


def is_run(folder: Path) -> bool:
    """A run folder holds a copy of its bundle's spec.json, so only its events tell it from the bundle."""
    return (folder / "events.jsonl").is_file() or (folder / "verdict.json").is_file()


def _status_of_run(run_dir: Path) -> dict[str, Any]:
    archived = (run_dir / "manifest.json").is_file()
    return {
        "job_id": "",
        "state": "ARCHIVED" if archived else "NOT ARCHIVED",
        "reason": "a run folder, not a bundle" + ("; launch.py verify checks it" if archived else ": it still runs, or was cut off"),
        "run": str(run_dir),
        "stage": last_stage(run_dir),
        "verdict": verdict_line(run_dir),
    }


def spec_of(bundle: Path) -> Spec:
    """spec.json of a bundle; SubmitError when the folder is none, or its spec.json is damaged."""
    try:
        return load_spec(bundle / "spec.json")
    except OSError as e:
        raise SubmitError(
            f"{bundle} is no bundle: spec.json: {e.strerror}", rule="a folder that launch.py render or submit wrote"
        ) from None
    except (ValueError, AttributeError, RecursionError) as e:
        raise SubmitError(f"{bundle / 'spec.json'} is damaged: {e}", rule="a bundle as it was rendered", hint="render it again") from None


def _submitted(bundle: Path) -> Receipt:
    """The receipt of a bundle; SubmitError says what the folder is when it has none."""
    receipt = read_receipt(bundle)
    if receipt is not None:
        return receipt
    if is_run(bundle):
        raise SubmitError(f"{bundle} is a run folder", rule="the bundle that was submitted", hint="squeue --me lists your jobs")
    if spec_of(bundle).run.launcher == "local":
        raise SubmitError(f"{bundle} is a bundle of a local run: it has no job", rule="a submitted bundle", hint="launch.py runs")
    raise SubmitError(
        f"{bundle} was not submitted", rule="a bundle with a receipt", hint=f"launch.py submit --bundle {shlex.quote(str(bundle))}"
    )


def run_dir_of(bundle: Path, job_id: str) -> Path | None:
    spec = spec_of(bundle)
    folders = sorted((Path(spec.run.results_dir) / spec.run.recipe).glob(f"*Z-{job_id}"))
    return folders[-1] if folders else None


def last_stage(run_dir: Path | None) -> str:
    if run_dir is None or not (run_dir / "events.jsonl").is_file():
        return ""
    lines = [line for line in (run_dir / "events.jsonl").read_text(encoding="utf-8", errors="replace").splitlines() if line.endswith("}")]
    if not lines:
        return ""
    try:
        event = json.loads(lines[-1])
        return f"{event['stage']} {event['state']} at {event['utc']}"
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown: the last line of events.jsonl is damaged"


def verdict_line(run_dir: Path | None) -> str:
    if run_dir is None or not (run_dir / "verdict.json").is_file():
        return ""
    try:
        return str(json.loads((run_dir / "verdict.json").read_text(encoding="utf-8"))["line"])
    except (ValueError, KeyError, TypeError, RecursionError):
        return "unknown: verdict.json is damaged"


def cancel(bundle: Path, run: Run = run_command) -> str:
    """scancel the bundle's job; returns its id. SubmitError when there is none or Slurm refuses."""
    receipt: Receipt | None = _submitted(bundle)
    if receipt is not None and receipt.state != "submitted":
        receipt = reconcile(receipt, run)
    if receipt is None:
        raise SubmitError(f"{bundle} has no job: Slurm does not know its name", rule="a job that Slurm has stored")
    answer = run(["scancel", receipt.job_id])
    if answer.rc != 0:
        raise SubmitError(f"scancel {receipt.job_id}: {_last(answer)}", rule="Slurm accepts it")
    return receipt.job_id
