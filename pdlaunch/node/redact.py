"""Keeps secrets out of what a run writes: by the name of the variable, by known values, and by the shape of well-known tokens."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

REDACTED = "<redacted>"
MIN_SECRET_CHARS = 6
"""Shorter values are not searched for in texts: they would blank out ordinary words."""

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_SHAPES = re.compile(
    r"\bhf_[A-Za-z0-9]{16,}|\bsk-[A-Za-z0-9_-]{16,}|\bgh[pousr]_[A-Za-z0-9]{20,}|\bglpat-[A-Za-z0-9_-]{16,}|\bnvapi-[A-Za-z0-9_-]{16,}"
    r"|\bAKIA[A-Z0-9]{16}\b|\beyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{5,}")
_BEARER = re.compile(r"(?i)\b(bearer|basic)\s+[A-Za-z0-9._~+/=-]{8,}")
_USERINFO = re.compile(r"(?<=://)[^/\s:@]+:[^/\s@]+(?=@)")
_KEY_FLAG = re.compile(r"(?i)(\b(?:api[_-]?key|password|passwd|secret)\b[\"']?\s*[=:]\s*[\"']?)([^\s\"',;}]{4,})")


def plain(text: str) -> str:
    """Without ANSI escape sequences and carriage returns."""
    return _ANSI.sub("", text).replace("\r", "")


class Redactor:
    """keys: words of variable names that mean a secret, as TOKEN; a name matches when it has the word between underscores.

    environments: whose secret values are looked for in every text.
    """

    def __init__(self, keys: Iterable[str], *environments: Mapping[str, str]) -> None:
        words = "|".join(re.escape(k.upper()) for k in keys)
        words = rf"(?:{words})(?:(?<=AUTH)ORIZATION|(?<!TOKEN)(?<!AUTH)S)?"  # TOKENS are counted, not hidden
        self._name = re.compile(rf"(?:^|_){words}(?:$|_(?!ID$|PATH$|FILE$))")
        self._assignment = re.compile(rf"\b((?:[A-Z0-9]+_)*{words})=([^\s\"']+|\"[^\"]*\"|'[^']*')")
        values = {v for e in environments for k, v in e.items() if self.is_secret(k) and len(v) >= MIN_SECRET_CHARS}
        self._values = sorted(values, key=len, reverse=True)

    def is_secret(self, name: str) -> bool:
        return bool(self._name.search(name.upper().replace("-", "_")))

    def text(self, text: str) -> str:
        for value in self._values:
            text = text.replace(value, REDACTED)
        text = self._assignment.sub(rf"\1={REDACTED}", text)
        text = _KEY_FLAG.sub(rf"\1{REDACTED}", text)
        text = _BEARER.sub(rf"\1 {REDACTED}", text)
        text = _USERINFO.sub(REDACTED, text)
        return _SHAPES.sub(REDACTED, text)

    def environment(self, environment: Mapping[str, str]) -> dict[str, str]:
        return {k: REDACTED if self.is_secret(k) and v else self.text(v) for k, v in sorted(environment.items())}

    def argv(self, argv: Iterable[str]) -> list[str]:
        """A command line: the value after --api-key and the like is redacted too."""
        out: list[str] = []
        for word in argv:
            flag = out[-1] if out else ""
            name, equals, _ = word.partition("=")
            if flag.startswith("--") and "=" not in flag and self.is_secret(flag[2:]):
                out.append(REDACTED)
            elif equals and name.startswith("--") and self.is_secret(name[2:]):
                out.append(f"{name}={REDACTED}")
            else:
                out.append(self.text(word))
        return out
