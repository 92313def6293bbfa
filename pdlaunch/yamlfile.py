"""Strict YAML with line numbers, bound to frozen dataclasses: every refusal names file:line, dotted key, value, rule and next step."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

import yaml

from pdlaunch.errors import RecipeError, Where

KeyPath = tuple[str | int, ...]
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_PLAIN_TAGS = ("tag:yaml.org,2002:map", "tag:yaml.org,2002:seq")
_DECIMAL = re.compile(r"[-+]?(0|[1-9][0-9_]*)(\.[0-9]*)?([eE][-+]?[0-9]+)?|[-+]?\.[0-9]+([eE][-+]?[0-9]+)?")
LARGEST = 2**53
"""The largest whole number that every reader of JSON takes exactly."""
_SCALARS = {int: "a whole number", float: "a number", str: "a text", bool: "true or false"}


def dotted(path: KeyPath) -> str:
    text = ""
    for part in path:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text


@dataclass(frozen=True)
class Document:
    """The values of one file, the line of each key, and the overrides of the command line that were laid over it."""

    path: Path
    data: dict[str, Any]
    lines: dict[KeyPath, int]
    overrides: dict[str, str] = field(default_factory=dict)
    """Dotted key -> value as written on the command line."""
    prefix: str = ""
    """What the command line writes before a key of this file, as in --set cluster.key=value."""

    def where(self, key: KeyPath | str) -> Where:
        """The place of a key, or of the nearest enclosing key that the file has; an override is its own place."""
        path: KeyPath = tuple(key.split(".")) if isinstance(key, str) else key
        name = dotted(path)
        for part in [name, *(dotted(path[:n]) for n in range(len(path) - 1, 0, -1))]:
            if part in self.overrides:
                from pdlaunch import nosecrets  # not at the top: images are patched with this module, without pdlaunch/node

                return Where(key="--set " + nosecrets.shown(f"{self.prefix}{part}={self.overrides[part]}"))
        line = next((self.lines[path[:n]] for n in range(len(path), 0, -1) if path[:n] in self.lines), 1)
        return Where(self.path, line, name or None)


def nearest(word: str, legal: typing.Iterable[str]) -> str:
    """' Did you mean X?' for the closest legal word, or an empty text."""
    import difflib

    close = difflib.get_close_matches(word, list(legal), n=1, cutoff=0.6)
    return f"did you mean {close[0]!r}?" if close else ""


def read(path: Path) -> Document:
    """Parse one file; RecipeError on a missing file, YAML syntax, duplicate keys, aliases of mappings and keys that are no text."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RecipeError("the file does not exist", where=Where(path), hint="list the names with: launch.py list") from None
    except (OSError, UnicodeDecodeError) as e:
        raise RecipeError(f"the file cannot be read: {e}", where=Where(path), rule="UTF-8 text") from None
    loader = _Loader(text)
    try:
        root = loader.get_single_node()
        lines: dict[KeyPath, int] = {}
        _no_aliases(root, path)
        data = None if root is None else _plain(loader, root, (), lines, path)
    except RecursionError:
        raise RecipeError("nested too deeply", where=Where(path), rule="one YAML document") from None
    except yaml.MarkedYAMLError as e:
        line = e.problem_mark.line + 1 if e.problem_mark else None
        raise RecipeError(f"not YAML: {e.problem or e.context}", where=Where(path, line), rule="one YAML document") from None
    except yaml.YAMLError as e:
        raise RecipeError(f"not YAML: {e}", where=Where(path), rule="one YAML document") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise RecipeError(f"expected keys and values, found {'nothing' if data is None else type(data).__name__}", where=Where(path, 1))
    return Document(path, data, lines)


def _no_aliases(root: yaml.Node | None, file: Path) -> None:
    """Lists and mappings that are there twice: one in itself never ends, and ten of ten of ten fill the memory."""
    seen: set[int] = set()
    waiting = [] if root is None else [root]
    while waiting:
        node = waiting.pop()
        if isinstance(node, yaml.ScalarNode):
            continue
        if id(node) in seen:
            raise RecipeError("an alias of a list or mapping", where=Where(file, node.start_mark.line + 1), rule="each value written out")
        seen.add(id(node))
        inner = [part for pair in node.value for part in pair] if isinstance(node, yaml.MappingNode) else node.value
        waiting.extend(inner)


