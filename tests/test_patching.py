"""Patching on folders that look like site-packages: the shipped series, and a small stacked one."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pdlaunch import patching, unidiff
from pdlaunch.errors import PatchError

ROOT = Path(__file__).resolve().parent.parent
SHIPPED = ROOT / "patches" / "series.yaml"
STOCK = {"engine/core.py": "a\nb\nc\nd\n", "engine/extra.py": "x\ny\n"}
ONE = {"engine/core.py": "a\nB\nc\nd\n", "engine/extra.py": "x\ny\nz\n", "engine/new.py": "n\n"}
TWO = {**ONE, "engine/core.py": "a\nB\nc\nD\n"}
ONE_DIFF = """One.

--- a/engine/core.py
+++ b/engine/core.py
@@ -1,3 +1,3 @@
 a
-b
+B
 c
--- a/engine/extra.py
+++ b/engine/extra.py
@@ -1,2 +1,3 @@
 x
 y
+z
--- a/engine/new.py
+++ b/engine/new.py
@@ -0,0 +1 @@
+n
"""
TWO_DIFF = """--- a/engine/core.py
+++ b/engine/core.py
@@ -2,3 +2,3 @@
 B
 c
-d
+D
"""


def sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def write(folder: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def series_text(**change: str) -> str:
    values = {"version": "1.0", "two_before": sha(ONE["engine/core.py"]), "requires": "[one]", **change}
    return f"""serving_versions: {{engine: "1.0"}}
patches:
  - name: one
    distributions: [engine]
    version: "{values["version"]}"
    purpose: p
    drop: d
    files:
      - {{path: engine/core.py, before: {sha(STOCK["engine/core.py"])}, after: {sha(ONE["engine/core.py"])}}}
      - {{path: engine/extra.py, before: {sha(STOCK["engine/extra.py"])}, after: {sha(ONE["engine/extra.py"])}}}
      - {{path: engine/new.py, before: absent, after: {sha(ONE["engine/new.py"])}}}
  - name: two
    distributions: [engine]
    version: "1.0"
    requires: {values["requires"]}
    purpose: p
    drop: d
    files:
      - {{path: engine/core.py, before: {values["two_before"]}, after: {sha(TWO["engine/core.py"])}}}
