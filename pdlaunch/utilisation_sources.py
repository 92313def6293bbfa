"""Reads utilisation periods from what people have: an hourly CSV, Prometheus range queries, DCGM exporter scrapes, an archived run."""

from __future__ import annotations

import csv
import io
import itertools
import json
import math
import re
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdlaunch.errors import ArchiveError, Where
from pdlaunch.stats import mean
from pdlaunch.utilisation import Period

GPU_UTILISATION = "DCGM_FI_DEV_GPU_UTIL"
PROMPT_TOKENS = "vllm:prompt_tokens_total"
LATEST_S = 253402300799.0
"""The last second of the year 9999, the latest that can be written as a date."""
_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})?\s+(\S+)(?:\s+(-?\d+))?\s*$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


def _bad(path: Path, what: str, rule: str, line: int | None = None, key: str | None = None) -> ArchiveError:
    return ArchiveError(what, where=Where(path, line, key), rule=rule)


def _number(path: Path, line: int, key: str, text: str | None, high: float) -> float:
    try:
        value = float((text or "").strip())
    except ValueError:
        raise _bad(path, f"{text!r} is not a number", "a plain decimal number without thousands separators or unit", line, key) from None
    if not math.isfinite(value) or not 0 <= value <= high:
        raise _bad(path, f"{value!r} is out of range", f"0 to {high:g}", line, key)
    return value


def _text(path: Path, rule: str) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as e:
        raise _bad(path, f"not UTF-8 text: {e.reason} at byte {e.start}", rule) from None


def read_csv(path: Path) -> list[Period]:
    """Columns <role>_gpus, utilisation_pct, prompt_tokens_per_s and one time column (hour_ending or time). A row that is wrong is an
    error."""
    reader = csv.DictReader(io.StringIO(_text(path, "a CSV, or a .json file with the answer of a range query")))
    names = reader.fieldnames or []
    role_columns = [n for n in names if n.endswith("_gpus")]
    time_columns = [n for n in names if n in ("hour_ending", "time", "utc")]
    missing = [n for n in ("utilisation_pct", "prompt_tokens_per_s") if n not in names]
    if len(role_columns) != 1 or len(time_columns) != 1 or missing:
        raise _bad(path, f"columns {names}", "hour_ending (or time, utc), <role>_gpus, utilisation_pct, prompt_tokens_per_s", 1)
    periods = []
    seen: dict[tuple[str, int], int] = {}
    for row in reader:
        line = reader.line_num
        if None in row or None in row.values():
            raise _bad(path, f"{len([v for v in row.values() if v is not None])} fields", f"{len(names)} fields, as in the header", line)
        gpus = _number(path, line, role_columns[0], row[role_columns[0]], 1e6)
        if gpus < 1 or gpus != int(gpus):
            raise _bad(path, f"{row[role_columns[0]]!r} GPUs", "a whole number, at least 1", line, role_columns[0])
        when = row[time_columns[0]].strip()
        if (when, int(gpus)) in seen:
            raise _bad(
                path,
                f"{when} appears twice for {int(gpus)} GPUs (first on line {seen[when, int(gpus)]})",
                "one row per period and layout",
                line,
            )
        seen[when, int(gpus)] = line
        periods.append(
            Period(
                role_columns[0][:-5],
                int(gpus),
                _number(path, line, "utilisation_pct", row["utilisation_pct"], 100),
                _number(path, line, "prompt_tokens_per_s", row["prompt_tokens_per_s"], 1e12),
                when,
                f"{path.name}:{line}",
            )
        )
    if not periods:
        raise _bad(path, "no rows", "at least one period")
    return periods


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _bins(samples: Iterable[tuple[float, float]], bin_s: float) -> dict[int, list[float]]:
    found: dict[int, list[float]] = {}
    for when, value in samples:
        if math.isfinite(value):
            found.setdefault(math.floor(when / bin_s), []).append(value)
    return found


def _join(
    role: str, gpus: int, used: list[tuple[float, float]], load: list[tuple[float, float]], bin_s: float, source: str
) -> list[Period]:
    """One period per bin that has both a utilisation and a load sample."""
    busy, rate = _bins(used, bin_s), _bins(load, bin_s)
    both = sorted(set(busy) & set(rate))
    if not both:
        starts = f"utilisation ({_iso(min(busy) * bin_s)} ...) and load ({_iso(min(rate) * bin_s)} ...)"
        said = f"{starts} of {source} share no period of {bin_s:g} s"
        raise ArchiveError(said, rule="samples of both in the same time", hint="--bin SECONDS for longer periods")
    return [Period(role, gpus, mean(busy[b]), mean(rate[b]), _iso(b * bin_s), f"{source} bin {_iso(b * bin_s)}") for b in both]


