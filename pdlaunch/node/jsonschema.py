"""The part of JSON Schema that the behaviour checks use: type, enum, const, properties, required, additionalProperties, items, limits.

A keyword outside this part is a ValueError, never silently ignored.
"""

from __future__ import annotations

import re
from typing import Any

_KNOWN = {"type", "enum", "const", "properties", "required", "additionalProperties", "items", "minItems", "maxItems", "minimum", "maximum",
          "minLength", "maxLength", "pattern", "description", "title"}
_TYPES: dict[str, type | tuple[type, ...]] = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float),
                                              "boolean": bool, "null": type(None)}


def violations(value: Any, schema: dict[str, Any], path: str = "$") -> list[str]:
    """What is wrong with value, each with its path; empty when it follows the schema."""
    unknown = sorted(set(schema) - _KNOWN)
    if unknown:
        raise ValueError(f"{path}: schema keywords {unknown} are not supported")
    kind = schema.get("type")
    if kind is not None and not _is(value, kind):
        return [f"{path}: {value!r} is not of type {kind}"]
    found = []
    if "enum" in schema and value not in schema["enum"]:
        found.append(f"{path}: {value!r} is not one of {schema['enum']}")
    if "const" in schema and value != schema["const"]:
        found.append(f"{path}: {value!r} is not {schema['const']!r}")
    if isinstance(value, dict):
        found += _object(value, schema, path)
    elif isinstance(value, list):
        found += _limits(len(value), schema, ("minItems", "maxItems"), f"{path}: number of items")
        for index, item in enumerate(value):
            found += violations(item, schema.get("items", {}), f"{path}[{index}]")
    elif isinstance(value, str):
        found += _limits(len(value), schema, ("minLength", "maxLength"), f"{path}: length")
        if "pattern" in schema and not re.search(schema["pattern"], value):
            found.append(f"{path}: {value!r} does not match {schema['pattern']}")
    elif isinstance(value, int | float) and not isinstance(value, bool):
        found += _limits(value, schema, ("minimum", "maximum"), path)
    return found


def _object(value: dict[str, Any], schema: dict[str, Any], path: str) -> list[str]:
    properties = schema.get("properties", {})
    found = [f"{path}.{key}: missing" for key in schema.get("required", ()) if key not in value]
    for key, item in value.items():
        if key in properties:
            found += violations(item, properties[key], f"{path}.{key}")
        elif schema.get("additionalProperties") is False:
            found.append(f"{path}.{key}: not allowed")
    return found


def _limits(number: float, schema: dict[str, Any], names: tuple[str, str], what: str) -> list[str]:
    low, high = schema.get(names[0]), schema.get(names[1])
    found = [] if low is None or number >= low else [f"{what} {number} is below {low}"]
    return found if high is None or number <= high else [*found, f"{what} {number} is above {high}"]


def _is(value: Any, kind: str) -> bool:
    if kind not in _TYPES:
        raise ValueError(f"schema type {kind!r} is not supported")
    return isinstance(value, _TYPES[kind]) and not (isinstance(value, bool) and kind != "boolean")