"""


@pytest.fixture
def series(tmp_path: Path) -> patching.Series:
    write(tmp_path / "patches", {"one.patch": ONE_DIFF, "two.patch": TWO_DIFF, "series.yaml": series_text()})
    return patching.load_series(tmp_path / "patches" / "series.yaml")


@pytest.fixture
def site(tmp_path: Path) -> Path:
    folder = tmp_path / "with space" / "site-packages"
    write(folder, STOCK)
    write(folder, {"engine-1.0.dist-info/METADATA": "Metadata-Version: 2.1\nName: engine\nVersion: 1.0+cpu\n"})
    return folder


def texts(site: Path) -> dict[str, str]:
    return {f"engine/{p.name}": p.read_text() for p in sorted((site / "engine").glob("*.py"))}


def states(site: Path, series: patching.Series) -> list[str]:
    return [found.state for found in patching.status(site, series)]


def test_shipped_series_loads_and_each_patch_says_when_it_may_go() -> None:
    shipped = patching.load_series(SHIPPED)
    assert {f"{patch.name}.patch" for patch in shipped.patches} == {p.name for p in SHIPPED.parent.glob("*.patch")}
    assert all(patch.purpose and patch.drop for patch in shipped.patches)


def test_stack_goes_up_and_down(site: Path, series: patching.Series) -> None:
    assert states(site, series) == ["not applied", "not applied"]
    assert patching.apply(site, series, ["one"]) == ["engine/core.py", "engine/extra.py", "engine/new.py"]
    assert (texts(site), states(site, series)) == (ONE, ["applied", "not applied"])
    assert patching.apply(site, series, ["one", "two"]) == ["engine/core.py"]
    assert (texts(site), states(site, series)) == (TWO, ["applied", "applied"])
    assert patching.apply(site, series, ["one", "two"]) == []
    assert patching.revert(site, series, ["two"]) == ["engine/core.py"]
    assert texts(site) == ONE
    patching.apply(site, series, ["two"])
    patching.revert(site, series, ["one", "two"])
    assert texts(site) == STOCK
    assert not list((site / "engine").glob(".*"))


def test_revert_without_recorded_originals_runs_the_diff_backwards(site: Path, series: patching.Series) -> None:
    write(site, TWO)
    patching.revert(site, series, ["one", "two"])
    assert texts(site) == STOCK


def test_revert_distrusts_a_changed_original(site: Path, series: patching.Series) -> None:
    patching.apply(site, series, ["one"])
    (site / patching.STORE / "originals" / sha(STOCK["engine/core.py"])).write_text("not the original\n")
    patching.revert(site, series, ["one"])
    assert texts(site) == STOCK


def test_stack_order_is_enforced(site: Path, series: patching.Series) -> None:
    with pytest.raises(PatchError, match="two requires one"):
        patching.apply(site, series, ["two"])
    patching.apply(site, series, ["one", "two"])
    with pytest.raises(PatchError, match="two requires one"):
        patching.revert(site, series, ["one"])
    assert texts(site) == TWO


def test_dry_run_writes_nothing(site: Path, series: patching.Series) -> None:
    before = sorted(site.rglob("*"))
    assert patching.apply(site, series, ["one"], dry_run=True) == ["engine/core.py", "engine/extra.py", "engine/new.py"]
    assert (sorted(site.rglob("*")), texts(site)) == (before, STOCK)


@pytest.mark.parametrize("broken", [{"engine/core.py": "edited\n"}, {"engine/extra.py": ONE["engine/extra.py"]}])
def test_half_applied_and_foreign_files_stop_everything_with_hashes(site: Path, series: patching.Series, broken: dict[str, str]) -> None:
    write(site, broken)
    assert states(site, series)[0] == "unknown"
    for act in (patching.apply, patching.revert, patching.verify):
        with pytest.raises(PatchError) as caught:
            act(site, series, ["one"])
        for name, text in {**STOCK, **broken}.items():
            assert f"{name}\n      observed {sha(text)}" in str(caught.value)
        assert sha(ONE["engine/core.py"]) in str(caught.value)
    assert texts(site) == {**STOCK, **broken}


def test_hard_links_keep_the_old_bytes(tmp_path: Path, site: Path, series: patching.Series) -> None:
    os.link(site / "engine/core.py", tmp_path / "cache.py")
    patching.apply(site, series, ["one"])
    assert (tmp_path / "cache.py").read_text() == STOCK["engine/core.py"]


def test_mode_is_kept_and_byte_code_goes(site: Path, series: patching.Series) -> None:
    (site / "engine/core.py").chmod(0o640)
    write(site, {"engine/__pycache__/core.cpython-311.pyc": "", "engine/__pycache__/other.cpython-311.pyc": ""})
    patching.apply(site, series, ["one"])
    assert (site / "engine/core.py").stat().st_mode & 0o777 == 0o640
    assert [p.name for p in (site / "engine/__pycache__").iterdir()] == ["other.cpython-311.pyc"]


def test_failed_write_leaves_every_file_as_it_was(site: Path, series: patching.Series, monkeypatch: pytest.MonkeyPatch) -> None:
    real = Path.replace

    def full_disk(self: Path, target: Path) -> Path:
        if Path(target).name == "new.py":
            raise OSError(28, "No space left on device")
        return real(self, target)

    monkeypatch.setattr(Path, "replace", full_disk)
    with pytest.raises(PatchError, match="No space left"):
        patching.apply(site, series, ["one"])
    monkeypatch.undo()
    assert (texts(site), states(site, series)) == (STOCK, ["not applied", "not applied"])
    patching.apply(site, series, ["one"])
    assert texts(site) == ONE


def test_killed_apply_is_undone_by_the_next_one(site: Path, series: patching.Series, tmp_path: Path) -> None:
    """A real process dies by SIGKILL between two renames."""
    script = (
        "import os, signal\nfrom pathlib import Path\nfrom pdlaunch import patching\nreal = Path.replace\n"
        "def die(self, target):\n"
        "    if Path(target).name == 'extra.py': os.kill(os.getpid(), signal.SIGKILL)\n"
        "    return real(self, target)\n"
        "Path.replace = die\n"
        f"patching.apply(Path({str(site)!r}), patching.load_series(Path({str(series.path)!r})), ['one'])\n"
    )
    died = subprocess.run([sys.executable, "-c", script], cwd=ROOT, timeout=60, check=False)
    assert died.returncode == -9
    assert (texts(site)["engine/core.py"], states(site, series)[0]) == (ONE["engine/core.py"], "unknown")
    with pytest.raises(PatchError, match="an apply was interrupted here"):
        patching.verify(site, series, ["one"])
    patching.revert(site, series, ["one"])
    assert texts(site) == STOCK


def test_lock_is_waited_for_and_then_reported(site: Path, series: patching.Series, monkeypatch: pytest.MonkeyPatch) -> None:
    patching.apply(site, series, ["one"])
    clock = iter(range(0, 1000, 10))
    monkeypatch.setattr(patching.time, "monotonic", lambda: next(clock))
    monkeypatch.setattr(patching.time, "sleep", lambda _: None)
    with (site / patching.STORE / "lock").open("w") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(PatchError, match="held by another process"):
            patching.apply(site, series, ["two"])
    assert texts(site) == ONE


@pytest.mark.parametrize(("version", "state"), [("1.1", "other version"), ("", "not installed")])
def test_other_or_missing_release_is_refused(site: Path, series: patching.Series, version: str, state: str) -> None:
    info = site / "engine-1.0.dist-info/METADATA"
    info.write_text(info.read_text().replace("1.0+cpu", version) if version else "")
    if not version:
        info.unlink()
        info.parent.rmdir()
    assert states(site, series) == [state, state]
    with pytest.raises(PatchError, match=version or "not installed"):
        patching.apply(site, series, ["one"])
    assert texts(site) == STOCK


def test_verify_wants_exactly_these_patches(site: Path, series: patching.Series) -> None:
    assert patching.verify(site, series, []) == {}
    with pytest.raises(PatchError, match="not applied: one"):
        patching.verify(site, series, ["one"])
    patching.apply(site, series, ["one", "two"])
    assert patching.verify(site, series, ["one", "two"]) == {name: sha(text) for name, text in TWO.items()}
    with pytest.raises(PatchError, match="not listed: two"):
        patching.verify(site, series, ["one"])


def test_expected_hashes_are_what_files_hash_to(site: Path, series: patching.Series) -> None:
    for names in ([], ["one"], ["one", "two"]):
        patching.apply(site, series, names)
        observed = {name: sha(texts(site)[name]) if name in texts(site) else "absent" for name in TWO}
        assert patching.expected_hashes(series, names) == observed
    with pytest.raises(PatchError, match=r"one is for engine 1\.0, the run serves with 2\.0"):
        patching.expected_hashes(series, ["one"], {"engine": "2.0"})
    assert patching.expected_hashes(series, [], {"engine": "2.0"}) == {}


def test_expected_hashes_of_the_shipped_series() -> None:
    shipped = patching.load_series(SHIPPED)
    stock = patching.expected_hashes(shipped, [])
    assert stock["nixl_cu13/_api.py"].endswith(" or absent")
    assert not [path for path in stock if path.startswith("torchvision")]
    heads = patching.expected_hashes(shipped, ["vllm-0.31.0-nixl-per-region-kv-heads"])
    changed = {path for path in heads if heads[path] != stock[path]}
    assert {Path(path).name for path in changed} == {
        "base_worker.py",
        "metadata.py",
        "pull_worker.py",
        "region_heads.py",
        "tp_mapping.py",
    }


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"requires": "[]"}, "lists all earlier ones in requires"),
        ({"requires": "[zero]"}, "requires 'zero'"),
        ({"two_before": "a" * 64}, "stacked hashes meet"),
        ({"two_before": "short"}, "two_before|not a legal value"),
    ],
)
def test_a_wrong_series_is_refused_with_its_line(tmp_path: Path, change: dict[str, str], message: str) -> None:
    write(tmp_path, {"one.patch": ONE_DIFF, "two.patch": TWO_DIFF, "series.yaml": series_text(**change)})
    with pytest.raises(PatchError, match=message) as caught:
        patching.load_series(tmp_path / "series.yaml")
    assert "series.yaml:" in str(caught.value)


def test_series_and_patch_file_must_agree(tmp_path: Path) -> None:
    write(tmp_path, {"one.patch": TWO_DIFF, "two.patch": TWO_DIFF, "series.yaml": series_text()})
    with pytest.raises(PatchError, match="list every file of the patch"):
        patching.load_series(tmp_path / "series.yaml")
    (tmp_path / "one.patch").unlink()
    with pytest.raises(PatchError, match=r"one\.patch does not exist"):
        patching.load_series(tmp_path / "series.yaml")
    write(tmp_path, {"one.patch": ONE_DIFF.replace("engine/core.py", "../core.py")})
    bad = series_text().replace("path: engine/core.py, before: " + sha(STOCK["engine/core.py"]), "path: ../core.py, before: " + "a" * 64)
    write(tmp_path, {"series.yaml": bad})
    with pytest.raises(PatchError, match="leaves site-packages"):
        patching.load_series(tmp_path / "series.yaml")


def test_a_diff_is_exact_or_refused(tmp_path: Path) -> None:
    write(tmp_path, {"one.patch": ONE_DIFF})
    hunks = unidiff.read_patch(tmp_path / "one.patch")["engine/core.py"]
    assert unidiff.patched(b"a\nb\nc\nd\n", hunks) == b"a\nB\nc\nd\n"
    assert unidiff.patched(b"a\nB\nc\nd\n", hunks, reverse=True) == b"a\nb\nc\nd\n"
    for shifted in (b"0\na\nb\nc\n", b"a\nb\nC\n", b"a\n", b""):
        with pytest.raises(PatchError, match="not what the patch expects"):
            unidiff.patched(shifted, hunks)


@pytest.mark.parametrize(
    ("old", "new"),
    [("a\nb", "a\nb\n"), ("a\n", "a\nb"), ("", "x\ny\n"), ("one\n\ntwo\n", "one\n\nTWO\n"), ("l\n" * 40, "f\n" + "l\n" * 39 + "e\n")],
)
def test_real_diffs_apply_both_ways(tmp_path: Path, old: str, new: str) -> None:
    write(tmp_path, {"a/f.py": old, "b/f.py": new})
    made = subprocess.run(["diff", "-u", "a/f.py", "b/f.py"], cwd=tmp_path, capture_output=True, timeout=30, check=False)
    (tmp_path / "p.patch").write_bytes(made.stdout)
    hunks = unidiff.read_patch(tmp_path / "p.patch")["f.py"]
    assert unidiff.patched(old.encode(), hunks) == new.encode()
    assert unidiff.patched(new.encode(), hunks, reverse=True) == old.encode()


@pytest.mark.parametrize("text", [ONE_DIFF + "stray\n", ONE_DIFF.replace("-1,3 +1,3", "-1,9 +1,3"), "--- a/f\n+++ b/f\n"])
def test_a_damaged_patch_file_is_refused(tmp_path: Path, text: str) -> None:
    write(tmp_path, {"p.patch": text})
    with pytest.raises(PatchError, match=r"p\.patch:\d+"):
        unidiff.read_patch(tmp_path / "p.patch")


def test_module_command_line(site: Path, series: patching.Series, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--site-packages", str(site), "--series", str(series.path)]
    for verb in ("apply", "revert"):
        assert patching.main([verb, *options]) == 2
        assert "no patch is named" in capsys.readouterr().err
    assert patching.main(["status", "two", *options]) == 0
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["two"]
    assert patching.main(["status", "three", *options]) == 2
    assert "unknown patch 'three'" in capsys.readouterr().err
    assert patching.main(["apply", "one", "--dry-run", *options]) == 0
    assert "would change engine/core.py" in capsys.readouterr().out
    assert patching.main(["revert", "one", "--dry-run", *options]) == 0
    assert capsys.readouterr().out == "nothing to change: one is not applied\n"
    assert patching.main(["apply", "one", *options]) == 0
    assert capsys.readouterr().out.startswith("changed engine/core.py\n")
    assert patching.main(["apply", "one", *options]) == 0
    assert capsys.readouterr().out == "nothing to change: one is applied\n"
    assert patching.main(["verify", "one", *options]) == 0
    assert sha(ONE["engine/core.py"]) in capsys.readouterr().out
    assert patching.main(["verify", "two", *options]) == 2
    assert "requires one" in capsys.readouterr().err
    write(site, {"engine/core.py": "edited\n"})
    assert patching.main(["status", *options]) == 1
    assert patching.main(["revert", "one", *options]) == 2


def test_files_of_the_containerfile_are_enough_to_patch(tmp_path: Path, site: Path) -> None:
    copied = re.findall(r"^COPY (.*) /opt/pdlaunch/(\S+)/$", (ROOT / "patches" / "Containerfile").read_text(encoding="utf-8"), re.MULTILINE)
    assert {folder for _, folder in copied} == {"pdlaunch", "patches"}
    for patterns, folder in copied:
        (tmp_path / "image" / folder).mkdir(parents=True)
        for path in (p for pattern in patterns.split() for p in ROOT.glob(pattern)):
            shutil.copyfile(path, tmp_path / "image" / folder / path.name)
    command = [sys.executable, "-m", "pdlaunch.patching", "status", "--site-packages", str(site)]
    done = subprocess.run(command, cwd=tmp_path / "image", capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    assert "vllm-0.31.0-nixl-per-region-kv-heads" in done.stdout


def test_read_only_folder_is_a_message(site: Path, series: patching.Series, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "mkdir", refuse)
    with pytest.raises(PatchError, match="cannot be written"):
        patching.apply(site, series, ["one"])
    assert states(site, series) == ["not applied", "not applied"]


def test_python_of_an_environment_gives_its_site_packages(tmp_path: Path) -> None:
    (tmp_path / "lib/python3.11/site-packages").mkdir(parents=True)
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    assert patching.site_packages_of(python) == tmp_path / "lib/python3.11/site-packages"
    (tmp_path / "lib/python3.12/site-packages").mkdir(parents=True)
    with pytest.raises(PatchError, match="2 lib/python3"):
        patching.site_packages_of(python)


def test_a_wrong_python_is_named_as_it_was_given(tmp_path: Path) -> None:
    (tmp_path / "python").touch()
    for given, said in (("nope", "does not exist"), ("", "is a folder"), ("python", "is not the Python of a virtual environment")):
        with pytest.raises(PatchError) as caught:
            patching.site_packages_of(tmp_path / given)
        assert f"{tmp_path / given} {said}" in caught.value.what
        assert caught.value.hint
