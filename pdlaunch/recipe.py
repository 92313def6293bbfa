"""What a person writes in recipes/<name>.yaml: frozen dataclasses whose field docstrings are the reference, and the rules across fields."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pdlaunch import yamlfile
from pdlaunch.errors import RecipeError
from pdlaunch.node.spec import BehaviourCheck, RecallTime
from pdlaunch.yamlfile import Document, key

NAME = r"[a-z0-9][a-z0-9.-]{0,62}"
_NOWHERE = Document(Path(), {}, {})
RoleName = Literal["prefill", "decode", "agg", "control"]


@dataclass(frozen=True, kw_only=True)
class Model:
    """The model to serve."""

    id: str
    """Name of the model: a key of the cluster's `models`, or else a folder relative to the repository root."""
    served_name: str
    """Name under which the frontend offers it; clients send it as `model`."""
    config: str = ""
    """A committed config.json, relative to the repository root, where the weights are not visible; empty: the model folder's own."""


@dataclass(frozen=True, kw_only=True)
class Versions:
    """Versions that must serve; the run is INVALID when others do. A local part such as +cpu is ignored."""

    dynamo: str = key(pattern=r"\d+\.\d+\.\d+.*")
    """Version of ai-dynamo."""
    vllm: str = key(pattern=r"\d+\.\d+\.\d+.*")
    """Version of vllm."""
    nixl: str = key(pattern=r"\d+\.\d+\.\d+.*")
    """Version of nixl."""
    aiperf: str = key(pattern=r"\d+\.\d+\.\d+.*")
    """Version of aiperf, in its own environment."""


@dataclass(frozen=True, kw_only=True)
class EngineArgs:
    """Arguments of an engine. Those under `engine_args` hold for every role; those under `engines.<role>.engine_args` win there."""

    dtype: Literal["auto", "float32", "float16", "bfloat16"] | None = None
    """--dtype. float32 on CPU: bfloat16 with prefix caching was not repeatable from run to run."""
    max_model_len: int | None = key(None, minimum=1)
    """--max-model-len in tokens; equal on both roles."""
    block_size: int | None = key(None, minimum=1)
    """--block-size: tokens per KV block. Must be equal on both roles: unequal sizes give wrong text with HTTP 200 on vLLM 0.31.0."""
    kv_cache_dtype: str | None = None
    """--kv-cache-dtype; part of the NIXL handshake, so it must be equal on both roles."""
    hybrid_kv_cache_manager: bool | None = None
    """false: --disable-hybrid-kv-cache-manager. Must be equal on both roles (NIXL compatibility hash)."""
    prefix_caching: bool | None = None
    """--enable-prefix-caching or --no-enable-prefix-caching; left out, Dynamo switches it on."""
    enforce_eager: bool | None = None
    """--enforce-eager: no CUDA graphs."""
    async_scheduling: bool | None = None
    """--async-scheduling or --no-async-scheduling."""
    gpu_memory_utilization: float | None = key(None, minimum=0.01, maximum=1.0)
    """--gpu-memory-utilization, a share of each GPU's memory (vLLM's default is 0.92)."""
    kv_cache_memory_mib: int | None = key(None, minimum=1)
    """--kv-cache-memory-bytes per rank, in MiB; wins over gpu_memory_utilization."""
    max_num_seqs: int | None = key(None, minimum=1)
    """--max-num-seqs: sequences in one scheduler step."""
    max_num_batched_tokens: int | None = key(None, minimum=1)
    """--max-num-batched-tokens in one scheduler step."""
    attention_backend: str | None = None
    """--attention-backend, as in TRITON_ATTN."""
    quantization: str | None = None
    """--quantization."""
    load_format: str | None = None
    """--load-format; dummy for random weights (recall must then be left out)."""
    seed: int | None = key(None, minimum=0)
    """--seed of the engine."""
    trust_remote_code: bool | None = None
    """--trust-remote-code."""
    tool_call_parser: str | None = None
    """Parser of tool calls, as in gemma4 (--dyn-tool-call-parser); set on the worker that owns the OpenAI surface: decode or agg."""
    reasoning_parser: str | None = None
    """Parser of the thinking part (--dyn-reasoning-parser); set where tool_call_parser is."""
    mocker_speedup: float | None = key(None, minimum=0.0)
    """--speedup-ratio of the mocker; only with `backend: mocker`."""
    mocker_kv_blocks: int | None = key(None, minimum=1)
    """--num-gpu-blocks-override of the mocker; only with `backend: mocker`."""


