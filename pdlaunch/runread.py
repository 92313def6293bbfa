"""One archived run, read for reports: its settings, verdict, stages and load phases. Every file of the run is compared with
manifest.json, not only those that a number comes from: the verdict rests on all of them.

What is wrong with one file becomes a line in `problems` and the rest is still read; only a folder that is no run of this schema is an
ArchiveError. `launch.py verify` also judges the run again, which finds a verdict whose manifest was written again by hand.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pdlaunch.aiperf_files import PhaseFiles, Record, read_phase
from pdlaunch.devices import SERVING, Sharing, denominators, sharing
from pdlaunch.errors import ArchiveError, Where
from pdlaunch.manifest import MANIFEST, Files
from pdlaunch.manifest import read as read_manifest
from pdlaunch.metrics_defs import Denominators, Metric, Reconciliation, compute, reconcile, tpot_ms
from pdlaunch.node.contracts import SCHEMA_VERSION, Verdict
from pdlaunch.node.spec import LoadPhase, Spec, SpecError, from_json
from pdlaunch.stats import percentile_of_sorted

MARKS = ("spec.json", "verdict.json", "manifest.json", "events.jsonl")
"""A folder with one of these is meant to be a run."""
UNREADABLE = "?"
"""The word for a run whose verdict.json is as it was archived and cannot be read."""
CURVE_POINTS = 50


def run_id(path: Path) -> str:
    """<recipe>/<utc>-<jobid>: the last two parts of the folder."""
    full = path.resolve()
    return f"{full.parent.name}/{full.name}"


@dataclass(frozen=True)
class Phase:
    """One load phase. metrics is empty and `problems` says why when AIPerf's files cannot be used.

    curves: CURVE_POINTS + 1 quantiles (0 to 100 %) of ttft, itl, tpot and latency in ms: enough to draw a distribution, and bounded.
    """

    setting: LoadPhase
    folder: str
    metrics: dict[str, Metric]
    curves: dict[str, tuple[float, ...]]
    reconciliation: Reconciliation | None
    prompt_tokens: tuple[tuple[int, int], ...]
    """(prompt tokens, successful requests with it), warm-up included: what the KV transfer of the phase is predicted from."""
    evidence: dict[str, float]
    """kv_usage, waiting, preemptions of the decode side where AIPerf's server metrics hold them."""
    problems: tuple[str, ...]

    @property
    def workload(self) -> tuple[Any, ...]:
        """What must be equal for two phases to be compared."""
        p = self.setting
        return (p.input_tokens, p.output_tokens, p.concurrency, p.request_rate_per_s, p.streaming, p.connection_reuse)


@dataclass(frozen=True)
class Run:
    """spec, verdict: the JSON as it is (checked for the schema version). evidence: name -> {value, unit, source}."""

    path: Path
    id: str
    spec: dict[str, Any]
    verdict: dict[str, Any]
    """As stored; `word` says what it is worth."""
    evidence: dict[str, dict[str, Any]]
    events: tuple[dict[str, Any], ...]
    nodes: dict[str, dict[str, Any]]
    phases: tuple[Phase, ...]
    problems: tuple[str, ...]
    files: Files = field(repr=False, compare=False)

    @property
    def word(self) -> str:
        return self.files.word(self.verdict)

    @property
    def valid(self) -> bool:
        return self.word == "VALID"

    @property
    def verified(self) -> bool:
        """Every file has the hash of manifest.json; False without a manifest or after any difference."""
        return self.files.expected is not None and not self.files.differs

    @property
    def doubt(self) -> str:
        """Why the run is not to be used as a VALID one; empty for one that is VALID."""
        if self.files.differs:
            return f"changed since it was archived: {self.files.changed}"
        if self.valid:
            return ""
        if self.files.expected is None:
            return f"is {self.word}, not VALID: it has no {MANIFEST}, which is written last"
        return f"is {self.word}, not VALID: {'; '.join(self.verdict['reasons'][:3]) or self.verdict['line']}"

    def engines(self, *roles: str) -> list[dict[str, Any]]:
        return [e for e in self.spec["engines"] if e["role"] in (roles or SERVING)]

    @property
    def denominators(self) -> Denominators:
        return denominators(self.spec)

    @property
    def sharing(self) -> Sharing:
        return sharing(self.spec)


