"""Paths that a step in the container needs: at the same place on both sides, or refused before anything is written."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from pdlaunch import cluster, mounts, preflight, session
from pdlaunch.errors import RecipeError
from tests.golden_cases import ROOT
from tests.test_bundle import make

SITE = cluster.load(ROOT / "clusters" / "example.yaml")


@pytest.mark.parametrize(
    ("words", "path", "said"),
    [
        (("/a:/a",), "/a/b", ""),
        (("/a",), "/a/b", ""),
        (("/a:/a,/c:/c:ro+rprivate",), "/c", ""),
        (("/a:/a",), "/ab", "/ab is below none"),
        (("/a:/a",), "/a/../b", "is below none"),
        (("/a:/b",), "/a/x", "is below none"),
        (("/a:/b",), "/b/x", "/b/x is /a/x of the node"),
        (("/a:/a", "/other:/a/b"), "/a/b/x", "/a/b/x is /other/x of the node"),
        ((), "/a", "is below none"),
        (("/:/",), "/a", ""),
    ],
)
def test_where_the_container_sees_a_path(words: tuple[str, ...], path: str, said: str) -> None:
    found = mounts.fault(mounts.parse(words), path)
    assert said in found
    assert bool(found) == bool(said)


def with_mounts(*words: str, args: tuple[str, ...] = (), **changes: object) -> dict[str, object]:
    assert SITE.container is not None
    return {"container": dataclasses.replace(SITE.container, mounts=words, args=args), **changes}


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("/scratch:/scratch",), "the model: /models/gemma-4-31B-it is below none"),
        (("/models:/models",), "results_dir: /shared/results is below none"),
        (("/models:/models", "/lustre:/shared"), "results_dir: /shared/results is /lustre/results of the node"),
        (("/models:/models", "/shared:/shared:ro"), "results_dir: /shared/results is mounted read-only"),
    ],
)
def test_model_and_results_must_be_mounted(words: tuple[str, ...], said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        preflight.check_job(make("example", "gemma4-p4d8", **with_mounts(*words)))


def test_the_shipped_example_and_mounts_in_args_are_enough() -> None:
    preflight.check_job(make("example", "gemma4-p4d8"))
    preflight.check_job(make("example", "gemma4-p4d8", **with_mounts("/models:/models", args=("--container-mounts=/shared:/shared",))))
    assert mounts.check(make("example-venv", "gemma4-p4d8")) == "no container"


def test_a_bundle_outside_is_a_warning_of_check_and_an_error_of_render(tmp_path: Path) -> None:
    outside = make("example", "gemma4-p4d8", root=tmp_path)
    rows = {row["check"]: row for row in session.check_rows(outside)}
    assert rows["bundle folder"]["result"] == "warning"
    with pytest.raises(RecipeError, match=r"the bundle: .* is below none of the mounted folders"):
        session.render(outside, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
    inside = make("example", "gemma4-p4d8", root=tmp_path, **with_mounts("/models:/models", "/shared:/shared", f"{tmp_path}:{tmp_path}"))
    assert "bundle folder" not in {row["check"] for row in session.check_rows(inside)}
    assert (session.render(inside, tmp_path / "out") / "job.sbatch").is_file()


def test_a_link_is_followed_as_the_node_does(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    link = str(tmp_path / "link")
    with pytest.raises(RecipeError, match="real/out is below none"):
        session.render(make("example", "gemma4-p4d8", **with_mounts("/models", "/shared", link)), tmp_path / "link" / "out")