def _matrix(path: Path) -> list[dict[str, Any]]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as e:
        raise _bad(path, f"not JSON: {e}", "the answer of a Prometheus range query (/api/v1/query_range)") from None
    body = data.get("data") if isinstance(data, dict) else None
    if (
        not isinstance(body, dict)
        or data.get("status") != "success"
        or body.get("resultType") != "matrix"
        or not isinstance(body.get("result"), list)
    ):
        raise _bad(path, "not a successful range query", 'status "success" and data.resultType "matrix"')
    if wrong := [s for s in body["result"] if not isinstance(s, dict) or not isinstance(s.get("metric"), dict)]:
        raise _bad(path, f"a series without labels: {wrong[0]!r}"[:120], 'data.result of objects with "metric" and "values"')
    return list(body["result"])


def _values(path: Path, series: dict[str, Any]) -> list[tuple[float, float]]:
    try:
        found = [(float(when), float(value)) for when, value in series["values"]]
    except (KeyError, TypeError, ValueError) as e:
        raise _bad(path, f'a series without [[time, "value"], ...]: {e}', "the answer of a Prometheus range query") from None
    if wrong := [when for when, _ in found if not 0 <= when <= LATEST_S]:
        raise _bad(path, f"{wrong[0]!r} is no time", "unix seconds")
    return found


def read_prometheus(utilisation: Path, load: Path, role: str, bin_s: float = 3600.0) -> list[Period]:
    """Two range queries of one role. utilisation: one series per GPU, in per cent (DCGM_FI_DEV_GPU_UTIL). load: prompt tokens per second,
    series are added at each time stamp. A label `role` on a series, where there is one, must be the role asked for, or the series is left
    out.
    """

    def of_role(path: Path) -> list[list[tuple[float, float]]]:
        return [_values(path, s) for s in _matrix(path) if s["metric"].get("role", role) == role]

    gpus = of_role(utilisation)
    totals: dict[float, float] = {}
    for series in of_role(load):
        for when, value in series:
            totals[when] = totals.get(when, 0.0) + value
    if not gpus or not totals:
        raise _bad(utilisation if not gpus else load, f"no series of role {role!r}", "at least one series")
    flat = [point for series in gpus for point in series]
    outside = [v for _, v in flat if not 0 <= v <= 100]
    if outside:
        raise _bad(
            utilisation,
            f"{outside[0]!r} is not a utilisation",
            "0 to 100 per cent (DCGM_FI_PROF_SM_ACTIVE is 0 to 1: multiply it by 100 in the query)",
        )
    return _join(role, len(gpus), flat, sorted(totals.items()), bin_s, utilisation.name)


def read_scrapes(folder: Path, role: str, bin_s: float = 3600.0) -> list[Period]:
    """A folder of saved /metrics answers, one file per scrape and named <unix seconds>.prom (a sample's own time stamp wins): DCGM
    exporter's DCGM_FI_DEV_GPU_UTIL of the role's GPUs, and vllm:prompt_tokens_total of its engines, whose increase between scrapes is the
    load.
    """
    used: list[tuple[float, float]] = []
    gpus: set[str] = set()
    totals: dict[float, float] = {}
    for path in sorted(folder.glob("*.prom")):
        try:
            when = float(path.stem)
        except ValueError:
            when = math.nan
        if not 0 <= when <= LATEST_S:
            raise _bad(path, "the name is not a time", "<unix seconds>.prom")
        for number, line in enumerate(_text(path, "a saved answer of /metrics").splitlines(), 1):
            if not line.startswith((GPU_UTILISATION, PROMPT_TOKENS)):
                continue
            match = _SAMPLE.match(line)
            if match is None:
                raise _bad(path, f"{line[:80]!r}", "name{labels} value [milliseconds]", number)
            name, labels, text, stamp = match.groups()
            value = _number(path, number, name, text, 100 if name == GPU_UTILISATION else 1e18)
            at = int(stamp) / 1000 if stamp else when
            if not 0 <= at <= LATEST_S:
                raise _bad(path, f"{stamp} is no time", "milliseconds since 1970", number)
            if name == GPU_UTILISATION:
                found = dict(_LABEL.findall(labels or ""))
                gpus.add(found.get("UUID") or f"{found.get('Hostname', '')}/{found.get('gpu', '')}")
                used.append((at, value))
            elif name == PROMPT_TOKENS:
                totals[when] = totals.get(when, 0.0) + value
    if not gpus or len(totals) < 2:
        raise _bad(
            folder,
            f"{len(gpus)} GPUs and {len(totals)} scrapes with {PROMPT_TOKENS}",
            f"{GPU_UTILISATION} and at least two scrapes with {PROMPT_TOKENS}",
        )
    times = sorted(totals)
    load = [((a + b) / 2, (totals[b] - totals[a]) / (b - a)) for a, b in itertools.pairwise(times) if totals[b] >= totals[a]]
    return _join(role, len(gpus), used, load, bin_s, folder.name)


