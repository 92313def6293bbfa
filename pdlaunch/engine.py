"""Command lines and environments of etcd, NATS, the frontend and the engines, with %{placeholders} for what is known only on the node."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

from pdlaunch import flags
from pdlaunch.cluster import Cluster
from pdlaunch.errors import RecipeError, Where
from pdlaunch.node.spec import EngineRank, EngineSpec, ServiceSpec
from pdlaunch.placement import PlacedEngine, Placement
from pdlaunch.recipe import EngineArgs, Recipe, RoleName
from pdlaunch.yamlfile import nearest

MIB = 1024 * 1024
KV_LOAD_FAILURE_POLICY = "fail"
"""With 'recompute' a failed transfer is redone by decode: the text is right and the measurement is of something else."""

_VALUE_FLAGS = {
    "dtype": "--dtype",
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "gpu_memory_utilization": "--gpu-memory-utilization",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "attention_backend": "--attention-backend",
    "quantization": "--quantization",
    "load_format": "--load-format",
    "seed": "--seed",
}
_BOOL_FLAGS = {
    "hybrid_kv_cache_manager": ("--no-disable-hybrid-kv-cache-manager", "--disable-hybrid-kv-cache-manager"),
    "prefix_caching": ("--enable-prefix-caching", "--no-enable-prefix-caching"),
    "enforce_eager": ("--enforce-eager", "--no-enforce-eager"),
    "async_scheduling": ("--async-scheduling", "--no-async-scheduling"),
    "trust_remote_code": ("--trust-remote-code", "--no-trust-remote-code"),
}
_PARSERS = {"tool_call_parser": "--dyn-tool-call-parser", "reasoning_parser": "--dyn-reasoning-parser"}
_MOCKER_FLAGS = {
    "max_model_len": "--max-model-len",
    "block_size": "--block-size",
    "kv_cache_dtype": "--kv-cache-dtype",
    "max_num_seqs": "--max-num-seqs",
    "max_num_batched_tokens": "--max-num-batched-tokens",
    "mocker_speedup": "--speedup-ratio",
    "mocker_kv_blocks": "--num-gpu-blocks-override",
}
_PLANES = ("--discovery-backend", "etcd", "--request-plane", "tcp", "--event-plane", "nats")
_KV_ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


@dataclass(frozen=True)
class Paths:
    """Where things are on the nodes: absolute, decided before rendering."""

    python: str
    model: str
    aiperf: str
    etcd: str
    nats: str


def program_of(recipe: Recipe, role: RoleName) -> Literal["dynamo.vllm", "dynamo.mocker", "vllm.serve"]:
    if recipe.backend == "mocker":
        return "dynamo.mocker"
    return "vllm.serve" if role == "control" else "dynamo.vllm"


def services(recipe: Recipe, cluster: Cluster, paths: Paths) -> tuple[ServiceSpec, ...]:
    """etcd, NATS and the frontend of node 0; each listens on the node's own address and keeps its data in the job's private folder."""
    boxed = cluster.container is not None and cluster.container.control_plane
    client, peer = "http://%{head_ip}:%{etcd_client_port}", "http://%{head_ip}:%{etcd_peer_port}"
    etcd = [paths.etcd, "--name", "head", "--data-dir", "%{tmp_dir}/etcd", "--logger", "zap", "--log-outputs", "stderr"]
    etcd += ["--listen-client-urls", client, "--advertise-client-urls", client]
    etcd += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"head={peer}"]
    etcd += ["--initial-cluster-token", "%{namespace}", "--initial-cluster-state", "new"]
    nats = [paths.nats, "-a", "%{head_ip}", "-p", "%{nats_port}", "-js", "-sd", "%{tmp_dir}/nats"]
    frontend = [paths.python, "-m", "dynamo.frontend", "--router-mode", "round-robin", *_PLANES, "--namespace", "%{namespace}"]
    frontend += ["--http-host", "%{head_ip}", "--http-port", "%{http_port}"]
    return (
        ServiceSpec("etcd", tuple(etcd), {}, "etcd_health", boxed),
        ServiceSpec("nats", tuple(nats), {}, "tcp", boxed),
        ServiceSpec("frontend", tuple(frontend), {**_dynamo_env(), **_site_env(cluster)}, "http", cluster.container is not None),
    )


def _site_env(cluster: Cluster) -> dict[str, str]:
    return dict(sorted(cluster.engine_env.items()))


def _common_env() -> dict[str, str]:
    return {
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "%{node_ip}",
        "TMPDIR": "%{tmp_dir}",
    }


def _dynamo_env() -> dict[str, str]:
    """Planes and addresses. The event plane is named because NATS_SERVER alone makes Dynamo 1.6.1 wait for NATS at start."""
    return {
        **_common_env(),
        "ETCD_ENDPOINTS": "http://%{head_ip}:%{etcd_client_port}",
        "NATS_SERVER": "nats://%{head_ip}:%{nats_port}",
        "DYN_DISCOVERY_BACKEND": "etcd",
        "DYN_REQUEST_PLANE": "tcp",
        "DYN_EVENT_PLANE": "nats",
        "DYN_NAMESPACE": "%{namespace}",
        "DYN_TCP_RPC_HOST": "%{node_ip}",
        "DYN_TCP_RESPONSE_STREAM_HOST": "%{node_ip}",
        "DYN_EVENT_PLANE_HOST": "%{node_ip}",
        "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
        # The supervisor stops an engine only when nothing is in flight; Dynamo's own wait (5 s for each role) would use up the stop.
        "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
    }


def _engine_env(recipe: Recipe, cluster: Cluster, role: RoleName) -> dict[str, str]:
    env = _common_env() if role == "control" else _dynamo_env()
    if role != "control":
        env |= {"DYN_SYSTEM_HOST": "%{node_ip}", "DYN_SYSTEM_PORT": "%{system_port}"}
    if role in _KV_ROLES and recipe.backend == "vllm":
        env |= {"VLLM_NIXL_SIDE_CHANNEL_HOST": "%{node_ip}", "VLLM_NIXL_SIDE_CHANNEL_PORT": "%{side_channel_port}"}
    if recipe.nixl_progress_thread_delay_us is not None:
        env["NIXL_PTHR_DELAY_US"] = str(recipe.nixl_progress_thread_delay_us)
    return env | _site_env(cluster) | dict(sorted((recipe.env | recipe.engines.present()[role].env).items()))


def engines(recipe: Recipe, cluster: Cluster, placement: Placement, paths: Paths) -> tuple[EngineSpec, ...]:
    """One EngineSpec per replica, one argv per node that it spans."""
    out = []
    for placed in placement.engines:
        engine = recipe.engines.present()[placed.role]
        argv = _argv(recipe, cluster, placed.role, paths)
        out.append(
            EngineSpec(
                name=placed.name,
                role=placed.role,
                replica=placed.replica,
                kind=program_of(recipe, placed.role),
                python=paths.python,
                ranks=tuple(EngineRank(r.node, r.gpus, argv + _rank_flags(placed, i)) for i, r in enumerate(placed.ranks)),
                env=_engine_env(recipe, cluster, placed.role),
                tensor_parallel=engine.tensor_parallel,
                pipeline_parallel=engine.pipeline_parallel,
                data_parallel=engine.data_parallel,
            )
        )
    return tuple(out)


def _rank_flags(placed: PlacedEngine, rank: int) -> tuple[str, ...]:
    """Flags of one node of an engine that spans several (vllm/entrypoints/cli/serve.py:run_headless); rank 0 alone talks to Dynamo."""
    if len(placed.ranks) == 1:
        return ()
    shared: tuple[str, ...] = ("--nnodes", str(len(placed.ranks)), "--node-rank", str(rank))
    shared += ("--master-addr", "%{master_ip}", "--master-port", "%{master_port}")
    return shared if rank == 0 else (*shared, "--headless")


def _argv(recipe: Recipe, cluster: Cluster, role: RoleName, paths: Paths) -> tuple[str, ...]:
    extra = recipe.extra_args + recipe.engines.present()[role].extra_args
    if recipe.backend == "mocker":
        return (*_mocker_argv(recipe, role, paths), *extra)
    if role == "control":
        head = [paths.python, "-m", "vllm.entrypoints.cli.main", "serve", paths.model, "--host", "%{node_ip}", "--port", "%{serve_port}"]
    else:
        head = [paths.python, "-m", "dynamo.vllm", "--model", paths.model, "--disaggregation-mode", role, *_PLANES]
    head += ["--served-model-name", recipe.model.served_name, *_vllm_flags(recipe, role), *_parser_flags(recipe, role)]
    if role in _KV_ROLES:
        head += ["--kv-transfer-config", json.dumps(_kv_transfer(recipe, cluster, role), separators=(",", ":"))]
    return (*head, *extra)


def _mocker_argv(recipe: Recipe, role: RoleName, paths: Paths) -> list[str]:
    args, copies = recipe.args_of(role), recipe.engines.present()[role].data_parallel
    head = [paths.python, "-m", "dynamo.mocker", "--model-path", paths.model, "--model-name", recipe.model.served_name]
    head += ["--disaggregation-mode", role, *_PLANES, *_given(args, _MOCKER_FLAGS)]
    if args.prefix_caching is not None:
        head.append(_BOOL_FLAGS["prefix_caching"][0 if args.prefix_caching else 1])
    return [*head, "--data-parallel-size", str(copies)] if copies > 1 else head


def _vllm_flags(recipe: Recipe, role: RoleName) -> list[str]:
    """Sizes and engine_args, which dynamo.vllm and vllm serve spell alike."""
    engine, args = recipe.engines.present()[role], recipe.args_of(role)
    out = ["--tensor-parallel-size", str(engine.tensor_parallel)]
    if engine.pipeline_parallel > 1:
        out += ["--pipeline-parallel-size", str(engine.pipeline_parallel)]
    if engine.data_parallel > 1:
        out += ["--data-parallel-size", str(engine.data_parallel)]
    out += _given(args, _VALUE_FLAGS)
    if args.kv_cache_memory_mib is not None:
        out += ["--kv-cache-memory-bytes", str(args.kv_cache_memory_mib * MIB)]
    for name, (on, off) in _BOOL_FLAGS.items():
        if (switch := getattr(args, name)) is not None:
            out.append(on if switch else off)
    return out


def _given(args: EngineArgs, table: dict[str, str]) -> list[str]:
    return [word for name, flag in table.items() if (value := getattr(args, name)) is not None for word in (flag, _text(value))]


def _text(value: object) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _parser_flags(recipe: Recipe, role: RoleName) -> list[str]:
    """Parsers go to the worker whose model card carries the OpenAI surface; prefill's card does not."""
    args = recipe.args_of(role)
    if role == "prefill":
        return []
    out: list[str] = []
    prefix = "--" if role == "control" else "--dyn-"
    if args.tool_call_parser:
        out += [*(["--enable-auto-tool-choice"] if role == "control" else []), f"{prefix}tool-call-parser", args.tool_call_parser]
    if args.reasoning_parser:
        out += [f"{prefix}reasoning-parser", args.reasoning_parser]
    return out