def checked_schema(data: Any, path: Path) -> dict[str, Any]:
    """The object; ArchiveError unless it is one of our schema version."""
    if not isinstance(data, dict):
        raise ArchiveError(f"holds {type(data).__name__}", where=Where(path), rule="an object with `schema`")
    if data.get("schema") != SCHEMA_VERSION:
        hint = "read it with the version of this project that wrote it (run.git_commit in spec.json)"
        raise ArchiveError(
            f"schema {data.get('schema')!r}", where=Where(path, key="schema"), rule=f"this version reads schema {SCHEMA_VERSION}", hint=hint
        )
    return data


def open_files(path: Path) -> Files:
    """The run's files with the hashes of its manifest; ArchiveError when the folder is no run or the manifest is not ours."""
    if not path.is_dir():
        raise ArchiveError("is no folder" if path.exists() else "does not exist", where=Where(path), rule="results/<recipe>/<utc>-<jobid>")
    if not any((path / mark).exists() for mark in MARKS):
        raise ArchiveError(f"is not an archived run: none of {', '.join(MARKS)}", where=Where(path), rule="results/<recipe>/<utc>-<jobid>")
    return Files(path, read_manifest(path)["files"] if (path / MANIFEST).exists() else None)


def unchanged(path: Path) -> Files:
    """The run's files after each was compared with the manifest; ArchiveError when one differs. A run without a manifest is not archived
    yet: there is nothing to compare it with.
    """
    files = open_files(path)
    files.check_rest()
    if files.differs:
        said = f"{run_id(path)} changed since it was archived: {files.changed}"
        raise ArchiveError(said, rule="an archived run does not change", hint="launch.py verify RUN")
    return files


def _curves(records: Iterable[Record]) -> dict[str, tuple[float, ...]]:
    good = [r for r in records if r.ok]
    series = {
        "ttft": [r.ttft_ms for r in good], "itl": [r.itl_ms for r in good],
        "tpot": [tpot_ms(r) for r in good], "latency": [r.latency_ms for r in good],
    }  # fmt: skip
    curves = {}
    for name, values in series.items():
        present = sorted(v for v in values if v is not None)
        if present:
            curves[name] = tuple(percentile_of_sorted(present, 100 * i / CURVE_POINTS) for i in range(CURVE_POINTS + 1))
    return curves


_SERVER = {"vllm:kv_cache_usage_perc": "kv_usage", "vllm:num_requests_waiting": "waiting", "vllm:num_preemptions": "preemptions"}


def _server_evidence(data: Any) -> dict[str, float]:
    """Highest KV usage, mean waiting requests and total preemptions over the series of AIPerf's server_metrics_export.json."""
    found: dict[str, float] = {}
    metrics = data.get("metrics") if isinstance(data, dict) else None
    for name, ours in _SERVER.items():
        metric = metrics.get(name) if isinstance(metrics, dict) else None
        stat = {"kv_usage": "max", "waiting": "avg", "preemptions": "total"}[ours]
        for series in metric.get("series", []) if isinstance(metric, dict) else []:
            value = (series.get("stats") or {}).get(stat)
            if isinstance(value, int | float):
                found[ours] = max(found.get(ours, 0.0), float(value))
    return found


def _phase(files: Files, setting: LoadPhase, per: Denominators, with_curves: bool) -> Phase:
    folder = files.run / "load" / setting.name / "aiperf"
    relative = folder.relative_to(files.run).as_posix()
    try:
        parsed: PhaseFiles = read_phase(folder, files.read)
        metrics = compute(parsed, per, setting.concurrency, setting.slos_ms)
        server = files.json(f"{relative}/server_metrics_export.json")
    except (ArchiveError, ValueError) as e:
        return Phase(setting, relative, {}, {}, None, (), {}, (f"phase {setting.name}: {_within(files.run, e)}",))
    duration = parsed.stat("benchmark_duration")
    problems = [f"phase {setting.name}: {p}" for p in parsed.problems]
    if duration is None or duration <= 0:
        problems.append(f"phase {setting.name}: {'no duration' if duration is None else 'zero length'}, so no rate")
    if parsed.summary.get("was_cancelled") or parsed.summary.get("is_complete") is False:
        problems.append(f"phase {setting.name}: AIPerf says it is not complete ({parsed.summary.get('incomplete_reason') or 'cancelled'})")
    counts: dict[int, int] = {}
    for r in parsed.records:
        if r.ok:
            counts[r.input_tokens] = counts.get(r.input_tokens, 0) + 1
    for tokens in parsed.warmup_tokens:
        counts[tokens] = counts.get(tokens, 0) + 1
    why = reconcile(parsed.records, duration, setting.concurrency) if duration and setting.concurrency else None
    return Phase(
        setting,
        relative,
        metrics,
        _curves(parsed.records) if with_curves else {},
        why,
        tuple(sorted(counts.items())),
        _server_evidence(server),
        tuple(problems),
    )


