"""The bundle folder: complete or absent, loadable, and safe for folders with spaces and quotes in their names."""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdlaunch import bundle, cluster, job, preflight, recipe
from pdlaunch.errors import BundleError, LaunchError, RecipeError, SubmitError
from pdlaunch.node.spec import load_spec
from tests.golden_cases import ROOT

AWKWARD = 'it\'s a "folder" $HOME `x` %j'


def make(site: str = "local-slurm", name: str = "tiny-p1d2", root: Path = ROOT, **changes: object) -> job.Job:
    context = job.Context(root, "2026-01-02T03:04:05Z", files=ROOT)
    found = cluster.load(ROOT / "clusters" / f"{site}.yaml")
    return job.build(recipe.load(ROOT / "recipes" / f"{name}.yaml"), dataclasses.replace(found, **changes), context)  # type: ignore[arg-type]


def test_files_of_a_bundle(tmp_path: Path) -> None:
    out = bundle.render(make(), tmp_path / "b")
    assert {p.name for p in out.iterdir()} == {
        "spec.json",
        "recipe.yaml",
        "cluster.yaml",
        "manifest.json",
        "job.sbatch",
        "submit.sh",
        "node",
    }
    assert load_spec(out / "spec.json").run.recipe == "tiny-p1d2"
    manifest = json.loads((out / "manifest.json").read_text(encoding="utf-8"))
    on_disk = {str(p.relative_to(out)) for p in out.rglob("*") if p.is_file()} - {"manifest.json"}
    assert set(manifest["files"]) == on_disk
    assert all(bundle.sha256_of(out / name) == digest for name, digest in manifest["files"].items())
    assert manifest["model"]["config.json"]["sha256"]
    assert set(manifest["patches"]) == {"nixl-1.4.1-progress-thread-delay", "vllm-0.31.0-nixl-per-region-kv-heads"}
    assert os.access(out / "submit.sh", os.X_OK)


