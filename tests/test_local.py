"""Running a bundle on this machine: exit codes, signals handed on, and a supervisor that does not leave."""

from __future__ import annotations

import dataclasses
import json
import os
import pty
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from pdlaunch import archive, bundle, local, session
from pdlaunch.errors import SubmitError
from tests.golden_cases import ROOT
from tests.test_bundle import make

# A supervisor that ends as it is told: real ones are run by tests/e2e.
SUPERVISOR = """
import json, os, signal, sys, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
run.mkdir(parents=True)
def stop(signum, frame):
    print("stopped by", signal.Signals(signum).name, flush=True)
    sys.exit(130)
for s in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(s, signal.SIG_IGN if {stubborn} else stop)
(run / "events.jsonl").touch()
(run / "pid").write_text(f"{{os.getpid()}} {{os.getpgid(0)}}")
print("argv", *sys.argv[1:], flush=True)
if {wait}:
    time.sleep(60)
sys.exit({code})
"""


def make_bundle(tmp_path: Path, *, code: int = 0, wait: bool = False, stubborn: bool = False) -> Path:
    made = bundle.render(make("local"), tmp_path / "it's a bundle")
    (made / "node" / "__main__.py").write_text(SUPERVISOR.format(code=code, wait=wait, stubborn=stubborn), encoding="utf-8")
    return made


@pytest.mark.parametrize("code", [0, 1, 2, 3])
def test_exit_code_of_the_supervisor_is_ours(tmp_path: Path, code: int) -> None:
    made, run = make_bundle(tmp_path, code=code), tmp_path / "run"
    log = tmp_path / "log"
    with log.open("w", encoding="utf-8") as output:
        assert local.run(made, run, sys.executable, output) == code
    assert log.read_text(encoding="utf-8") == f"argv run --spec {made}/spec.json --run-dir {run} --launcher {os.getpid()}\n"
    assert not list(made.rglob("__pycache__"))


def signal_after(path: Path, signum: int) -> threading.Thread:
    def send() -> None:
        deadline = time.monotonic() + 30
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        os.kill(os.getpid(), signum)

    thread = threading.Thread(target=send)
    thread.start()
    return thread


@pytest.mark.parametrize(("signum", "handed_on"), [(signal.SIGINT, "SIGINT"), (signal.SIGTERM, "SIGTERM"), (signal.SIGHUP, "SIGHUP")])
def test_a_signal_is_handed_on_once(tmp_path: Path, signum: int, handed_on: str) -> None:
    made, run, log = make_bundle(tmp_path, wait=True), tmp_path / "run", tmp_path / "log"
    before = signal.getsignal(signum)
    thread = signal_after(run / "pid", signum)
    with log.open("w", encoding="utf-8") as output:
        assert local.run(made, run, sys.executable, output) == 130
    thread.join()
    assert f"stopped by {handed_on}" in log.read_text(encoding="utf-8")
    assert signal.getsignal(signum) == before


def test_a_supervisor_that_does_not_leave_is_killed_with_its_group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "LAST_RESORT_S", 0.5)
    made, run, log = make_bundle(tmp_path, wait=True, stubborn=True), tmp_path / "run", tmp_path / "log"
    thread = signal_after(run / "pid", signal.SIGINT)
    with log.open("w", encoding="utf-8") as output:
        assert local.run(made, run, sys.executable, output) == 130
    thread.join()
    pid, group = map(int, (run / "pid").read_text(encoding="utf-8").split())
    assert pid == group != os.getpgid(0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


KILLED = """
import json, os, shutil, signal, subprocess, sys, tempfile, time
from pathlib import Path
run = Path(sys.argv[sys.argv.index("--run-dir") + 1])
(run / "nodes").mkdir(parents=True)
(run / "logs").mkdir()
shutil.copy("spec.json", run)
signal.signal(signal.SIGTERM, signal.SIG_IGN)
tmp = tempfile.mkdtemp(prefix="pdl-")
tool_tmp = tempfile.mkdtemp(prefix="pdl-")
other = subprocess.Popen(["sleep", "600"], start_new_session=True, env={{**os.environ, "TMPDIR": tool_tmp}})
event = {{"utc": "", "monotonic_s": 0, "stage": "job_started", "state": "end", "tmp_dir": tmp}}
(run / "events.jsonl").write_text(json.dumps(event) + "\\n")
(run / "left").write_text(f"{{other.pid}} {{tmp}} {{tool_tmp}}")
{end}
"""


@pytest.mark.parametrize(("end", "signalled"), [("time.sleep(60)", True), ("os.kill(os.getpid(), signal.SIGKILL)", False)])
def test_what_a_killed_supervisor_leaves_is_swept_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], end: str, signalled: bool
) -> None:
    monkeypatch.setattr(local, "LAST_RESORT_S", 0.5)
    monkeypatch.setattr(local, "SWEEP_S", 0.5)
    made, run = make_bundle(tmp_path), tmp_path / "run"
    (made / "node" / "__main__.py").write_text(KILLED.format(end=end), encoding="utf-8")
    thread = signal_after(run / "left", signal.SIGTERM) if signalled else None
    assert local.run(made, run, sys.executable) == (130 if signalled else 3)
    if thread is not None:
        thread.join()
    pid, *folders = (run / "left").read_text(encoding="utf-8").split()
    assert "State:\tZ" in state if (state := status(pid)) else True
    assert [f for f in folders if Path(f).exists()] == []
    assert json.loads((run / "verdict.json").read_text(encoding="utf-8"))["verdict"] == "INCOMPLETE"
    ended = ("interrupted by SIGTERM; " if signalled else "") + "the supervisor was killed by SIGKILL"
    assert json.loads((run / "manifest.json").read_text(encoding="utf-8"))["ended"] == ended
    assert archive.verify(run).intact
    assert run.with_name("run.html").is_file()
    shown = capsys.readouterr()
    assert ended in shown.err
    assert shown.out.startswith("INCOMPLETE")


