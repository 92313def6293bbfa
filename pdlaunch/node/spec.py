"""spec.json: everything that the nodes need to run one job, and nothing that they must guess.

The launcher writes it, the on-node runtime reads it; neither reads an environment variable that it does not name.
Values that exist only at run time appear in argv and env as %{name} placeholders; PLACEHOLDERS lists all of them.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import types
import typing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

SCHEMA_VERSION = 1

PLACEHOLDERS = frozenset({
    "run_dir",            # results/<recipe>/<utc>-<jobid>, on a file system that every node sees
    "bundle_dir",         # the folder that holds spec.json and node/
    "tmp_dir",            # a private temporary folder on the process's own node, removed at the end
    "namespace",          # Dynamo namespace of this job
    "head_ip",            # address of the node that runs etcd, NATS and the frontend
    "node_ip",            # address of the node that runs this process
    "etcd_client_port", "etcd_peer_port", "nats_port", "http_port",  # head node
    "system_port",        # DYN_SYSTEM_PORT of a worker; each worker has its own
    "side_channel_port",  # VLLM_NIXL_SIDE_CHANNEL_PORT; data_parallel consecutive ports are reserved
    "kv_events_port",     # ZMQ publisher of KV events; data_parallel consecutive ports are reserved
    "serve_port",         # HTTP port of a control engine, which serves without Dynamo
    "master_ip", "master_port",  # torch.distributed rendezvous of an engine that spans nodes
})
_PLACEHOLDER = re.compile(r"%\{([a-z_]+)\}")

Role = Literal["prefill", "decode", "agg", "control"]
RecallTime = Literal["before", "during", "after"]


class SpecError(ValueError):
    """spec.json, or a value that fills it, is not what the runtime understands."""


@dataclass(frozen=True)
class RunInfo:
    recipe: str
    cluster: str
    launcher: Literal["local", "slurm"]
    device: Literal["cpu", "cuda"]
    results_dir: str
    created_utc: str
    repeat_command: str
    git_commit: str
    git_dirty_sha256: str
    """Empty when the working tree was clean."""
    overrides: dict[str, str] = field(default_factory=dict)
    tool_argv: tuple[str, ...] = ()
    """launch.py's Python and launch.py, which add plan.json and the page of the run where a node can see them."""


@dataclass(frozen=True)
class ModelSpec:
    id: str
    path: str
    served_name: str


@dataclass(frozen=True)
class NodeSlot:
    """One node of the allocation. component: index of the heterogeneous job component (0 for a plain job). index: position within it."""

    component: int
    index: int
    gpus: int
    """GPUs of this node that belong to the job (0 on a CPU-only cluster)."""


@dataclass(frozen=True)
class ServiceSpec:
    """etcd, NATS or the frontend, on node 0. container: whether it runs inside the cluster's container."""

    name: Literal["etcd", "nats", "frontend"]
    argv: tuple[str, ...]
    env: dict[str, str]
    ready: Literal["etcd_health", "tcp", "http"]
    container: bool = False


@dataclass(frozen=True)
class EngineRank:
    """The part of an engine on one node."""

    node: int
    gpus: tuple[int, ...]
    argv: tuple[str, ...]


@dataclass(frozen=True)
class EngineSpec:
    name: str
    """<role>-<replica>, as in prefill-0; also the stem of its log files (rank r > 0: prefill-0.r1)."""
    role: Role
    replica: int
    kind: Literal["dynamo.vllm", "dynamo.mocker", "vllm.serve"]
    python: str
    ranks: tuple[EngineRank, ...]
    env: dict[str, str]
    tensor_parallel: int
    pipeline_parallel: int
    data_parallel: int


@dataclass(frozen=True)
class SlurmSpec:
    """How a step is started: srun [srun_args] --nodelist ... --gres=<gres>:<n> [container_args] COMMAND."""

    gres: str
    """Generic resource name of GPUs, as in gpu or gpu:b300; empty: no GPUs are asked for."""
    srun_args: tuple[str, ...] = ()
    container_args: tuple[str, ...] = ()
    mem_per_engine_rank: str = ""
    """--mem of an engine step, as in 100G; needed with --exact on clusters that schedule memory."""
    cpus_per_engine_rank: int = 0


@dataclass(frozen=True)
class Deadlines:
    control_plane_s: float = 60.0
    engines_s: float = 1800.0
    gate_s: float = 120.0
    recall_request_s: float = 120.0
    behaviour_request_s: float = 120.0
    load_phase_s: float = 3600.0
    idle_s: float = 60.0
    """Waiting for in-flight requests to reach zero after load."""
    stop_s: float = 60.0
    """From the first TERM to the last KILL of an orderly stop."""


