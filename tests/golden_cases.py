"""Which recipe is rendered for which cluster in tests/golden/: with fixed paths and a fixed time, so that every checkout gives the same."""

from __future__ import annotations

import json
from pathlib import Path

from pdlaunch import bundle, cluster, job, recipe
from pdlaunch.node.spec import to_json

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"
SHOWN_ROOT = Path("/opt/pdlaunch")

RECIPES = sorted(path.stem for path in (ROOT / "recipes").glob("*.yaml"))
CASES = [
    *((name, site) for name in RECIPES if name.startswith(("tiny-", "mocker-")) for site in ("local", "local-slurm")),
    *((name, "example") for name in RECIPES if name.startswith("gemma4-")),
    ("gemma4-p4d8", "example-venv"),
    *((name, "local-gpu") for name in RECIPES if name.startswith("gpu-")),
    ("tests/data/recipes/span-tp16.yaml", "example"),
]
"""Every shipped recipe on the clusters that it is for."""


def folder_of(name: str, site: str) -> Path:
    return GOLDEN / f"{Path(name).stem}@{site}"


def build(name: str, site: str, settings: tuple[str, ...] = ()) -> job.Job:
    path = ROOT / name if name.endswith(".yaml") else recipe.find(name, ROOT / "recipes", "recipe")
    context = job.Context(SHOWN_ROOT, "2026-01-02T03:04:05Z", git_commit="0" * 40, files=ROOT)
    return job.build(recipe.load(path, settings), cluster.load(ROOT / "clusters" / f"{site}.yaml"), context)


def files_of(name: str, site: str) -> dict[str, str]:
    """File name -> text of the rendered files that are compared whole."""
    built = build(name, site)
    final = SHOWN_ROOT / "bundles" / Path(name).stem
    spec = json.dumps(to_json(built.spec), indent=1, ensure_ascii=False).replace(str(ROOT / "tests"), str(SHOWN_ROOT / "tests"))
    return {"spec.json": spec + "\n", **{n: t.replace(str(ROOT), str(SHOWN_ROOT)) for n, t in bundle.scripts(built, final).items()}}