def _plain(loader: Any, node: yaml.Node, path: KeyPath, lines: dict[KeyPath, int], file: Path) -> Any:
    if not isinstance(node, yaml.ScalarNode) and node.tag not in _PLAIN_TAGS:
        line = node.start_mark.line + 1
        raise RecipeError(
            f"the YAML tag {node.tag!r}", where=Where(file, line, dotted(path) or None), rule="plain mappings and lists, no tags"
        )
    if isinstance(node, yaml.MappingNode):
        out: dict[str, Any] = {}
        for key_node, value_node in node.value:
            line = key_node.start_mark.line + 1
            # A key is a name even where YAML 1.1 would read it as a boolean or a number (on, no, 8).
            key = str(key_node.value) if isinstance(key_node, yaml.ScalarNode) else None
            if key is None or key == "<<":
                raise RecipeError("a key must be a plain text", where=Where(file, line, dotted(path) or None))
            if key in out:
                first = lines[(*path, key)]
                raise RecipeError(
                    f"the key {key!r} is there twice",
                    where=Where(file, line, dotted((*path, key))),
                    rule="each key once",
                    hint=f"remove one of them; the first is on line {first}",
                )
            lines[(*path, key)] = line
            out[key] = _plain(loader, value_node, (*path, key), lines, file)
        return out
    if isinstance(node, yaml.SequenceNode):
        items = []
        for i, item in enumerate(node.value):
            lines[(*path, i)] = item.start_mark.line + 1
            items.append(_plain(loader, item, (*path, i), lines, file))
        return items
    where = Where(file, node.start_mark.line + 1, dotted(path) or None)
    try:
        value = loader.construct_object(node)
    except ValueError as e:  # 2026-02-30, or more digits than Python reads
        raise RecipeError(f"{node.value[:40]!r} cannot be read: {e}", where=where, rule="YAML", hint="a text stands in quotes") from None
    return _number(value, str(node.value), where)


def _number(value: Any, text: str, where: Where) -> Any:
    """YAML 1.1 reads 010 as eight and 1:00:00 as 3600, and knows .nan: a person who writes that means something else."""
    if isinstance(value, int | float) and not isinstance(value, bool) and not _DECIMAL.fullmatch(text):
        raise RecipeError(f"the number {text} would be read as {value!r}", where=where, rule="a plain decimal number")
    return value


def override(document: Document, settings: typing.Iterable[str], prefix: str = "") -> Document:
    """The document with each key=value laid over it; the value is read as YAML, so numbers, lists and {a: b} work.

    A key of a list is its index: load.0.requests=4. @FILE lays every value of a YAML file over it, as `plan --patch FILE` writes one.
    RecipeError names the override. A secret in the file or in a setting is refused first: no later message can repeat it.
    """
    import copy

    from pdlaunch import nosecrets

    if (found := nosecrets.secret_at(document.data)) is not None:
        raise nosecrets.refusal(document.where(found))
    data, recorded = copy.deepcopy(document.data), dict(document.overrides)
    for setting in (one for given in settings for one in (_of_file(Path(given[1:])) if given.startswith("@") else [given])):
        key, equals, text = setting.partition("=")
        shown = f"--set {prefix}{nosecrets.shown(setting)}"
        if not (equals and key.strip() and text.strip()):
            missing = "no equals sign" if not equals else "no key" if not key.strip() else "no value"
            raise RecipeError(f"{shown}: {missing}", rule="--set key=value, as in --set engines.decode.tensor_parallel=2")
        parts = key.strip().split(".")
        value, path = _value(text, shown), tuple(int(p) if p.isdigit() else p for p in parts)
        if (found := nosecrets.secret_at(value, path)) is not None:
            raise nosecrets.refusal(Where(key=f"--set {prefix}{nosecrets.redactor().text(dotted(found))}"))
        _lay(data, parts, value, shown)
        recorded[dotted(path)] = text
    return Document(document.path, data, document.lines, recorded, prefix)


def _value(text: str, shown: str) -> Any:
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        _no_aliases(node, Path())
        return None if node is None else _plain(loader, node, (), {}, Path())
    except RecursionError:
        raise RecipeError(f"{shown[:80]}: nested too deeply", rule="--set key=value") from None
    except RecipeError as e:
        raise RecipeError(f"{shown}: {e.what}", rule=e.rule, hint=e.hint) from None
    except yaml.YAMLError as e:
        why = getattr(e, "problem", None) or getattr(e, "context", None) or "not readable"
        raise RecipeError(f"{shown}: the value is not YAML ({why})", rule="--set key=value") from None
    finally:
        loader.dispose()


def _of_file(path: Path) -> list[str]:
    """The values of a YAML file as settings; mappings are descended into, lists are values."""

    def leaves(value: Any, parts: list[str]) -> typing.Iterator[str]:
        if isinstance(value, dict) and value:
            for key, inner in value.items():
                yield from leaves(inner, [*parts, key])
        else:
            yield f"{'.'.join(parts)}={json.dumps(value)}"

    return list(leaves(read(path).data, []))


def _lay(data: Any, parts: list[str], value: Any, shown: str) -> None:
    here = data
    for i, part in enumerate(parts):
        last = i == len(parts) - 1
        if isinstance(here, list):
            if not part.isdigit() or int(part) >= len(here):
                raise RecipeError(f"{shown}: {'.'.join(parts[:i])} is a list of {len(here)}", rule=f"its keys are 0 to {len(here) - 1}")
            if last:
                here[int(part)] = value
            else:
                here = here[int(part)]
        elif isinstance(here, dict):
            if last:
                here[part] = value
            else:
                here = here.setdefault(part, {})
        else:
            raise RecipeError(f"{shown}: {'.'.join(parts[:i])} is {here!r} and has no keys")