@dataclass(frozen=True)
class RecallSpec:
    prompts: int
    prompt_tokens: int
    when: tuple[RecallTime, ...]
    max_tokens: int = 24
    concurrency: int = 1


@dataclass(frozen=True)
class AgreementSpec:
    """The same greedy prompts to the deployment and to the control engine; texts must be equal token for token."""

    prompts: int
    prompt_tokens: tuple[int, ...]
    max_tokens: int


@dataclass(frozen=True)
class SmokePrompt:
    """One prompt of PageSmoke: what the server counts as its tokens must lie in minimum_tokens..maximum_tokens."""

    name: Literal["short_last_page", "beyond_window"]
    minimum_tokens: int
    maximum_tokens: int


@dataclass(frozen=True)
class PageSmoke:
    """Prompts of the gate that pages of several KV cache groups could get wrong: hybrid manager on, prefill and decode apart.

    short_last_page: the last page at prefill is at most half full, so decode's block list pairs with prefill's by token position and not
    by their ends. beyond_window: at least one whole block lies before the sliding window and is not kept.
    """

    block_tokens: int
    """Largest block of all groups of both roles."""
    window_tokens: int
    """Largest sliding window; 0: the model has none."""
    prompts: tuple[SmokePrompt, ...]
    max_tokens: int
    """Tokens to generate for each."""


BehaviourCheck = Literal["build_identity", "tool_call_thinking_on", "tool_call_thinking_off", "json_schema"]


@dataclass(frozen=True)
class LoadPhase:
    name: str
    input_tokens: int
    output_tokens: int
    requests: int
    concurrency: int | None = None
    request_rate_per_s: float | None = None
    warmup_requests: int = 0
    seed: int = 1
    streaming: bool = True
    connection_reuse: Literal["pooled", "never"] = "never"
    max_error_rate_pct: float = 0.0
    output_length_tolerance_pct: float = 5.0
    timeout_s: float = 3600.0
    slos_ms: dict[str, float] = field(default_factory=dict)
    """AIPerf --goodput limits, as time_to_first_token: 1000 (milliseconds)."""


@dataclass(frozen=True)
class LoadSpec:
    aiperf: str
    """Path of the aiperf executable."""
    tokenizer: str
    phases: tuple[LoadPhase, ...]


@dataclass(frozen=True)
class TransferGroup:
    """Layers whose blocks are listed together in the hand-over: one KV cache group, or all layers with the hybrid manager off."""

    block_size_tokens: int
    """Tokens per block on the decode side."""
    window_tokens: int
    """Sliding window whose older blocks are not kept (hybrid manager on); 0: every block of the prompt is handed over."""
    bytes_per_block_per_decode_rank: tuple[int, ...]
    """One entry per decode rank, all layers of the group together."""


