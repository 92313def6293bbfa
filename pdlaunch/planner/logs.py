"""Read what an engine said about its memory and its cache: worker logs, the cache_config_info metric, and a bundle's command lines."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch.errors import PlanError, Where

from .shape import GIB, MemoryFacts, RoleShape

_GIB = r"(-?[\d.]+)"


@dataclass(frozen=True, slots=True)
class Fact:
    """A value and where it was read: file name and 1-based line."""

    value: Any
    source: str


# One pattern per line of vLLM 0.31.0; names of groups are names of facts. Sources: v1/worker/gpu_worker.py, gpu_model_runner.py,
# v1/core/kv_cache_utils.py:2464, platforms/interface.py, v1/engine/core.py.
_PATTERNS = tuple(
    re.compile(pattern)
    for pattern in (
        rf"Model loading took (?P<weights_gib>{_GIB}) GiB memory",
        rf"Estimated CUDA graph memory: (?P<graph_estimate_gib>{_GIB}) GiB total",
        rf"CUDA graph pool memory: (?P<graph_actual_gib>{_GIB}) GiB \(actual\), {_GIB} GiB \(estimated\)",
        rf"Available KV cache memory: (?P<kv_gib>{_GIB}) GiB",
        r"KV cache size: (?P<kv_tokens>[\d,]+) tokens, Maximum concurrency for (?P<max_model_len>[\d,]+) tokens per request: "
        r"(?P<concurrency>[\d.]+)x",
        rf"Free memory on device \((?P<free_gib>{_GIB})/(?P<total_gib>{_GIB}) GiB\) on startup\. Desired GPU memory utilization is "
        rf"\((?P<utilization>[\d.]+), (?P<share_gib>{_GIB}) GiB\)\. Actual usage is (?P<consumed_gib>{_GIB}) GiB for consumed memory "
        rf"\(weights \+ non-torch\), (?P<peak_gib>{_GIB}) GiB for peak activation",
        rf"Initial free memory (?P<free_gib>{_GIB}) GiB, reserved (?P<kv_gib>{_GIB}) GiB memory for KV Cache",
        r"Setting attention block size to (?P<block_size>\d+) tokens",
        r"Padding mamba page size by (?P<state_padding_percent>[\d.]+)%",
        r"Add (?P<padding_layers>\d+) padding layers",
        r"Using (?P<layout>[A-Z]+) KV cache layout",
        r"Mamba cache mode is set to '(?P<state_mode>\w+)'",
        r"(?P<hybrid_off>Hybrid KV cache manager is disabled for this hybrid model)",
        r"Chunked prefill is enabled with max_num_batched_tokens=(?P<max_num_batched_tokens>\d+)",
        r"Using (?P<backend>[A-Z_]+) (?:attention )?backend",
        r"Initializing a V1 LLM engine \((?P<vllm>v[^)]+)\) with config: model='(?P<model>[^']+)'.*? dtype=torch\.(?P<dtype>\w+),"
        r".*?tensor_parallel_size=(?P<tensor_parallel>\d+), pipeline_parallel_size=(?P<pipeline_parallel>\d+), "
        r"data_parallel_size=(?P<data_parallel>\d+).*? kv_cache_dtype=(?P<kv_cache_dtype>\w+), device_config=(?P<device>\w+)"
        r".*?enable_prefix_caching=(?P<prefix_caching>\w+)",
    )
)
_TEXTS = frozenset({"layout", "state_mode", "hybrid_off", "backend", "vllm", "model", "dtype", "kv_cache_dtype", "device"})


def _value(name: str, text: str) -> Any:
    if name in _TEXTS:
        return text
    if text in ("True", "False"):
        return text == "True"
    number = text.replace(",", "")
    return float(number) if "." in number else int(number)


def parse_log(text: str, name: str = "log") -> dict[str, Fact]:
    """Facts of one engine's log. The last word wins: a restarted engine says its lines again."""
    found: dict[str, Fact] = {}
    for number, line in enumerate(text.splitlines(), 1):
        for pattern in _PATTERNS:
            match = pattern.search(line)
            if match:
                found |= {key: Fact(_value(key, value), f"{name}:{number}") for key, value in match.groupdict().items() if value}
    return found


_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


def parse_cache_config(text: str) -> list[dict[str, str]]:
    """Labels of vllm:cache_config_info in a Prometheus text, one dict per data-parallel engine, in order of `engine`."""
    rows = [dict(_LABEL.findall(line)) for line in text.splitlines() if line.startswith("vllm:cache_config_info{")]
    return sorted(rows, key=lambda row: int(row.get("engine", "0")))