@dataclass(frozen=True, kw_only=True)
class Engine:
    """The engines of one role."""

    replicas: int = key(1, minimum=1, maximum=256)
    """How many engines of this role."""
    tensor_parallel: int = key(1, minimum=1, maximum=1024)
    """GPUs that split each layer (--tensor-parallel-size)."""
    pipeline_parallel: int = key(1, minimum=1, maximum=64)
    """Pipeline stages (--pipeline-parallel-size)."""
    data_parallel: int = key(1, minimum=1, maximum=64)
    """Data-parallel ranks inside one engine (--data-parallel-size); each has tensor_parallel x pipeline_parallel GPUs."""
    engine_args: EngineArgs = field(default_factory=EngineArgs)
    """Arguments of this role alone."""
    extra_args: tuple[str, ...] = ()
    """Flags that have no key here, each word its own item; checked against the parsers of the pinned versions."""
    env: dict[str, str] = key({})
    """Environment of this role alone."""

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel


@dataclass(frozen=True, kw_only=True)
class Engines:
    """Either prefill and decode together, or agg alone; control beside either."""

    prefill: Engine | None = None
    """Process prompts and hand over the KV cache."""
    decode: Engine | None = None
    """Read the KV cache and generate tokens."""
    agg: Engine | None = None
    """Do both: the aggregated deployment to compare with."""
    control: Engine | None = None
    """One plain `vllm serve` beside the deployment, for `agreement`: what the same model answers without disaggregation."""

    def present(self) -> dict[RoleName, Engine]:
        roles: tuple[RoleName, ...] = ("prefill", "decode", "agg", "control")
        return {role: engine for role in roles if (engine := getattr(self, role)) is not None}


@dataclass(frozen=True, kw_only=True)
class DeadlineKeys:
    """Deadlines in seconds; a wait that passes its deadline is reported as a hang of the thing waited for."""

    control_plane_s: float = key(60.0, minimum=1)
    """etcd and NATS answer."""
    engines_s: float = key(1800.0, minimum=1)
    """Every engine is registered."""
    gate_s: float = key(120.0, minimum=1)
    """The model is ready and a real completion through both roles has been read; also each further prompt of the gate."""
    recall_request_s: float = key(120.0, minimum=1)
    """One recall request."""
    behaviour_request_s: float = key(120.0, minimum=1)
    """One behaviour request."""
    idle_s: float = key(60.0, minimum=1)
    """In-flight requests reach zero after load."""
    stop_s: float = key(60.0, minimum=1)
    """From the first TERM to the last KILL."""


@dataclass(frozen=True, kw_only=True)
class Recall:
    """The recall check: unique codes hidden in long numbered lists, asked for greedily."""

    prompts: int = key(9, minimum=1, maximum=1000)
    """Prompts per round; each hides its code at another depth."""
    prompt_tokens: int = key(minimum=64)
    """Length of each prompt in tokens."""
    when: tuple[RecallTime, ...] = ("before", "during", "after")
    """Rounds: before, during and after load. Corruption that only load shows is a known case."""
    max_tokens: int = key(24, minimum=8)
    """Tokens to generate; raise it for models that think first."""
    concurrency: int = key(1, minimum=1)
    """Recall requests in flight at once."""


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """The same greedy prompts to the deployment and to `engines.control`; texts must be equal token for token."""

    prompts: int = key(minimum=1)
    """How many prompts."""
    prompt_tokens: tuple[int, ...] = ()
    """Their lengths in tokens, used in turn."""
    max_tokens: int = key(32, minimum=1)
    """Tokens to generate for each."""