T = TypeVar("T")


def key(default: Any = dataclasses.MISSING, *, minimum: float | None = None, maximum: float | None = None, pattern: str = "") -> Any:
    """A dataclass field with a rule: minimum and maximum are inclusive, pattern is a regular expression for the whole text."""
    metadata = {"minimum": minimum, "maximum": maximum, "pattern": pattern}
    if default is dataclasses.MISSING:
        return field(metadata=metadata)
    if isinstance(default, dict):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def written_fields(cls: type) -> dict[str, dataclasses.Field[Any]]:
    """The fields that a person may write; those with metadata written=False are filled by the loader."""
    return {f.name: f for f in dataclasses.fields(cls) if f.metadata.get("written", True)}


def bind(cls: type[T], document: Document, value: Any = None, path: KeyPath = ()) -> T:
    """The dataclass that the document describes; RecipeError on unknown keys, missing keys, wrong types and broken field rules."""
    value = document.data if not path else value
    if not isinstance(value, dict):
        raise RecipeError(
            f"expected keys and values, found {value!r}", where=document.where(path), rule=f"keys: {', '.join(written_fields(cls))}"
        )
    hints, fields = _hints(cls), written_fields(cls)
    for name in value:
        if name not in fields:
            raise RecipeError(
                f"unknown key {name!r} (value {value[name]!r})",
                where=document.where((*path, name)),
                rule=f"keys here: {', '.join(fields)}",
                hint=nearest(name, fields) or "remove it",
            )
    values: dict[str, Any] = {}
    for name, f in fields.items():
        if name in value:
            values[name] = _bound(hints[name], document, value[name], (*path, name))
            _check_rule(f, values[name], document, (*path, name))
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise RecipeError(
                f"the key {name!r} is missing",
                where=document.where(path),
                rule=f"needed: {', '.join(_needed(fields))}",
                hint=f"add it; docs/recipe-reference.md describes {cls.__name__}.{name}",
            )
    return cls(**values)


_HINTS: dict[type, dict[str, Any]] = {}


def _hints(cls: type) -> dict[str, Any]:
    if cls not in _HINTS:
        _HINTS[cls] = typing.get_type_hints(cls)
    return _HINTS[cls]


def _needed(fields: dict[str, dataclasses.Field[Any]]) -> list[str]:
    return [n for n, f in fields.items() if f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING]


def _bound(hint: Any, document: Document, value: Any, path: KeyPath) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [a for a in args if a is not type(None)]
        return _bound(inner, document, value, path)
    if origin is Literal:
        if value not in args:
            raise RecipeError(
                f"{value!r} is not a legal value",
                where=document.where(path),
                rule=f"one of {', '.join(map(str, args))}",
                hint=nearest(str(value), map(str, args)) or "write one of them",
            )
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise RecipeError(f"expected a list, found {value!r}", where=document.where(path), rule="a YAML list: [a, b]")
        return tuple(_bound(args[0], document, v, (*path, i)) for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise RecipeError(f"expected keys and values, found {value!r}", where=document.where(path), rule="a YAML mapping: {a: b}")
        return {str(k): _bound(args[1], document, v, (*path, k)) for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return bind(typing.cast(type, hint), document, value, path)
    return _scalar(hint, document, value, path)


def _scalar(hint: Any, document: Document, value: Any, path: KeyPath) -> Any:
    if hint is Any:
        return value
    if isinstance(value, int) and abs(value) > LARGEST:
        raise RecipeError(f"{str(value)[:40]} is too large", where=document.where(path), rule=f"at most {LARGEST}")
    if isinstance(value, str) and (bad := next((c for c in value if ord(c) < 32 and c not in "\n\t"), None)):
        raise RecipeError(f"the character {bad!r} in {value!r}", where=document.where(path), rule="text without control characters")
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        hint_text = f'write it in quotes: "{value}"' if hint is str and isinstance(value, int | float) else ""
        raise RecipeError(f"expected {_SCALARS[hint]}, found {value!r}", where=document.where(path), rule=_SCALARS[hint], hint=hint_text)
    return value


def _check_rule(f: dataclasses.Field[Any], value: Any, document: Document, path: KeyPath) -> None:
    minimum, maximum, pattern = (f.metadata.get(k) for k in ("minimum", "maximum", "pattern"))
    if isinstance(value, int | float) and not isinstance(value, bool):
        if minimum is not None and value < minimum:
            raise RecipeError(f"{value!r} is too small", where=document.where(path), rule=f"at least {minimum:g}")
        if maximum is not None and value > maximum:
            raise RecipeError(f"{value!r} is too large", where=document.where(path), rule=f"at most {maximum:g}")
    if pattern and isinstance(value, str) and not re.fullmatch(pattern, value):
        raise RecipeError(f"{value!r} is not a legal value", where=document.where(path), rule=f"must match {pattern}")
