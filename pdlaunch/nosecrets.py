"""Secrets in what a person writes: refused before anything else is said about it, because recipes and cluster files are archived with
every run. No message repeats what was found."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from typing import Any

from pdlaunch.errors import RecipeError, Where
from pdlaunch.node.redact import REDACTED, Redactor
from pdlaunch.node.spec import Spec

KeyPath = tuple[str | int, ...]
_VARIABLE = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "CREDENTIAL")
_ENVIRONMENTS = ("env", "engine_env")
_NAMED = re.compile(r"--([A-Za-z][\w-]*)|([A-Za-z_]\w*)[\"']?\s*[:=]")
"""Names that a value may stand behind: --flag, NAME=, NAME: and "NAME":."""

_HARMLESS = re.compile(r"-?[\d.]+|--[\w.-]+(=-?[\d.]+)?")
"""Words that Redactor.argv hides only because of the flag before them: a number, as behind --dbo-decode-token-threshold, or a flag."""


def redactor() -> Redactor:
    return Redactor(Spec.redact_keys, os.environ)


def is_secret_variable(name: str) -> bool:
    """Broader than Redactor.is_secret: the name of a variable, where a wrong refusal costs a word and a secret costs more."""
    return any(part in name.upper().replace("TOKENIZER", "") for part in _VARIABLE) or redactor().is_secret(name)


def refusal(where: Where) -> RecipeError:
    return RecipeError(
        "this looks like a secret, or holds the value of a secret variable of this environment",
        where=where,
        rule="recipes, cluster files and overrides are archived with every run: no secrets",
        hint="put it into the site's own environment",
    )


def secret_at(value: Any, path: KeyPath = ()) -> KeyPath | None:
    """The first key whose name or value is a secret, below a value that stands at `path`; None when there is none."""
    return _secret_at(value, path, redactor())


def _secret_at(value: Any, path: KeyPath, known: Redactor) -> KeyPath | None:
    if isinstance(value, Mapping):
        inner: Iterable[tuple[Any, Any]] = value.items()
    elif isinstance(value, list):
        words = [item if isinstance(item, str) else "" for item in value]
        pairs = enumerate(zip(words, known.argv(words), strict=True))
        wrong = next((i for i, (a, b) in pairs if a != b and not _HARMLESS.fullmatch(a)), None)
        if wrong is not None:
            return (*path, wrong)
        inner = enumerate(value)
    else:
        return path if _is_secret(value, path, known) else None
    return next((found for name, item in inner if (found := _secret_at(item, (*path, name), known)) is not None), None)


def _is_secret(value: Any, path: KeyPath, known: Redactor) -> bool:
    if value is None or value == "":
        return False
    if any(part in _ENVIRONMENTS for part in path[:-1]):
        names = [str(part) for part in path[path.index(next(p for p in path if p in _ENVIRONMENTS)) + 1 :]]
        if any(is_secret_variable(name) for name in names):
            return True
    if not isinstance(value, str):  # slos_ms: {time_to_first_token: 1000}
        return False
    return known.text(value) != value or any(known.is_secret(str(part)) for part in path if isinstance(part, str))


def shown(setting: str) -> str:
    """key=value as a message may repeat it: the value goes when a name in it, or its shape, says that it is a secret."""
    key, equals, text = setting.partition("=")
    if not equals:
        return REDACTED if any(is_secret_variable(word) for word in setting.split()) else redactor().text(setting)
    names = [*key.split("."), *(a or b for a, b in _NAMED.findall(text))]
    number = re.fullmatch(r"\s*[-+.\d]+\s*", text) and not any(part in _ENVIRONMENTS for part in key.split("."))
    hidden = not number and any(is_secret_variable(n) and not n.upper().endswith("_TOKENS") for n in names)
    return redactor().text(f"{key}={REDACTED}" if hidden else setting)