def read_run(run: Path, bin_s: float = 10.0) -> list[Period]:
    """gpu/<role>-<n>*.csv of a run against the prompt tokens of load/<phase> (AIPerf's per-request records, spread evenly from the start
    of a request to its first token). Prompt tokens count for every role: decode's load is the same axis, which keeps roles comparable.
    """
    used: dict[str, list[tuple[float, float]]] = {}
    gpus: dict[str, set[str]] = {}
    for path in sorted((run / "gpu").glob("*.csv")):
        role = path.stem.split("-")[0]
        for number, row in enumerate(csv.DictReader(io.StringIO(_text(path, "gpu/*.csv of a run"))), 2):
            try:
                when = datetime.fromisoformat(row["utc"]).timestamp()
                used.setdefault(role, []).append((when, float(row["utilisation_pct"])))
            except (KeyError, TypeError, ValueError) as e:
                raise _bad(path, f"{row}: {e}", "utc,gpu,utilisation_pct,memory_used_mib", number) from None
            gpus.setdefault(role, set()).add(f"{path.stem}/{row['gpu']}")
    if not used:
        raise _bad(run, "no GPU samples (gpu/*.csv)", "a run on GPUs; a CPU-only run has no utilisation")
    tokens: dict[int, float] = {}
    for records in sorted(run.glob("load/*/aiperf/profile_export.jsonl")):
        for number, line in enumerate(_text(records, "profile_export.jsonl of AIPerf 0.13").splitlines(), 1):
            try:
                row = json.loads(line)
                if row.get("error"):
                    continue
                start = row["metadata"]["request_start_ns"] / 1e9
                first = row["metrics"].get("time_to_first_token", {}).get("value")
                end = start + first / 1000 if first else row["metadata"]["request_end_ns"] / 1e9
                count = row["metrics"]["input_sequence_length"]["value"]
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as e:
                raise _bad(records, f"not a request record: {e!r}", "profile_export.jsonl of AIPerf 0.13", number) from None
            for b in range(math.floor(start / bin_s), math.floor(end / bin_s) + 1):
                share = (min(end, (b + 1) * bin_s) - max(start, b * bin_s)) / (end - start) if end > start else 1.0
                tokens[b] = tokens.get(b, 0.0) + count * share
    if not tokens:
        raise _bad(run, "no request records (load/*/aiperf/profile_export.jsonl)", "a run with a load phase")
    load = [(b * bin_s, n / bin_s) for b, n in tokens.items()]
    return [p for role in sorted(used) for p in _join(role, len(gpus[role]), used[role], load, bin_s, run.name)]


def _only(periods: list[Period], role: str | None, source: Path) -> list[Period]:
    """The periods of the role that was asked for; all of them for None. ArchiveError names the roles that the source has."""
    found = [p for p in periods if role in (None, p.role)]
    if not found:
        has = ", ".join(sorted({p.role for p in periods}))
        raise _bad(source, f"no role {role!r}", f"roles of this source: {has}")
    return found


def read(source: Path, *, load: Path | None = None, role: str | None = None, bin_s: float | None = None) -> list[Period]:
    """Choose the reader: a folder with spec.json is a run, another folder holds scrapes; .json is a range query (with `load`), else CSV.

    role None: every role of a table or a run, which name theirs; prefill for scrapes and range queries, which may not.
    """
    if not source.exists():
        raise ArchiveError(f"{source} does not exist", rule="a CSV, a Prometheus range result, a folder of scrapes or an archived run")
    if load is not None and (source.is_dir() or source.suffix != ".json"):
        raise ArchiveError(f"--load {load}, but {source} has its load itself", rule="--load goes with a range query (.json) of utilisation")
    if source.is_dir():
        if (source / "spec.json").exists():
            return _only(read_run(source, bin_s or 10.0), role, source)
        return read_scrapes(source, role or "prefill", bin_s or 3600.0)
    if source.suffix == ".json":
        if load is None:
            raise _bad(
                source,
                "a range query of utilisation needs the load beside it",
                "--load FILE with the range query of prompt tokens per second",
            )
        return read_prometheus(source, load, role or "prefill", bin_s or 3600.0)
    return _only(read_csv(source), role, source)
