"""The command line: exit codes, one message for each mistake, nothing written on bad input, help that is quick to come and true."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from tests.fakes import openai_server, raw_server, slurm_commands
from tests.golden_cases import ROOT


def launch(*words: str, cwd: Path = ROOT, **env: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(ROOT / "launch.py"), *words],
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, **env},
    )


VERBS = ("list", "check", "plan", "render", "submit", "status", "cancel", "recall", "patch", "verify", "compare", "report", "runs",
         "utilisation", "doctor")  # fmt: skip


def test_help_names_every_verb() -> None:
    done = launch("--help")
    assert done.returncode == 0
    for verb in VERBS:
        assert f"\n  {verb} " in done.stdout


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_has_help(verb: str) -> None:
    done = launch(verb, "--help")
    assert done.returncode == 0, done.stderr
    assert f"launch.py {verb}" in done.stdout


def test_launch_py_stays_thin() -> None:
    assert len((ROOT / "launch.py").read_text(encoding="utf-8").splitlines()) <= 250


def test_plan_of_a_recipe_and_of_a_config() -> None:
    done = launch("plan", "--recipe", "gemma4-p4d8", "--cluster", "example", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    config = str(ROOT / "models" / "configs" / "gemma-4-31b-it.json")
    refused = launch("plan", "--config", config, "--tp", "4", "--decode-tp", "8", "--no-hybrid-manager", "--block-size", "64")
    assert refused.returncode == 1
    assert "vllm-0.31.0-nixl-per-region-kv-heads" in refused.stdout
    assert launch("plan").returncode == 2


def test_utilisation_of_the_public_table() -> None:
    done = launch("utilisation", str(ROOT / "data" / "gemma4-prefill-utilisation.csv"))
    assert done.returncode == 0, done.stderr
    assert "busy mean 22.5 %" in done.stdout


@pytest.mark.parametrize(
    ("words", "heavy"),
    [
        (["--help"], ["yaml", "jinja2", "rich", "pdlaunch.recipe", "importlib.metadata", "difflib"]),
        (["list"], ["jinja2", "rich", "http.client"]),
    ],
)
def test_what_is_not_needed_is_not_loaded(words: list[str], heavy: list[str]) -> None:
    program = [
        "import runpy, sys",
        f"sys.argv = ['launch.py', *{words!r}]",
        "try: runpy.run_path('launch.py', run_name='__main__')",
        "except SystemExit: pass",
        f"print([m for m in {heavy!r} if m in sys.modules], file=sys.stderr)",
    ]
    done = subprocess.run([sys.executable, "-c", "\n".join(program)], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.stderr.strip() == "[]"


BAD = [
    (["--recpe", "x"], "No such option"),
    (["--recipe", "tiny-p1d9"], "no recipe 'tiny-p1d9'"),
    (["--recipe", "tiny-p1d1", "--cluster", "none"], "no cluster 'none'"),
    (["--recipe", "tiny-p1d1", "verify", "last"], "options belong behind the verb"),
    (
        ["render", "--recipe", "tiny-p1d1", "--set", "engines.decode.extra_args=[-tp4]", "--out", "OUT"],
        "use the key engines.<role>.tensor_parallel",
    ),
    (["render", "--recipe", "tiny-p1d1", "--set", "engines.decode.tensor_parallel=3", "--out", "OUT"], "attention heads (8)"),
    (["render", "--recipe", "tiny-p1d1", "--set", "nonsense=3", "--out", "OUT"], "unknown key 'nonsense'"),
    (["render", "--recipe", "tiny-p1d1", "--set", "cluster.aiperf=/none/aiperf", "--out", "OUT"], "/none/aiperf cannot be started"),
    (["submit", "--recipe", "tiny-p1d1", "--set", "cluster.min_free_gib=1000000000", "--out", "OUT"], "GiB free"),
    (["submit", "--recipe", "tiny-p1d1", "--bundle", "OUT"], "one of them"),
    (["submit", "--bundle", "OUT"], "is no bundle"),
    (["status", "OUT"], "is no bundle"),
    (["cancel", "OUT"], "is no bundle"),
    (["status", "README.md"], "is no bundle"),
    (["patch", "status", "--python", "OUT"], "out does not exist"),
    (["submit", "--recipe", "tiny-p1d1", "--set", "cluster.results_dir=/proc/x", "--out", "OUT"], "/proc/x cannot be made"),
    (["submit", "--recipe", "tiny-p1d1", "--set", "cluster.node_python=/none", "--out", "OUT"], "/none cannot be started"),
    (["check", "--recipe", "n" * 5000], "File name too long"),
    (["render", "--recipe", "tiny-p1d1", "--out", "README.md/x"], "README.md"),
    (["verify", "no-such-run"], "0 runs are called 'no-such-run'"),
    (["patch", "status"], "--python"),
    (["--local", "--recipe", "gemma4-p4d8", "--cluster", "example"], "--local with the container images"),
]


@pytest.mark.parametrize(("words", "part"), BAD, ids=[" ".join(b[0])[:60] for b in BAD])
def test_bad_input_is_exit_code_2_and_writes_nothing(tmp_path: Path, words: list[str], part: str) -> None:
    out = tmp_path / "empty" / "out"
    out.parent.mkdir()
    done = launch(*[str(out) if w == "OUT" else w for w in words])
    assert done.returncode == 2, done.stderr
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert list(out.parent.iterdir()) == []


def test_no_arguments_show_the_help() -> None:
    done = launch()
    assert done.returncode == 2
    assert "Usage: launch.py" in done.stdout


def test_dry_run_shows_placement_ports_commands_and_script(tmp_path: Path) -> None:
    done = launch("--recipe", "gemma4-p4d8", "--cluster", "example", "--dry-run")
    assert done.returncode == 0, done.stderr
    for part in (
        "node 0 (component 0, 4 GPUs): etcd, nats, frontend, prefill-0 GPUs 0-3",
        "node 1 (component 1, 8 GPUs): decode-0 GPUs 0-7",
        "ports: frontend a free one",
        "-m dynamo.vllm",
        "--etcd"[2:],
        "#SBATCH hetjob",
        "transfer of one prompt: 8 ranks",
    ):
        assert part in done.stdout


def test_list_and_check_as_json() -> None:
    names = {row["name"] for row in json.loads(launch("list", "--format", "json").stdout)}
    assert {"tiny-p1d1", "gemma4-p4d8", "local", "example"} <= names
    done = launch("check", "--recipe", "gemma4-p4d8", "--cluster", "example-venv", "--format", "json")
    assert done.returncode == 0, done.stderr
    assert {"check", "result", "detail"} == set(json.loads(done.stdout)[0])


def test_submit_status_and_cancel_through_the_command_line(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    commands = slurm_commands.install(tmp_path / "bin", {"sbatch": {"out": "4711\n"}, "squeue": {"out": "PENDING|Resources\n"}})
    env = {"PATH": f"{commands}:{os.environ['PATH']}"}
    out = tmp_path / "it's a bundle"
    words = ["--recipe", "gemma4-p4d8", "--cluster", "example-venv", "--set", f"cluster.results_dir={tmp_path / 'results'}"]
    done = launch("submit", *words, "--out", str(out), **env)
    assert done.returncode == 0, done.stderr
    assert "submitted job 4711" in done.stdout
    status = launch("status", str(out), "--format", "json", **env)
    assert json.loads(status.stdout)["state"] == "PENDING"
    assert launch("submit", "--bundle", str(out), **env).returncode == 2
    assert launch("cancel", str(out), **env).stdout == "cancelled job 4711\n"


def test_a_defect_of_the_launcher_is_exit_code_3(tmp_path: Path) -> None:
    program = "import sys; sys.path.insert(0, '.'); import launch, pdlaunch.session as s\n"
    program += "def broken(*a, **k): raise KeyError('x')\n"
    program += "s.catalogue = broken; sys.argv = ['launch.py', 'list']; sys.exit(launch.main())"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 3
    assert "this is a defect of the launcher" in done.stderr


def test_doctor_says_what_is_missing(tmp_path: Path) -> None:
    copy = tmp_path / "broken.yaml"
    text = (
        (ROOT / "clusters" / "local.yaml")
        .read_text(encoding="utf-8")
        .replace("name: local", "name: broken")
        .replace(".envs/aiperf", "/none/aiperf")
    )
    copy.write_text(text, encoding="utf-8")
    done = launch("doctor", "--cluster", str(copy), "--format", "json")
    assert done.returncode == 1
    found = {row["what"]: row for row in json.loads(done.stdout)}
    assert found["aiperf"][""] == "MISSING"
    assert "make setup" in found["aiperf"]["next"]
    assert found["launcher Python"][""] == "ok"


def test_repeat_command_renders_the_same_spec(tmp_path: Path) -> None:
    words = [
        "--recipe",
        "gemma4-p4d8",
        "--cluster",
        "example-venv",
        "--set",
        "engine_args.max_num_seqs=32",
        "--set",
        "load.0.requests=99",
        "--set",
        "cluster.network.http_port=8123",
    ]
    assert launch("render", *words, "--out", str(tmp_path / "a")).returncode == 0
    first = json.loads((tmp_path / "a" / "spec.json").read_text(encoding="utf-8"))
    again = first["run"]["repeat_command"].split()
    assert again[:2] == ["python", "launch.py"]
    done = launch("render", *again[2:], "--out", str(tmp_path / "b"))
    assert done.returncode == 0, done.stderr
    second = json.loads((tmp_path / "b" / "spec.json").read_text(encoding="utf-8"))
    for spec in (first, second):
        for name in ("created_utc", "git_commit", "git_dirty_sha256"):
            spec["run"].pop(name)
    assert first == second
    assert first["run"]["overrides"] == {"engine_args.max_num_seqs": "32", "load.0.requests": "99", "cluster.network.http_port": "8123"}


def test_recall_alone_against_any_endpoint(tmp_path: Path) -> None:
    for behaviour, code in ((openai_server.right, 0), (openai_server.noise, 1)):
        with openai_server.openai_server(behaviour) as server:
            words = ["--url", server.url, "--model", "m", "--prompts", "3", "--prompt-tokens", "300", "--out", str(tmp_path / str(code))]
            done = launch("recall", *words, "--format", "json")
        assert done.returncode == code, done.stderr
        found = json.loads(done.stdout)
        assert (found["asked"], found["correct"], found["passed"]) == (3, 0 if code else 3, code == 0)
        assert len(Path(found["answers"]).read_text(encoding="utf-8").splitlines()) == 3
        assert done.stderr.count("WRONG: " if code else ": correct") == 3
    done = launch("recall", "--url", "ftp://x", "--model", "m", "--out", str(tmp_path / "none"))
    assert done.returncode == 2
    assert not (tmp_path / "none").exists()


HTML = raw_server.respond(200, "<html>it works</html>", "text/html")
DENIED = raw_server.respond(401, '{"error": {"message": "no key"}}')


@pytest.mark.parametrize(("answer", "said"), [(HTML, "is no OpenAI endpoint: the answer is not JSON (text/html)"), (DENIED, "HTTP 401")])
def test_recall_of_what_is_no_endpoint_is_said_once(tmp_path: Path, answer: bytes, said: str) -> None:
    heads: list[bytes] = []

    def reply(connection: socket.socket, head: bytes, done: threading.Event) -> None:
        heads.append(head)
        connection.sendall(answer)

    with raw_server.raw_server(reply) as url:
        done = launch("recall", "--url", url, "--model", "m", "--prompts", "3", "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count(said) == 1, done.stderr
    assert "WRONG" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    assert len(heads) == 1


def test_recall_of_a_closed_port_and_a_deadline_that_is_none(tmp_path: Path) -> None:
    with raw_server.raw_server(raw_server.answering(HTML)) as url:
        pass
    done = launch("recall", "--url", url, "--model", "m", "--out", str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.count("unreachable: ") == done.stderr.count("refused") == 1
    assert "WRONG" not in done.stderr
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "before.jsonl").write_text("kept", encoding="utf-8")
    done = launch("recall", "--url", url, "--model", "m", "--out", str(tmp_path))
    assert "is there already" in done.stderr
    assert (tmp_path / "before.jsonl").read_text(encoding="utf-8") == "kept"


@pytest.mark.parametrize(
    "words",
    [("--timeout-s", "-1"), ("--timeout-s", "0"), ("--timeout-s", "nan"), ("--timeout-s", "inf"), ("--prompts", "0"),
     ("--prompts", "9" * 20), ("--prompt-tokens", "1"), ("--prompt-tokens", "9" * 20), ("--max-tokens", "-5"), ("--model", ""),
     ("--url", "http://a b"),
     ("--url", "http://127.0.0.1:1/\r\nX: y"), ("--url", "http://[::1")],
    ids=repr,
)  # fmt: skip
def test_recall_of_what_cannot_be_asked_makes_no_folder(tmp_path: Path, words: tuple[str, str]) -> None:
    done = launch("recall", "--url", "http://127.0.0.1:1", "--model", "m", *words, TMPDIR=str(tmp_path))
    assert done.returncode == 2
    assert done.stderr.startswith(("error: ", "Usage: "))
    assert list(tmp_path.iterdir()) == []


def test_ctrl_c_during_the_imports_is_no_trace(tmp_path: Path) -> None:
    """A click that never finishes loading, so that the signal certainly comes before main()."""
    (tmp_path / "click.py").write_text("print('loading', flush=True)\nimport time\ntime.sleep(60)\n", encoding="utf-8")
    env = {**os.environ, "PYTHONPATH": str(tmp_path)}
    command = [sys.executable, str(ROOT / "launch.py"), "list"]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "loading\n"
        child.send_signal(signal.SIGINT)
        _, said = child.communicate(timeout=30)
    assert (child.returncode, said) == (130, "interrupted\n")


def test_ctrl_c_while_an_answer_is_awaited_ends_at_once(tmp_path: Path) -> None:
    asked = threading.Event()

    def silent(connection: socket.socket, head: bytes, done: threading.Event) -> None:
        asked.set()
        done.wait(60)

    with raw_server.raw_server(silent) as url:
        words = ["recall", "--url", url, "--model", "m", "--timeout-s", "3600", "--out", str(tmp_path)]
        with subprocess.Popen([sys.executable, str(ROOT / "launch.py"), *words], cwd=ROOT, stderr=subprocess.PIPE, text=True) as child:
            assert asked.wait(60)
            child.send_signal(signal.SIGINT)
            _, said = child.communicate(timeout=30)
    assert child.returncode == 130
    assert said.splitlines()[-1] == "interrupted"
    assert "Traceback" not in said
