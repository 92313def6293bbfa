"""Hand-written specs for the tests of the on-node runtime: small deployments of real parts on loopback."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from pdlaunch.node.contracts import write_json
from pdlaunch.node.spec import (
    Deadlines,
    EngineRank,
    EngineSpec,
    ModelSpec,
    NodeSlot,
    Proof,
    RecallSpec,
    Role,
    RunInfo,
    ServiceSpec,
    Spec,
    to_json,
)

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "models" / "gemma4-recall-4x1"
MOCKER_MODEL = ROOT / "models" / "mocker-words"
LOOPBACK = {
    "ETCD_ENDPOINTS": "http://%{head_ip}:%{etcd_client_port}",
    "NATS_SERVER": "nats://%{head_ip}:%{nats_port}",
    "DYN_NAMESPACE": "%{namespace}",
    "DYN_TCP_RPC_HOST": "%{node_ip}",
    "DYN_TCP_RESPONSE_STREAM_HOST": "%{node_ip}",
    "DYN_EVENT_PLANE_HOST": "%{node_ip}",
    "DYN_DISCOVERY_BACKEND": "etcd",
    "DYN_REQUEST_PLANE": "tcp",
    "DYN_EVENT_PLANE": "nats",
    "DYN_SDK_DISABLE_ANSI_LOGGING": "1",
    "HF_HUB_OFFLINE": "1",
    "ETCD_LEASE_TTL": "60",
    "DYN_GRACEFUL_SHUTDOWN_GRACE_PERIOD_SECS": "0",
}
WORKER = {**LOOPBACK, "DYN_SYSTEM_HOST": "%{node_ip}", "DYN_SYSTEM_PORT": "%{system_port}"}
VLLM_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "VLLM_HOST_IP": "%{node_ip}",
    "GLOO_SOCKET_IFNAME": "lo",
    "VLLM_NO_USAGE_STATS": "1",
    "UCX_TLS": "tcp,self,sm,cma",
    "UCX_NET_DEVICES": "lo",
    "NIXL_PTHR_DELAY_US": "10000",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "%{node_ip}",
    "VLLM_NIXL_SIDE_CHANNEL_PORT": "%{side_channel_port}",
}


def program(name: str) -> str:
    """Path of etcd or nats-server: those of `make setup`, whatever else the machine has."""
    found = ROOT / ".envs" / "control-plane" / "bin" / name
    if not found.exists():
        raise FileNotFoundError(f"{found} is missing: run `make setup`")
    return str(found)


def etcd() -> ServiceSpec:
    client, peer = "http://%{head_ip}:%{etcd_client_port}", "http://%{head_ip}:%{etcd_peer_port}"
    argv = (
        program("etcd"),
        "--name",
        "head",
        "--data-dir",
        "%{tmp_dir}/etcd",
        "--listen-client-urls",
        client,
        "--advertise-client-urls",
        client,
        "--listen-peer-urls",
        peer,
        "--initial-advertise-peer-urls",
        peer,
        "--initial-cluster",
        f"head={peer}",
    )
    return ServiceSpec("etcd", argv, {}, "etcd_health")


def nats() -> ServiceSpec:
    argv = (program("nats-server"), "-a", "%{head_ip}", "-p", "%{nats_port}", "-js", "-sd", "%{tmp_dir}/nats")
    return ServiceSpec("nats", argv, {}, "tcp")


def frontend(python: Path) -> ServiceSpec:
    argv = (str(python), "-m", "dynamo.frontend", "--http-host", "%{head_ip}", "--http-port", "%{http_port}", "--namespace", "%{namespace}")
    return ServiceSpec("frontend", argv, LOOPBACK, "http")


def engine(
    role: Role,
    argv: tuple[str, ...],
    env: dict[str, str],
    kind: Literal["dynamo.vllm", "dynamo.mocker", "vllm.serve"],
    python: Path | str = sys.executable,
    **more: Any,
) -> EngineSpec:
    return EngineSpec(
        name=f"{role}-0",
        role=role,
        replica=0,
        kind=kind,
        python=str(python),
        ranks=(EngineRank(0, (), argv),),
        env=env,
        tensor_parallel=more.get("tensor_parallel", 1),
        pipeline_parallel=1,
        data_parallel=1,
    )


def mocker(role: Role, python: Path) -> EngineSpec:
    argv = (
        str(python),
        "-m",
        "dynamo.mocker",
        "--model-path",
        str(MOCKER_MODEL),
        "--model-name",
        "recall",
        "--disaggregation-mode",
        role,
        "--speedup-ratio",
        "10",
    )
    return engine(role, argv, WORKER, "dynamo.mocker", python)


def vllm(role: Role, python: Path, tensor_parallel: int = 1) -> EngineSpec:
    kv = {"prefill": "kv_producer", "decode": "kv_consumer"}[role]
    transfer = f'{{"kv_connector":"NixlConnector","kv_role":"{kv}","kv_load_failure_policy":"fail","kv_buffer_device":"cpu"}}'
    argv = (
        str(python),
        "-m",
        "dynamo.vllm",
        "--model",
        str(MODEL),
        "--served-model-name",
        "recall",
        "--disaggregation-mode",
        role,
        "--dtype",
        "float32",
        "--max-model-len",
        "4096",
        "--block-size",
        "64",
        "--disable-hybrid-kv-cache-manager",
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--kv-cache-memory-bytes",
        "134217728",
        "--max-num-seqs",
        "8",
        "--max-num-batched-tokens",
        "4096",
        "--tensor-parallel-size",
        str(tensor_parallel),
        "--kv-transfer-config",
        transfer,
    )
    return engine(role, argv, {**WORKER, **VLLM_CPU}, "dynamo.vllm", python, tensor_parallel=tensor_parallel)


def spec(results: Path, services: tuple[ServiceSpec, ...], engines: tuple[EngineSpec, ...], **changes: Any) -> Spec:
    """A local CPU spec; changes replace fields of Spec."""
    made = Spec(
        schema=1,
        run=RunInfo(
            recipe="hand-written",
            cluster="local",
            launcher="local",
            device="cpu",
            results_dir=str(results),
            created_utc="",
            repeat_command="",
            git_commit="",
            git_dirty_sha256="",
        ),
        model=ModelSpec(id="recall", path=str(MODEL), served_name="recall"),
        nodes=(NodeSlot(0, 0, 0),),
        services=services,
        engines=engines,
        slurm=None,
        deadlines=Deadlines(control_plane_s=60, engines_s=300, gate_s=60, recall_request_s=60, idle_s=20, stop_s=20),
        recall=None,
        agreement=None,
        behaviour=(),
        load=None,
        proof=Proof(
            disaggregated=True,
            kv_load_failure_policy="fail",
            prediction=None,
            mixed_heads=False,
            patches=(),
            file_sha256={},
            versions={},
            text_checked=False,
        ),
        network_interface="lo",
    )
    return replace(made, **changes)


def mocker_pair(results: Path, python: Path, **changes: Any) -> Spec:
    return spec(results, (etcd(), nats(), frontend(python)), (mocker("prefill", python), mocker("decode", python)), **changes)


def vllm_pair(results: Path, python: Path, decode_tp: int = 1, **changes: Any) -> Spec:
    proof = Proof(
        disaggregated=True,
        kv_load_failure_policy="fail",
        prediction=None,
        mixed_heads=decode_tp > 1,
        patches=(),
        file_sha256={},
        versions={"vllm": "0.31.0", "ai-dynamo": "1.6.1"},
    )
    recall = RecallSpec(prompts=9, prompt_tokens=800, when=("before", "after"))
    return spec(
        results,
        (etcd(), nats(), frontend(python)),
        (vllm("prefill", python), vllm("decode", python, decode_tp)),
        **{"proof": proof, "recall": recall, **changes},
    )


def write_bundle(folder: Path, made: Spec) -> Path:
    """A bundle as the launcher writes it: spec.json and a copy of the runtime. Returns the path of spec.json."""
    folder.mkdir(parents=True)
    shutil.copytree(ROOT / "pdlaunch" / "node", folder / "node", ignore=shutil.ignore_patterns("__pycache__"))
    write_json(folder / "spec.json", to_json(made))
    return folder / "spec.json"
