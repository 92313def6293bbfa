"""Writes docs/recipe-reference.md from the field docstrings of pdlaunch/recipe.py and pdlaunch/cluster.py.

.envs/launcher/bin/python tools/make_reference.py
"""

from __future__ import annotations

import ast
import dataclasses
import sys
import typing
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
OUT = ROOT / "docs" / "recipe-reference.md"


def field_docs(source: str) -> dict[str, dict[str, str]]:
    """Class -> field -> the docstring that follows the field."""
    docs: dict[str, dict[str, str]] = {}
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        for field, text in zip(node.body, node.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name) and isinstance(text, ast.Expr):
                value = text.value
                if isinstance(value, ast.Constant) and isinstance(value.value, str):
                    docs.setdefault(node.name, {})[field.target.id] = " ".join(value.value.split())
    return docs


def type_text(hint: Any) -> str:
    """A type as a person writes its value."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        return " or ".join(f"`{a}`" for a in args)
    if origin is tuple:
        return f"list of {type_text(args[0])}"
    if origin is dict:
        return f"mapping to {type_text(args[1])}"
    if type(None) in args:
        return type_text(next(a for a in args if a is not type(None)))
    if dataclasses.is_dataclass(hint):
        return f"[{hint.__name__}](#{hint.__name__.lower()})"  # type: ignore[union-attr]
    return {int: "whole number", float: "number", str: "text", bool: "true or false", Any: "any value"}[hint]


def rule_text(field: dataclasses.Field[Any]) -> str:
    parts = []
    for name, word in (("minimum", "at least"), ("maximum", "at most")):
        if field.metadata.get(name) is not None:
            parts.append(f"{word} {field.metadata[name]:g}")
    return ", ".join(parts)


def default_text(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
        return "**needed**"
    if field.default_factory is not dataclasses.MISSING:
        return ""
    if field.default in (None, "", ()):
        return ""
    if isinstance(field.default, tuple):
        return f"`[{', '.join(field.default)}]`"
    return f"`{str(field.default).lower() if isinstance(field.default, bool) else field.default}`"


def sections(root: type, docs: dict[str, dict[str, str]], seen: set[type]) -> list[str]:
    """Tables of a dataclass and of those that its fields hold, depth first."""
    from pdlaunch.yamlfile import written_fields

    seen.add(root)
    hints = typing.get_type_hints(root)
    lines = [
        f"## {root.__name__}",
        "",
        " ".join((root.__doc__ or "").split()),
        "",
        "| key | value | default | meaning |",
        "|---|---|---|---|",
    ]
    inner: list[type] = []
    for name, field in written_fields(root).items():
        text = docs.get(root.__name__, {}).get(name)
        if not text:
            raise SystemExit(f"{root.__name__}.{name} has no docstring")
        value = type_text(hints[name])
        rule = rule_text(field)
        cells = [f"`{name}`", value + (f", {rule}" if rule else ""), default_text(field), text]
        lines.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
        inner += [t for t in _dataclasses_in(hints[name]) if t not in seen and t not in inner]
    lines.append("")
    for t in inner:
        if t not in seen:
            lines += sections(t, docs, seen)
    return lines


def _dataclasses_in(hint: Any) -> list[type]:
    if dataclasses.is_dataclass(hint):
        return [typing.cast(type, hint)]
    return [t for a in typing.get_args(hint) for t in _dataclasses_in(a)]


def reference() -> str:
    from pdlaunch import cluster, recipe

    docs = {}
    for module in (recipe, cluster):
        docs |= field_docs(Path(str(module.__file__)).read_text(encoding="utf-8"))
    lines = [
        "# Keys of recipes and cluster files",
        "",
        "Made by `tools/make_reference.py` from the docstrings of pdlaunch/recipe.py and pdlaunch/cluster.py; do not edit.",
        "Unknown keys are errors. `--set key=value` overrides a key of the recipe, and `--set cluster.key=value` one of the cluster file;",
        "items of a list have their index as key, as in `--set load.0.requests=40`.",
        "",
        "# Recipe: recipes/NAME.yaml",
        "",
    ]
    seen: set[type] = set()
    lines += sections(recipe.Recipe, docs, seen)
    lines += ["# Cluster: clusters/NAME.yaml", ""]
    lines += sections(cluster.Cluster, docs, seen)
    return "\n".join(lines)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text(reference(), encoding="utf-8")
    print(OUT)