def test_node_is_copied_whole_and_runs_without_this_repository(tmp_path: Path) -> None:
    out = bundle.render(make("local"), tmp_path / "b")
    source = {p.relative_to(ROOT / "pdlaunch" / "node") for p in (ROOT / "pdlaunch" / "node").rglob("*.py")}
    assert {p.relative_to(out / "node") for p in (out / "node").rglob("*.py")} == source
    program = (
        f"import sys; sys.path[:] = [p for p in sys.path if 'site-packages' not in p]; sys.path.insert(0, {str(out)!r})\n"
        "from pathlib import Path; from node.spec import load_spec; print(load_spec(Path('spec.json')).run.recipe)"
    )
    done = subprocess.run([sys.executable, "-I", "-c", program], cwd=out, capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "tiny-p1d2", done.stderr


def test_awkward_folder_names_are_quoted(tmp_path: Path) -> None:
    """bash sees the folder itself; sbatch's directives escape it; nothing of the name is run."""
    out = bundle.render(make(root=tmp_path / AWKWARD), tmp_path / AWKWARD / "b")
    text = (out / "job.sbatch").read_text(encoding="utf-8")
    subprocess.run(["bash", "-n", out / "job.sbatch"], check=True, timeout=30)
    assert (
        subprocess.run(["shellcheck", "--exclude=SC2016", out / "job.sbatch"], capture_output=True, timeout=60, check=False).returncode == 0
    )
    line = next(x for x in text.splitlines() if x.startswith("bundle="))
    shown = subprocess.run(["bash", "-c", f'{line}; printf %s "$bundle"'], capture_output=True, text=True, check=True, timeout=30).stdout
    assert shown == str(out)
    directive = next(x for x in text.splitlines() if "--output=" in x)
    assert shlex.split(directive.removeprefix("#SBATCH "))[0] == f"--output={str(out).replace('%', '%%')}/slurm-%j.out"
    spec = load_spec(out / "spec.json")
    assert spec.model.path == str(tmp_path / AWKWARD / "models/gemma4-recall-4x1")


def test_an_existing_folder_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine").write_text("x", encoding="utf-8")
    with pytest.raises(BundleError, match="is there already"):
        bundle.render(make(), tmp_path / "b")
    assert [p.name for p in tmp_path.rglob("*")] == ["b", "mine"]


def test_a_bundle_that_cannot_be_written_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk, as os.write reports it, in the middle of the bundle."""
    real = shutil.copyfile

    def full(source: Path, target: Path) -> Path:
        if Path(target).name == "cluster.yaml":
            raise OSError(28, "No space left on device")
        return Path(real(source, target))

    monkeypatch.setattr(shutil, "copyfile", full)
    with pytest.raises(BundleError, match="No space left on device"):
        bundle.render(make(), tmp_path / "deep" / "b")
    assert list((tmp_path / "deep").iterdir()) == []


def test_a_bundle_that_was_changed_is_named(tmp_path: Path) -> None:
    out = bundle.render(make(), tmp_path / "b")
    bundle.require_whole(out)
    (out / "receipt.json").touch()
    bundle.require_whole(out)
    (out / "node" / "worker.py").unlink()
    (out / "job.sbatch").write_text("#!/bin/sh\n", encoding="utf-8")
    with pytest.raises(BundleError) as caught:
        bundle.require_whole(out)
    assert "job.sbatch is changed" in caught.value.what
    assert "node/worker.py is missing" in caught.value.what
    for text in ("{", "[]", "{}", '{"files": 5}', '{"files": {"x": 5}}'):
        (out / "manifest.json").write_text(text, encoding="utf-8")
        with pytest.raises(BundleError, match="is not as it was rendered"):
            bundle.require_whole(out)


def test_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    with pytest.raises(BundleError, match="cannot be written"):
        bundle.render(make(), tmp_path / "file" / "b")


def failing(tmp_path: Path, site: str, **changes: object) -> str:
    with pytest.raises(LaunchError) as e:
        preflight.check_job(make(site, **changes), submitting=True)
    assert e.value.exit_code == 2
    return str(e.value)


def test_missing_environment_and_programs(tmp_path: Path) -> None:
    made = make("local", root=tmp_path)
    with pytest.raises(RecipeError, match=r"the model folder .* does not exist"):
        preflight.check_job(made)
    (tmp_path / "models").symlink_to(ROOT / "models")
    with pytest.raises(RecipeError, match=r"environments\[1\].python: the engine environment .* does not exist"):
        preflight.check_job(make("local", root=tmp_path))
    assert "aiperf" in failing(tmp_path, "local", aiperf="/none/aiperf", environments=_python_here())
    message = failing(tmp_path, "local", etcd="/none/etcd", aiperf=sys.executable, environments=_python_here())
    assert "local.yaml" in message
    assert "etcd: /none/etcd cannot be started" in message


def _python_here() -> tuple[cluster.Environment, ...]:
    return tuple(dataclasses.replace(e, python=sys.executable) for e in cluster.load(ROOT / "clusters" / "local.yaml").environments)


def ready(site: str = "local", **changes: object) -> dict[str, object]:
    """Changes after which only the thing under test is wrong."""
    return {"environments": _python_here(), "aiperf": sys.executable, "etcd": sys.executable, "nats": sys.executable, **changes}


def test_a_busy_port_is_refused(tmp_path: Path) -> None:
    import socket

    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        s.listen()
        port = s.getsockname()[1]
        message = failing(tmp_path, "local", **ready(network=cluster.Network(http_port=port)))
    assert f"port {port} cannot be used: Address already in use" in message
    freed = failing(tmp_path, "local", **ready(network=cluster.Network(http_port=port), results_dir=str(tmp_path)))
    assert "is not what the recipe names" in freed, "with the port free, only the environment is wrong: this Python has no vLLM"


def test_a_full_disk_is_refused(tmp_path: Path) -> None:
    assert "GiB free" in failing(tmp_path, "local", **ready(results_dir=str(tmp_path), min_free_gib=1e9))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"min_free_gib": 1e9}, "GiB free"),
        ({"results_dir": "/proc/x"}, "/proc/x cannot be made"),
        ({"network": cluster.Network(interface="nope0")}, "the network interface nope0 has no IPv4 address here: No such device"),
    ],
)
def test_check_of_a_local_cluster_asks_what_the_run_asks(changes: dict[str, object], said: str) -> None:
    with pytest.raises(SubmitError, match=said):
        preflight.check_job(make("local", **ready(**changes)))


@pytest.mark.parametrize(("rows", "said"), [(["0, H200", "1, H200"], ""), (["0, H200"], "placed on GPUs 0 to 1, and this machine has 1")])
def test_gpus_of_this_machine_are_counted(monkeypatch: pytest.MonkeyPatch, rows: list[str], said: str) -> None:
    monkeypatch.setattr(preflight, "gpus_seen", lambda: rows)
    made = make("local-gpu", "gpu-tiny-p1d2", nodes=cluster.Nodes(max=1, gpus_per_node=2))
    found = {f.name: f for f in preflight.findings(made)}["gpus"]
    assert said in str(found.error or "")
    assert bool(found.error) == bool(said)


def test_results_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("", encoding="utf-8")
    given = {"file": "is not a folder", "file/results": "cannot be made: no folder can be made in", "/proc/x": "cannot be made"}
    for name, said in given.items():
        message = failing(tmp_path, "local", **ready(results_dir=str(tmp_path / name)))
        assert f"{tmp_path / name} {said}" in message
        assert "min_free_gib" not in message
    assert [p.name for p in tmp_path.iterdir()] == ["file"], "looking leaves nothing"


def test_no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SubmitError, match="sbatch is not in PATH"):
        preflight.check_job(make("local-slurm", **ready(results_dir=str(tmp_path))), submitting=True)


def test_a_time_limit_that_the_partition_refuses(tmp_path: Path) -> None:
    slurm = dataclasses.replace(cluster.load(ROOT / "clusters" / "local-slurm.yaml").slurm, max_time_minutes=10)  # type: ignore[type-var]
    assert "time_limit_minutes 30" in failing(tmp_path, "local-slurm", **ready(slurm=slurm))


def test_models_that_are_not_visible_here_are_not_looked_for() -> None:
    made = make("example-venv", "gemma4-p4d8")
    preflight.check_job(made)
    assert any("not visible here" in f.observed for f in preflight.findings(made))


PLANTED = "hf_" + "A1b2C3d4" * 4


@pytest.mark.parametrize("where", ["recipe", "cluster", "override"])
def test_a_planted_secret_is_refused_and_not_repeated(tmp_path: Path, where: str) -> None:
    for kind, name in (("recipe", "tiny-p1d1"), ("cluster", "local")):
        text = (ROOT / f"{kind}s" / f"{name}.yaml").read_text(encoding="utf-8")
        (tmp_path / f"{name}.yaml").write_text(text + (f"# {PLANTED}\n" if kind == where else ""), encoding="utf-8")
    settings = (f"description={PLANTED}",) if where == "override" else ()

    def check() -> None:
        found = recipe.load(tmp_path / "tiny-p1d1.yaml", settings)
        preflight.check_job(job.build(found, cluster.load(tmp_path / "local.yaml"), job.Context(ROOT, "2026-01-02T03:04:05Z")))

    with pytest.raises(RecipeError, match="looks like a secret") as e:
        check()
    assert PLANTED not in str(e.value)
    assert "archived with every run" in str(e.value)


def test_secrets_of_the_environment_do_not_reach_the_bundle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_TOKEN", "MY_API_KEY", "DB_PASSWORD"):
        monkeypatch.setenv(name, f"{PLANTED}{name}")
    out = bundle.render(make(), tmp_path / "b")
    for path in out.rglob("*"):
        assert not path.is_file() or PLANTED.encode() not in path.read_bytes(), path