@dataclass(frozen=True)
class TransferPrediction:
    """What the geometry says of one prompt of T tokens without a prefix-cache hit: the bytes that all decode ranks read.

    sum over groups and decode ranks of blocks(T) * bytes_per_block; blocks(T) = ceil(T/b), less the (T - window + 1) // b blocks that
    lie wholly before the window where the group has one.
    """

    groups: tuple[TransferGroup, ...]
    formula: str

    def bytes_of_prompt(self, prompt_tokens: int) -> int:
        total = 0
        for group in self.groups:
            blocks = -(-prompt_tokens // group.block_size_tokens)
            if group.window_tokens:
                blocks -= max(0, prompt_tokens - group.window_tokens + 1) // group.block_size_tokens
            total += blocks * sum(group.bytes_per_block_per_decode_rank)
        return total


@dataclass(frozen=True)
class Proof:
    disaggregated: bool
    kv_load_failure_policy: str
    prediction: TransferPrediction | None
    mixed_heads: bool
    """Layers have unequal ratios of KV heads between the two TP sizes, so the per-region plan must be seen in the decode log."""
    patches: tuple[str, ...]
    file_sha256: dict[str, str]
    """Path relative to site-packages -> sha256 that it must have in the engine environment (patched and stock files alike)."""
    versions: dict[str, str]
    """Distribution -> version that must serve, as in {'vllm': '0.31.0'}; a local part (+cpu) is ignored."""
    log_patterns: dict[str, str] = field(default_factory=dict)
    """Name -> regular expression of a log line to count, as plan_line and active_line of the patch series."""
    text_checked: bool = True
    """False for the mocker: the verdict line says that no text was checked, and the run is never shown as correct."""


@dataclass(frozen=True)
class Spec:
    schema: int
    run: RunInfo
    model: ModelSpec
    nodes: tuple[NodeSlot, ...]
    services: tuple[ServiceSpec, ...]
    engines: tuple[EngineSpec, ...]
    slurm: SlurmSpec | None
    deadlines: Deadlines
    recall: RecallSpec | None
    agreement: AgreementSpec | None
    behaviour: tuple[BehaviourCheck, ...]
    load: LoadSpec | None
    proof: Proof
    page_smoke: PageSmoke | None = None
    """None: one KV cache group, the hybrid manager off, or no hand-over."""
    network_interface: str = ""
    """Interface whose address the nodes use; empty: NodeAddr of scontrol, or 127.0.0.1 for a local run."""
    http_port: int = 0
    """Port of the frontend; 0: a free one is chosen."""
    gpu_telemetry_url: str = ""
    """DCGM exporter to sample instead of nvidia-smi; %{node_ip} is allowed."""
    redact_keys: tuple[str, ...] = ("TOKEN", "SECRET", "PASSWORD", "PASSWD", "API_KEY", "APIKEY", "CREDENTIAL", "AUTH", "COOKIE")

    def engines_of(self, role: Role) -> tuple[EngineSpec, ...]:
        return tuple(e for e in self.engines if e.role == role)


def placeholders_in(text: str) -> set[str]:
    return set(_PLACEHOLDER.findall(text))


def fill(text: str, values: dict[str, str]) -> str:
    """Replace each %{name}; SpecError names a placeholder that has no value."""

    def one(match: re.Match[str]) -> str:
        name = match.group(1)
        if name not in values:
            raise SpecError(f"no value for %{{{name}}} in {text!r}; known: {', '.join(sorted(values))}")
        return values[name]

    return _PLACEHOLDER.sub(one, text)


T = TypeVar("T")


def to_json(value: Any) -> Any:
    """A dataclass tree as JSON values: tuples become lists, nothing else changes."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_json(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {k: to_json(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [to_json(v) for v in value]
    return value


@functools.cache
def _hints(cls: type) -> dict[str, Any]:
    return typing.get_type_hints(cls)


def from_json(cls: type[T], data: Any, path: str = "") -> T:
    """The inverse of to_json; SpecError names the dotted path of an unknown, missing or mistyped value."""
    if not isinstance(data, dict):
        raise SpecError(f"{path or cls.__name__}: expected an object, found {type(data).__name__}")
    hints = _hints(typing.cast(Any, cls))
    fields = {f.name: f for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    unknown = sorted(set(data) - set(fields))
    if unknown:
        raise SpecError(f"{path or cls.__name__}: unknown keys {unknown}")
    values = {}
    for name, f in fields.items():
        here = f"{path}.{name}" if path else name
        if name in data:
            values[name] = _typed(hints[name], data[name], here)
        elif f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING:
            raise SpecError(f"{here}: missing")
    return cls(**values)


def _typed(hint: Any, value: Any, path: str) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [a for a in args if a is not type(None)]
        return _typed(inner, value, path)
    if origin is Literal:
        if value not in args:
            raise SpecError(f"{path}: {value!r} is not one of {list(args)}")
        return value
    if origin is tuple:
        if not isinstance(value, list):
            raise SpecError(f"{path}: expected a list, found {type(value).__name__}")
        return tuple(_typed(args[0], v, f"{path}[{i}]") for i, v in enumerate(value))
    if origin is dict:
        if not isinstance(value, dict):
            raise SpecError(f"{path}: expected an object, found {type(value).__name__}")
        return {k: _typed(args[1], v, f"{path}.{k}") for k, v in value.items()}
    if dataclasses.is_dataclass(hint):
        return from_json(typing.cast(type, hint), value, path)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, hint) or (isinstance(value, bool) and hint is not bool):
        raise SpecError(f"{path}: expected {hint.__name__}, found {value!r}")
    return value


def load_spec(path: Path) -> Spec:
    """Read and check spec.json; SpecError on another schema version, unknown keys or wrong types."""
    data = json.loads(path.read_text(encoding="utf-8"))
    if data.get("schema") != SCHEMA_VERSION:
        raise SpecError(f"{path}: schema {data.get('schema')!r}; this runtime understands {SCHEMA_VERSION}")
    return from_json(Spec, data)