@dataclass(frozen=True, kw_only=True)
class Load:
    """One AIPerf phase, in a fresh folder, judged by its JSON."""

    name: str = key(pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")
    """Name of the phase and of its folder."""
    input_tokens: int = key(minimum=1)
    """Prompt length (ISL)."""
    output_tokens: int = key(minimum=1)
    """Generated length (OSL); ignore_eos holds it."""
    requests: int = key(minimum=1)
    """Requests measured, without warm-up."""
    concurrency: int | None = key(None, minimum=1)
    """Requests in flight; give this or request_rate_per_s."""
    request_rate_per_s: float | None = key(None, minimum=0.0001)
    """Arrivals per second; give this or concurrency."""
    warmup_requests: int = key(0, minimum=0)
    """Requests before measuring."""
    seed: int = key(1, minimum=0)
    """Seed of the synthetic prompts."""
    streaming: bool = True
    """Needed for TTFT and ITL."""
    connection_reuse: Literal["pooled", "never"] = "never"
    """AIPerf's --connection-reuse-strategy. pooled delays the first tokens of a reused connection by up to 40 ms: never compare the two."""
    max_error_rate_pct: float = key(0.0, minimum=0, maximum=100)
    """Errors above this make the run INVALID."""
    output_length_tolerance_pct: float = key(5.0, minimum=0)
    """How far the mean output length may lie from output_tokens."""
    timeout_s: float = key(3600.0, minimum=1)
    """Deadline of the phase."""
    slos_ms: dict[str, float] = key({})
    """AIPerf goodput limits in milliseconds, as {time_to_first_token: 1000}."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """One deployment, its checks and its load. Site facts are in the cluster file, so that a recipe is portable."""

    name: str = key(pattern=NAME)
    """Equals the file name without .yaml."""
    model: Model
    """The model to serve."""
    versions: Versions
    """Versions that must serve."""
    engines: Engines
    """Engines by role."""
    description: str = ""
    """One line for `launch.py list`."""
    backend: Literal["vllm", "mocker"] = "vllm"
    """mocker: Dynamo's simulated engine. No text is checked then, and the verdict line says so."""
    patches: tuple[str, ...] = ()
    """Patches of patches/series.yaml that the engines must carry; the cluster's environment with exactly these is used."""
    engine_args: EngineArgs = field(default_factory=EngineArgs)
    """Arguments of every engine."""
    extra_args: tuple[str, ...] = ()
    """Flags of every engine that have no key here."""
    env: dict[str, str] = key({})
    """Environment of every engine; what the launcher owns is refused."""
    placement: Literal["spread", "pack"] = "spread"
    """spread: each role on nodes of its own. pack: the fewest nodes that hold all engines. No effect with `launcher: local`."""
    nixl_progress_thread_delay_us: int | None = key(None, minimum=0)
    """NIXL_PTHR_DELAY_US: pause of NIXL's progress thread, which otherwise spins one core per worker; needs the patch that reads it."""
    kv_connector_extra_config: dict[str, Any] = key({})
    """NixlConnector's kv_connector_extra_config on both roles, as in {kv_lease_duration: 60}."""
    allow_unsupported_pair: str = ""
    """The reason to run a pair of tensor-parallel sizes that the pinned vLLM cannot serve for this model, as in 'shows the failure'."""
    deadlines: DeadlineKeys = field(default_factory=DeadlineKeys)
    """How long each wait may last."""
    recall: Recall | None = None
    """The recall check; left out only where no text can be judged."""
    agreement: Agreement | None = None
    """Comparison with engines.control."""
    behaviour: tuple[BehaviourCheck, ...] = ()
    """Checks beside recall: build_identity, tool_call_thinking_on, tool_call_thinking_off, json_schema."""
    load: tuple[Load, ...] = ()
    """AIPerf phases, in this order."""
    time_limit_minutes: int = key(60, minimum=1, maximum=525600)
    """Slurm's --time for the whole job."""
    source: Document = field(default=_NOWHERE, compare=False, repr=False, metadata={"written": False})

    def args_of(self, role: RoleName) -> EngineArgs:
        """engine_args with those of the role laid over them."""
        import dataclasses

        engine = self.engines.present()[role]
        own = {f.name: v for f in dataclasses.fields(EngineArgs) if (v := getattr(engine.engine_args, f.name)) is not None}
        return dataclasses.replace(self.engine_args, **own)

    def key_of_arg(self, role: RoleName, name: str) -> str:
        """Dotted key of the file that sets an engine argument for a role."""
        own = getattr(self.engines.present()[role].engine_args, name)
        return f"engines.{role}.engine_args.{name}" if own is not None else f"engine_args.{name}"

    @property
    def disaggregated(self) -> bool:
        return self.engines.prefill is not None


def find(name_or_path: str, folder: Path, kind: str) -> Path:
    """The file of a recipe or cluster: a path when it has a slash or ends in .yaml, else <folder>/<name>.yaml."""
    if "/" in name_or_path or name_or_path.endswith((".yaml", ".yml")):
        path = Path(name_or_path)
        if not path.is_file():
            raise RecipeError(f"no {kind} file {name_or_path!r}", rule=f"a name of {folder}/ or a path of a file")
        return path
    path = folder / f"{name_or_path}.yaml"
    if not path.is_file():
        names = sorted(p.stem for p in folder.glob("*.yaml"))
        raise RecipeError(
            f"no {kind} {name_or_path!r}",
            rule=f"one of {', '.join(names)}, or a path",
            hint=yamlfile.nearest(name_or_path, names) or "launch.py list",
        )
    return path


def load(path: Path, settings: tuple[str, ...] = ()) -> Recipe:
    """Read, override, bind and check one recipe; RecipeError on the first thing that is wrong."""
    import dataclasses

    from pdlaunch.recipe_rules import check

    document = yamlfile.override(yamlfile.read(path), settings)
    recipe = dataclasses.replace(yamlfile.bind(Recipe, document), source=document)
    if recipe.name != path.stem:
        raise RecipeError(
            f"name is {recipe.name!r} but the file is {path.name}",
            where=document.where("name"),
            rule="name equals the file name without .yaml",
            hint=f"write name: {path.stem}, or rename the file",
        )
    check(recipe)
    return recipe