def spec_of(files: Files) -> dict[str, Any]:
    """The JSON as it is, after it was bound to Spec: what reads it later may index it."""
    path = files.run / "spec.json"
    data = checked_schema(files.json("spec.json") or _absent(path), path)
    try:
        from_json(Spec, data)
    except SpecError as e:
        raise ArchiveError(str(e), where=Where(path), rule="spec.json as this version of the project writes it") from None
    return data


def _verdict(files: Files) -> dict[str, Any]:
    path = files.run / "verdict.json"
    data = checked_schema(files.json("verdict.json") or _absent(path), path)
    try:
        from_json(Verdict, {k: v for k, v in data.items() if k != "schema"})
    except SpecError as e:
        raise ArchiveError(str(e), where=Where(path), rule="verdict.json as this version of the project writes it") from None
    return data


def _evidence(files: Files) -> dict[str, dict[str, Any]]:
    path = files.run / "evidence.json"
    values = checked_schema(files.json("evidence.json") or _absent(path), path).get("values")
    if not isinstance(values, dict):
        raise ArchiveError("no values", where=Where(path, key="values"), rule="{name: {value, unit, source}}")
    for name, one in values.items():
        if not isinstance(one, dict) or not {"value", "source"} <= set(one):
            raise ArchiveError(f"{one!r}"[:80], where=Where(path, key=f"values.{name}"), rule="{value, unit, source}")
    return values


_NODE_FACTS: dict[str, type] = {"versions": dict, "gpus": list, "node": int, "host": str, "removed": dict}


def _node(files: Files, name: str) -> dict[str, Any]:
    path, data = files.run / name, files.json(name)
    if not isinstance(data, dict):
        raise ArchiveError(f"holds {type(data).__name__}", where=Where(path), rule="an object")
    for key, kind in _NODE_FACTS.items():
        if data.get(key) is not None and not isinstance(data[key], kind):
            raise ArchiveError(f"{data[key]!r}"[:80], where=Where(path, key=key), rule=f"{kind.__name__} or absent")
    return data


def read_run(path: Path, *, curves: bool = True) -> Run:
    """Everything that reports need; curves: the distributions too, which only a page draws.

    ArchiveError when the folder is no run, or spec.json is unreadable or of another schema.
    """
    files = open_files(path)
    problems: list[str] = (
        [] if files.expected is not None else ["no manifest.json: nothing proves that the files are as the run wrote them"]
    )
    spec = spec_of(files)

    def attempt(read: Callable[[], Any], otherwise: Any) -> Any:
        try:
            found = read()
        except FileNotFoundError as e:
            problems.append(f"{Path(e.filename).name} is missing")
            return otherwise
        except ArchiveError as e:
            problems.append(_within(path, e))
            return otherwise
        return otherwise if found is None else found

    unknown = {
        "verdict": UNREADABLE if (path / "verdict.json").exists() else "UNFINISHED",
        "line": "no readable verdict.json: the run did not reach its end",
        "reasons": [],
        "checks": [],
        "text_checked": spec["proof"]["text_checked"],
    }
    verdict = attempt(lambda: _verdict(files), unknown)
    evidence = attempt(lambda: _evidence(files), {})
    events = attempt(lambda: files.lines(path / "events.jsonl"), [])
    nodes = {}
    for node in sorted((path / "nodes").glob("*.json")):
        nodes[node.stem] = attempt(lambda node=node: _node(files, f"nodes/{node.name}"), {})  # type: ignore[misc]
    found = []
    for i, raw in enumerate((spec.get("load") or {}).get("phases", [])):
        try:
            setting = _setting(json.dumps(raw), i)
        except SpecError as e:
            problems.append(f"spec.json: {e}")
            continue
        found.append(_phase(files, setting, denominators(spec), curves))
        problems.extend(found[-1].problems)
    files.check_rest()
    return Run(path, run_id(path), spec, verdict, evidence, tuple(events), nodes, tuple(found), tuple(problems), files)


def _within(run: Path, error: Exception) -> str:
    """The message with paths as seen from the run: a page shows no folder of this machine."""
    return str(error).replace(f"{run}/", "")


@functools.lru_cache(maxsize=512)
def _setting(text: str, index: int) -> LoadPhase:
    """Runs of one recipe share their phases: each is checked once."""
    return from_json(LoadPhase, json.loads(text), f"load.phases[{index}]")


def _absent(path: Path) -> Any:
    raise ArchiveError("missing", where=Where(path), rule="every run has it; the folder was cut short or is foreign")
