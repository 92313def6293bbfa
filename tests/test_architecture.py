"""Borders of the packages: node/ needs nothing but the standard library, nothing imports upwards, and there is no cycle."""

from __future__ import annotations

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

from tests.envs import ROOT

PACKAGE = ROOT / "pdlaunch"
NODE = sorted((PACKAGE / "node").glob("*.py"))
LAYERS = (
    ("pdlaunch.errors", "pdlaunch.node", "pdlaunch.unidiff", "pdlaunch.stats", "pdlaunch.manifest"),
    ("pdlaunch.nosecrets", "pdlaunch.yamlfile", "pdlaunch.patchseries", "pdlaunch.patching", "pdlaunch.geometry"),
    ("pdlaunch.recipe", "pdlaunch.cluster", "pdlaunch.recipe_rules", "pdlaunch.flags"),
    ("pdlaunch.planner", "pdlaunch.placement", "pdlaunch.engine", "pdlaunch.modelcheck"),
    ("pdlaunch.job", "pdlaunch.bundle", "pdlaunch.mounts", "pdlaunch.preflight", "pdlaunch.vcs"),
    ("pdlaunch.slurm", "pdlaunch.local", "pdlaunch.archive", "pdlaunch.doctor", "pdlaunch.console"),
    ("pdlaunch.runs", "pdlaunch.compare", "pdlaunch.report", "pdlaunch.exchange", "pdlaunch.utilisation", "pdlaunch.pareto"),
    ("pdlaunch.session", "pdlaunch.verb_plan", "pdlaunch.verb_results"),
)
"""A module may import those of its own line and of the lines above it."""


def imports(path: Path, everywhere: bool = True) -> set[tuple[int, str]]:
    """(level, module) of the imports of a file; everywhere: those inside functions too."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    nodes = list(ast.walk(tree)) if everywhere else tree.body
    found: set[tuple[int, str]] = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            found |= {(0, alias.name) for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found |= {(node.level, node.module)} if node.module else {(node.level, alias.name) for alias in node.names}
            if node.level == 0 and node.module:
                found |= {(0, f"{node.module}.{alias.name}") for alias in node.names}
    return found


def name_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


def layer(module: str) -> int | None:
    return next((i for i, names in enumerate(LAYERS) if any(module == n or module.startswith(n + ".") for n in names)), None)


@pytest.mark.parametrize("path", NODE, ids=lambda p: p.stem)
def test_the_node_runtime_needs_only_the_standard_library(path: Path) -> None:
    absolute = {module.split(".")[0] for level, module in imports(path) if level == 0}
    assert absolute <= set(sys.stdlib_module_names)
    assert all(level <= 1 for level, _ in imports(path))


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=name_of)
def test_nothing_imports_upwards(path: Path) -> None:
    own = layer(name_of(path))
    if own is None:
        return
    above = {module for level, module in imports(path, everywhere=False) if level == 0 and (layer(module) or 0) > own}
    assert above == set()


def test_every_layer_names_modules_that_exist() -> None:
    missing = [n for names in LAYERS for n in names
               if not (ROOT / n.replace(".", "/")).is_dir() and not (ROOT / (n.replace(".", "/") + ".py")).is_file()]
    assert missing == []


def test_there_is_no_import_cycle() -> None:
    modules = {name_of(p): p for p in PACKAGE.rglob("*.py")}
    graph = {}
    for name, path in modules.items():
        package = name if path.name == "__init__.py" else name.rpartition(".")[0]
        targets = {f"{package}.{m}" if level else m for level, m in imports(path, everywhere=False)}
        graph[name] = {t for t in targets if t in modules and t != name}
    TopologicalSorter(graph).prepare()
