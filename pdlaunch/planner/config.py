"""Read a HF config.json: find it, take the language part, and answer questions about its fields with errors that name the field."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pdlaunch.errors import PlanError, Where

_TEXT_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


class Fields:
    """The language part of a HF config, with typed access.

    Missing fields fall back to the outer config and then to the default; without a default a PlanError names the field, the
    architecture and the file.
    """

    def __init__(self, config: Mapping[str, Any], source: str = "config.json") -> None:
        self.outer = config
        self.source = source
        text: Mapping[str, Any] = config
        for part in _TEXT_PARTS:
            inner = text.get(part)
            if isinstance(inner, Mapping):
                text = inner
        self.text = text

    @property
    def architecture(self) -> str:
        names = self.outer.get("architectures")
        if not isinstance(names, Sequence) or isinstance(names, str) or not names:
            raise self.error("architectures", "is missing or empty", "vLLM chooses the model class by architectures[0]")
        return str(names[0])

    def error(self, key: str, problem: str, rule: str, hint: str = "") -> PlanError:
        return PlanError(f"{key} {problem}", where=Where(Path(self.source), None, key), rule=rule, hint=hint)

    def has(self, key: str) -> bool:
        return self.get(key) is not None

    def get(self, key: str, default: Any = None) -> Any:
        value = self.text.get(key)
        if value is None:
            value = self.outer.get(key)
        return default if value is None else value

    def integer(self, *keys: str, default: int | None = None, minimum: int = 1) -> int:
        """First of keys that is present. PlanError if none is and there is no default, or if it is not an integer >= minimum."""
        for key in keys:
            value = self.get(key)
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.error(key, f"is {value!r}", "must be an integer")
            if value < minimum:
                raise self.error(key, f"is {value}", f"must be at least {minimum}")
            return value
        if default is None:
            raise self.error(keys[0], "is missing", f"{self.outer.get('architectures')} cannot be priced without it")
        return default

    def optional_integer(self, key: str) -> int | None:
        return self.integer(key) if self.has(key) else None

    def strings(self, key: str, length: int) -> list[str] | None:
        """A list of strings of the given length, or None when the field is absent."""
        value = self.get(key)
        if value is None:
            return None
        if not isinstance(value, Sequence) or isinstance(value, str):
            raise self.error(key, f"is {value!r}", "must be a list with one entry per layer")
        if len(value) != length:
            raise self.error(key, f"has {len(value)} entries", f"num_hidden_layers is {length}: one entry per layer")
        return [str(item) for item in value]

    def dtype(self) -> str:
        """dtype of activations when the engine's dtype is auto: ModelConfig's rule (float32 weights are served in float16/bfloat16)."""
        value = self.get("dtype") or self.get("torch_dtype") or "float32"
        name = str(value).removeprefix("torch.")
        if name not in ("float16", "bfloat16", "float32"):
            raise self.error("dtype", f"is {value!r}", "must be float16, bfloat16 or float32")
        return name


def load_config(path: Path) -> dict[str, Any]:
    """Read config.json from a file or a model folder. PlanError with the path and the JSON position when it cannot be read."""
    file = path / "config.json" if path.is_dir() else path
    where = Where(file)
    if not file.is_file():
        raise PlanError("no such HF config", where=where, rule="give a config.json or a folder that contains one")
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise PlanError(f"not JSON: {error.msg}", where=Where(file, error.lineno)) from error
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"cannot be read: {error}", where=where, rule="a HF config is a JSON object in UTF-8") from None
    if not isinstance(config, dict):
        raise PlanError(f"is a {type(config).__name__}", where=where, rule="a HF config is a JSON object")
    return config
