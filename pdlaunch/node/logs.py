"""Lines of the logs that decide or explain a verdict, each with its file and line.

A log line never proves that a run is right: messages change with every release. It proves that something was wrong, and says what.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

MAX_QUOTED = 3
MAX_LINE_CHARS = 400
ANSI = re.compile(rb"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Pattern:
    """One kind of line. decides: a line outside the stop phase makes the run INVALID. The order of PATTERNS is their weight."""

    name: str
    regex: str
    meaning: str
    decides: bool = True


PATTERNS = (
    Pattern("split_region", r"SPLIT region \d+",
            "the decode worker refused the hand-over: a region's bytes do not follow from one model-wide KV head count (vllm#50765)"),
    Pattern("hash_mismatch", r"NIXL compatibility hash mismatch",
            "prefill and decode are configured differently: cache manager, dtype, model path, speculation (dynamo#12821)"),
    Pattern("block_size", r"block size \d+ is not divisible by remote block size",
            "the cache blocks of the two roles do not fit each other"),
    Pattern("invalid_blocks", r"Potentially invalid KV blocks",
            "decode read KV blocks that prefill had already given away: wrong text without any error (vllm#52234)"),
    Pattern("handshake", r"NIXL transfer failure: handshake", "the handshake between decode and prefill failed (vllm#45330)"),
    Pattern("nixl_error", r"NIXL_ERR_\w+", "NIXL could not move bytes (vllm#50765, nixl#1614)"),
    Pattern("transfer_failure", r"NIXL transfer failure:", "a KV transfer failed"),
    Pattern("kv_load_failure", r"due to KV load failure", "requests were ended because their KV cache did not arrive"),
    Pattern("kv_recomputed", r"Recovered from KV load failure",
            "decode computed prompts again itself: right text, no transfer (vllm#26896)"),
    Pattern("not_implemented", r"NotImplementedError: .*(KV|region|TP|block)", "a combination that the connector refuses"),
    Pattern("assertion", r"AssertionError", "an assertion failed"),
    Pattern("expired", r"Releasing expired KV blocks", "prefill gave up KV blocks that decode had not read in time"),
    Pattern("rejected_worker", r"Rejected incompatible workers", "a worker was refused, so capacity was lost silently (dynamo#8263)"),
    Pattern("system_port", r"System status server startup failed", "metrics of this worker could be those of another process"),
    Pattern("engine_dead", r"EngineDeadError", "an engine died while it was needed"),
    Pattern("hybrid_off", r"Hybrid KV cache manager is disabled for this hybrid model",
            "the hybrid manager is off: sliding layers keep their whole cache (vllm#42024)", decides=False),
)


@dataclass(frozen=True)
class Finding:
    """count: lines of this kind outside the stop phase. quoted: the first of them, as (line number, text)."""

    pattern: Pattern
    file: str
    count: int
    quoted: tuple[tuple[int, str], ...]

    @property
    def source(self) -> str:
        return f"{self.file}:{self.quoted[0][0]}"


def scan(path: Path, name: str, stop_at: int | None, patterns: Iterable[Pattern] = PATTERNS) -> list[Finding]:
    """What the log shows before byte `stop_at` (size at the first TERM; None: not known, then EngineDeadError is left out, because a
    killed engine always says it). name: path shown to the reader. A missing log gives nothing."""
    wanted = [(p, re.compile(p.regex.encode())) for p in patterns if stop_at is not None or p.name != "engine_dead"]
    hits: dict[str, list[tuple[int, str]]] = {}
    counts: dict[str, int] = {}
    for number, line in _lines(path, stop_at):
        for pattern, regex in wanted:
            if regex.search(line):
                counts[pattern.name] = counts.get(pattern.name, 0) + 1
                quoted = hits.setdefault(pattern.name, [])
                if len(quoted) < MAX_QUOTED:
                    quoted.append((number, shown(line)))
    return [Finding(p, name, counts[p.name], tuple(hits[p.name])) for p, _ in wanted if p.name in counts]


def count(path: Path, regex: str) -> tuple[int, int, int]:
    """(lines, distinct values of the groups `engine` and `rank`, first line number) of a pattern of the spec; without groups lines count
    as they are. The second number tells plans of different decode ranks from one rank's plan that was printed again."""
    pattern = re.compile(regex.encode())
    lines, first, seen = 0, 0, set()
    for number, line in _lines(path, None):
        match = pattern.search(line)
        if match:
            lines += 1
            first = first or number
            groups = match.groupdict()
            seen.add(tuple(groups.get(k) for k in ("engine", "rank")) if groups.get("rank") else (lines,))
    return lines, len(seen), first


def shown(line: bytes) -> str:
    text = line.decode("utf-8", errors="replace").strip()
    return text if len(text) <= MAX_LINE_CHARS else text[:MAX_LINE_CHARS] + "..."


def _lines(path: Path, stop_at: int | None) -> Iterable[tuple[int, bytes]]:
    position = 0
    try:
        with path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if stop_at is not None and position >= stop_at:
                    return
                position += len(line)
                yield number, ANSI.sub(b"", line)
    except FileNotFoundError:
        return