_FLAGS = {
    "--tensor-parallel-size": ("tensor_parallel", int),
    "--pipeline-parallel-size": ("pipeline_parallel", int),
    "--data-parallel-size": ("data_parallel", int),
    "--max-model-len": ("max_model_len", int),
    "--max-num-batched-tokens": ("max_num_batched_tokens", int),
    "--max-num-seqs": ("max_num_seqs", int),
    "--block-size": ("block_size", int),
    "--kv-cache-dtype": ("kv_cache_dtype", str),
    "--dtype": ("dtype", str),
    "--mamba-cache-dtype": ("mamba_cache_dtype", str),
    "--mamba-ssm-cache-dtype": ("mamba_ssm_cache_dtype", str),
    "--gpu-memory-utilization": ("gpu_memory_utilization", float),
    "--kv-cache-memory-bytes": ("kv_cache_memory_bytes", int),
    "--num-gpu-blocks-override": ("num_blocks_override", int),
    "--attention-backend": ("backend", str),
}
_SWITCHES: dict[str, tuple[str, object]] = {
    "--disable-hybrid-kv-cache-manager": ("hybrid_manager", False),
    "--no-disable-hybrid-kv-cache-manager": ("hybrid_manager", True),
    "--enable-prefix-caching": ("prefix_caching", True),
    "--no-enable-prefix-caching": ("prefix_caching", False),
    "--async-scheduling": ("async_scheduling", True),
    "--no-async-scheduling": ("async_scheduling", False),
    "--enable-expert-parallel": ("expert_parallel", True),
}


def parse_argv(argv: Sequence[str]) -> dict[str, Any]:
    """Fields of RoleShape that a vLLM or Dynamo command line sets, and `model`; unknown words are passed over."""
    found: dict[str, Any] = {}
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") and "=" in word else [word])]
    for i, word in enumerate(words):
        if word in _SWITCHES:
            name, value = _SWITCHES[word]
            found[name] = value
        elif i + 1 < len(words):
            if word in _FLAGS:
                name, convert = _FLAGS[word]
                found[name] = convert(words[i + 1])
            elif word == "--model":
                found["model"] = words[i + 1]
            elif word == "--speculative-config":
                found["speculative_tokens"] = int(json.loads(words[i + 1]).get("num_speculative_tokens", 0))
    return found


@dataclass(frozen=True)
class EngineRecord:
    """All that one engine left behind. facts: from its log; metric: labels of cache_config_info; argv: fields of its command line."""

    name: str
    role: str
    facts: Mapping[str, Fact]
    metric: Mapping[str, str]
    argv: Mapping[str, Any]

    def fact(self, name: str) -> Any:
        return self.facts[name].value if name in self.facts else None

    @property
    def model_path(self) -> str | None:
        path = self.argv.get("model") or self.fact("model")
        return None if path is None else str(path)


_NOT_OURS = (ValueError, KeyError, TypeError, AttributeError, RecursionError)


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="replace")


def _engine_of_run(folder: Path, engine: Mapping[str, Any]) -> EngineRecord:
    name = str(engine["name"])
    log, metric = folder / "logs" / f"{name}.log", folder / "metrics" / f"{name}.ready.prom"
    facts = parse_log(_text(log), f"logs/{log.name}") if log.is_file() else {}
    rows = parse_cache_config(_text(metric)) if metric.is_file() else []
    argv = engine["ranks"][0]["argv"] if engine.get("ranks") else []
    return EngineRecord(name, str(engine["role"]), facts, rows[0] if rows else {}, parse_argv(argv))


def read_records(path: Path) -> list[EngineRecord]:
    """Engines of an archived run (a folder with spec.json), or the one of a log file. PlanError when there is nothing to read."""
    if path.is_file():
        return [EngineRecord(path.name, "engine", parse_log(_text(path), path.name), {}, {})]
    for folder in (path, path / "run"):
        spec = folder / "spec.json"
        if spec.is_file():
            try:
                return [_engine_of_run(folder, engine) for engine in json.loads(_text(spec))["engines"]]
            except _NOT_OURS as e:
                raise PlanError(f"not a spec.json of this project: {e!r}", where=Where(spec), rule="a run as it was archived") from None
    raise PlanError("neither a log nor a run", where=Where(path), rule="a log file, or a folder with spec.json, logs/ and metrics/")


def memory_facts(record: EngineRecord) -> MemoryFacts:
    """Measured rows of the ledger. vLLM's "peak activation" contains the graph estimate (gpu_worker.py:668), so it is taken out."""
    weights, consumed, peak = record.fact("weights_gib"), record.fact("consumed_gib"), record.fact("peak_gib")
    estimate, total, free = record.fact("graph_estimate_gib"), record.fact("total_gib"), record.fact("free_gib")
    return MemoryFacts(
        weights_gib=weights,
        non_torch_gib=None if consumed is None or weights is None else consumed - weights,
        peak_activation_gib=None if peak is None else peak - (estimate or 0.0),
        graph_estimate_gib=estimate if estimate is not None else (0.0 if peak is not None else None),
        graph_actual_gib=record.fact("graph_actual_gib"),
        cuda_context_gib=None if total is None or free is None else total - free,
        measured=True,
    )