def _kv_transfer(recipe: Recipe, cluster: Cluster, role: RoleName) -> dict[str, object]:
    config: dict[str, object] = {
        "kv_connector": "NixlConnector",
        "kv_role": _KV_ROLES[role],
        "kv_load_failure_policy": KV_LOAD_FAILURE_POLICY,
    }
    if cluster.device == "cpu":
        config["kv_buffer_device"] = "cpu"
    if recipe.kv_connector_extra_config:
        config["kv_connector_extra_config"] = recipe.kv_connector_extra_config
    return config


def check(recipe: Recipe, cluster: Cluster) -> None:
    """RecipeError on illegal or owned flags and variables, and on engine_args that the mocker does not have."""
    source = recipe.source
    for role, engine in recipe.engines.present().items():
        program = program_of(recipe, role)
        places = [source.where(("extra_args", i)) for i in range(len(recipe.extra_args))]
        flags.check_args(program, recipe.extra_args, places)
        places = [source.where(("engines", role, "extra_args", i)) for i in range(len(engine.extra_args))]
        flags.check_args(program, engine.extra_args, places)
        flags.check_env((program,), engine.env, {k: source.where(("engines", role, "env", k)) for k in engine.env})
        flags.check_env((program,), recipe.env, {k: source.where(("env", k)) for k in recipe.env})
        flags.check_env(
            (program, "dynamo.frontend"), cluster.engine_env, {k: cluster.source.where(("engine_env", k)) for k in cluster.engine_env}
        )
        _check_choices(recipe, role, program)


def _check_choices(recipe: Recipe, role: RoleName, program: str) -> None:
    """engine_args whose flag has a closed list of values, or that the mocker lacks."""
    args, known = recipe.args_of(role), flags.flag_list(program).by_name
    table = _MOCKER_FLAGS if recipe.backend == "mocker" else _VALUE_FLAGS | (_PARSERS if program == "dynamo.vllm" else {})
    for name in vars(args):
        value = getattr(args, name)
        if value is None:
            continue
        where: Where = recipe.source.where(recipe.key_of_arg(role, name))
        if recipe.backend == "mocker" and name not in table and name != "prefix_caching":
            raise RecipeError(
                f"{name} with the mocker",
                where=where,
                rule=f"the mocker knows {', '.join([*table, 'prefix_caching'])}",
                hint="leave it out",
            )
        choices = known[table[name]]["choices"] if name in table else None
        if choices and str(value) not in choices:
            raise RecipeError(
                f"{name} {value!r}",
                where=where,
                rule=f"one of {', '.join(choices)}",
                hint=nearest(str(value), choices) or nearest(str(value).upper(), choices),
            )