def status(pid: str) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text(encoding="utf-8")
    except FileNotFoundError:
        return ""


def test_a_signal_before_the_supervisor_listens_waits_for_it(tmp_path: Path) -> None:
    made, run, log = make_bundle(tmp_path, wait=True), tmp_path / "run", tmp_path / "log"
    main = made / "node" / "__main__.py"
    early = main.read_text(encoding="utf-8").replace("run.mkdir(parents=True)", "run.mkdir(parents=True)\nimport time\ntime.sleep(0.6)")
    main.write_text(early, encoding="utf-8")
    thread = signal_after(run, signal.SIGINT)
    with log.open("w", encoding="utf-8") as output:
        assert local.run(made, run, sys.executable, output) == 130
    thread.join()
    assert "stopped by SIGINT" in log.read_text(encoding="utf-8")
    assert "Traceback" not in log.read_text(encoding="utf-8")


def test_a_hang_up_that_is_ignored_stays_ignored(tmp_path: Path) -> None:
    made, run, log = make_bundle(tmp_path), tmp_path / "run", tmp_path / "log"
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    thread = signal_after(run / "pid", signal.SIGHUP)
    try:
        with log.open("w", encoding="utf-8") as output:
            assert local.run(made, run, sys.executable, output) == 0
        thread.join()
    finally:
        signal.signal(signal.SIGHUP, before)


def test_two_bundles_of_one_second_do_not_meet(tmp_path: Path) -> None:
    found = make("local")
    found = dataclasses.replace(found, context=dataclasses.replace(found.context, root=tmp_path))
    first, second = session.new_bundle(found, None), session.new_bundle(found, None)
    assert first != second
    assert first.parent == second.parent == tmp_path / "bundles"


def test_a_python_that_cannot_be_started(tmp_path: Path) -> None:
    with pytest.raises(SubmitError, match="node_python"):
        local.run(make_bundle(tmp_path), tmp_path / "run", "/none/python3")


def test_run_folder_of_a_local_run(tmp_path: Path) -> None:
    first, second = local.new_run_dir(make_bundle(tmp_path)), local.new_run_dir(tmp_path / "it's a bundle")
    assert first.parent == ROOT / "results" / "tiny-p1d2"
    assert first != second
    assert "Z-local-" in first.name


def test_view_on_a_terminal_ends_with_verdict_and_archive(tmp_path: Path) -> None:
    """The whole command on a pseudo-terminal, so that the live view is what runs."""
    made, run, typescript = make_bundle(tmp_path), tmp_path / "run", tmp_path / "typescript"
    event = {"utc": "", "monotonic_s": 0, "stage": "recall_before", "state": "end", "correct": 9, "asked": 9}
    written = {"events.jsonl": json.dumps(event) + "\n", "verdict.json": '{"line": "VALID  x"}'}
    more = "".join(f"(run / {name!r}).write_text({text!r})\n" for name, text in written.items())
    main = made / "node" / "__main__.py"
    main.write_text(main.read_text(encoding="utf-8").replace("def stop(", more + "def stop("), encoding="utf-8")
    code = [
        "import sys; from pathlib import Path; from pdlaunch import session, local",
        f"local.new_run_dir = lambda bundle: Path({str(run)!r})",
        f"sys.exit(session.run_here(Path({str(made)!r}), sys.executable, live=True))",
    ]
    terminal = f"import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn([sys.executable, '-c', {chr(10).join(code)!r}])))"
    with typescript.open("wb") as out:
        command = [sys.executable, "-c", terminal]
        done = subprocess.run(command, cwd=ROOT, stdout=out, stdin=subprocess.DEVNULL, timeout=60, check=False)
    shown = typescript.read_text(encoding="utf-8", errors="replace").replace("\r\n", "\n")
    assert done.returncode == 0, shown
    for part in ("recall_before", "correct 9, asked 9", "VALID  x", f"archive: {run}"):
        assert part in shown


def test_a_terminal_that_goes_away_ends_the_view_and_not_the_run(tmp_path: Path) -> None:
    """The reader of the pseudo-terminal leaves in the middle; SIGHUP is ignored, as under nohup."""
    made, run = make_bundle(tmp_path, code=0), tmp_path / "run"
    main = made / "node" / "__main__.py"
    waits = "\nwhile not (run / 'gone').exists():\n    time.sleep(0.05)\ntime.sleep(1)\n"
    main.write_text(
        main.read_text(encoding="utf-8").replace("sys.exit(0)", f"{waits}(run / 'ended').touch()\nsys.exit(0)"), encoding="utf-8"
    )
    code = [
        "import sys; from pathlib import Path; from pdlaunch import session, local",
        f"local.new_run_dir = lambda bundle: Path({str(run)!r})",
        f"code = session.run_here(Path({str(made)!r}), sys.executable, live=True)",
        f"Path({str(tmp_path / 'code')!r}).write_text(str(code))",
    ]
    pid, terminal = pty.fork()
    if pid == 0:
        signal.signal(signal.SIGHUP, signal.SIG_IGN)
        os.chdir(ROOT)
        os.execv(sys.executable, [sys.executable, "-c", "\n".join(code)])
    deadline = time.monotonic() + 30
    while not (run / "pid").exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    os.close(terminal)
    (run / "gone").touch()
    os.waitpid(pid, 0)
    assert (run / "ended").exists()
    assert (tmp_path / "code").read_text() == "0"