def _block_size_given(record: EngineRecord) -> int | None:
    if "block_size" in record.argv:
        return int(record.argv["block_size"])
    if record.metric.get("user_specified_block_size") == "True":
        return int(record.metric["block_size"])
    return None


def _exact_kv_bytes(record: EngineRecord) -> int | None:
    given, said = record.argv.get("kv_cache_memory_bytes"), record.metric.get("kv_cache_memory_bytes", "None")
    if given is not None:
        return int(given)
    return None if said in ("None", "") else int(said)


def rounded_kv_gib(record: EngineRecord) -> float | None:
    """KV GiB that the log states, when nothing states the bytes exactly: two digits."""
    return record.fact("kv_gib") if _exact_kv_bytes(record) is None else None


def shape_of(record: EngineRecord) -> RoleShape:
    """The shape that the engine ran with: its command line first, then its own words in the log and the metric."""
    said = {
        name: record.fact(name)
        for name in (
            "tensor_parallel",
            "pipeline_parallel",
            "data_parallel",
            "max_model_len",
            "max_num_batched_tokens",
            "dtype",
            "kv_cache_dtype",
            "prefix_caching",
        )
        if record.fact(name) is not None
    }
    if record.fact("hybrid_off"):
        said["hybrid_manager"] = False
    if record.metric:
        said["prefix_caching"] = record.metric.get("enable_prefix_caching") == "True"
        said["mamba_ssm_cache_dtype"] = record.metric.get("mamba_ssm_cache_dtype", "auto")
    given = {name: value for name, value in record.argv.items() if name != "model"}
    backend = "CPU_ATTN" if record.fact("device") == "cpu" else given.get("backend") or record.fact("backend") or "FLASH_ATTN"
    rounded = rounded_kv_gib(record)
    kv = _exact_kv_bytes(record) if rounded is None else int(rounded * GIB)
    changes = {**said, **given, "backend": backend, "kv_cache_memory_bytes": kv, "block_size": _block_size_given(record)}
    return RoleShape(memory=memory_facts(record)).with_changes(**changes)


@dataclass(frozen=True, slots=True)
class Compared:
    """One value that the planner predicted and the engine stated. residual: measured minus predicted; None when one is missing.

    low, high: the prediction at the ends of what the engine's own rounding leaves open (a log states KV GiB and concurrency with two
    digits); equal to predicted when the inputs are exact.
    """

    name: str
    predicted: float | None
    measured: float | None
    source: str
    low: float | None = None
    high: float | None = None

    @property
    def residual(self) -> float | None:
        return None if self.predicted is None or self.measured is None else self.measured - self.predicted

    @property
    def agrees(self) -> bool:
        """Equal, or inside what the engine's rounding leaves open; true when either value is missing."""
        if self.predicted is None or self.measured is None:
            return True
        low, high = (self.predicted if bound is None else bound for bound in (self.low, self.high))
        return low - 1e-9 <= self.measured <= high + 1e-9


def stated(record: EngineRecord) -> dict[str, tuple[float, str]]:
    """Blocks, tokens, concurrency, block size and KV GiB as the engine stated them, with the place. The metric is exact, so it wins
    over the log, whose concurrency has two digits."""
    found: dict[str, tuple[float, str]] = {}
    in_log = {"kv_tokens": "tokens", "concurrency": "concurrency", "block_size": "block_size", "kv_gib": "kv_gib"}
    for fact, name in in_log.items():
        if fact in record.facts:
            found[name] = (float(record.facts[fact].value), record.facts[fact].source)
    in_metric = {
        "num_gpu_blocks": "num_blocks",
        "kv_cache_size_tokens": "tokens",
        "kv_cache_max_concurrency": "concurrency",
        "block_size": "block_size",
    }
    for label, name in in_metric.items():
        if record.metric.get(label, "None") not in ("None", ""):
            found[name] = (float(record.metric[label]), f"metrics/{record.name}.ready.prom vllm:cache_config_info")
    return found


def read_transfers(path: Path) -> list[Compared]:
    """Bytes that a run's decode engines pulled, by window, beside what the plan predicted for its prompts; from evidence.json.

    A window whose requests were not all fresh hand-overs has no prediction. Empty for a log file or a run without evidence.
    """
    files = [folder / "evidence.json" for folder in (path, path / "run") if (folder / "evidence.json").is_file()]
    if not files:
        return []
    found = []
    try:
        values = json.loads(_text(files[0])).get("values", {})
        for name in values:
            match = re.fullmatch(r"transfer\.decode\.(.+)\.bytes", name)
            if match:
                predicted = values.get(f"transfer.decode.{match[1]}.predicted_bytes", {}).get("value")
                found.append(Compared(f"bytes, {match[1]}", predicted, values[name]["value"], values[name]["source"]))
    except _NOT_OURS as e:
        raise PlanError(f"not an evidence.json of this project: {e!r}", where=Where(files[0]), rule="a run as it was archived") from None
    return found
