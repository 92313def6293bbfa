"""vLLM servers of one machine, many at once: each is a producer and a consumer of KV caches, so a few make every pair of TP sizes."""

from __future__ import annotations

import json
import os
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from pdlaunch.node.http import Exchange, HttpError
from pdlaunch.node.process import Child, stop_together, tail
from pdlaunch.node.worker import ShmWatch

CONNECTOR = {"kv_connector": "NixlConnector", "kv_role": "kv_both", "kv_load_failure_policy": "fail"}
# NVLink multicast needs rights over the host's switch that a guest may lack; the rest keeps the engines offline and on loopback.
COMMON_ENV = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_HOST_IP": "127.0.0.1",
    "VLLM_NIXL_SIDE_CHANNEL_HOST": "127.0.0.1",
    "NCCL_NVLS_ENABLE": "0",
    "TORCH_SYMM_MEM_DISABLE_MULTICAST": "1",
    "NVSHMEM_DISABLE_NVLS": "1",
    "VLLM_ALLREDUCE_USE_SYMM_MEM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "GLOO_SOCKET_IFNAME": "lo",
}
CPU_ENV = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "UCX_TLS": "tcp,self,sm,cma",
    "UCX_NET_DEVICES": "lo",
    "NIXL_PTHR_DELAY_US": "10000",
}


@dataclass(frozen=True)
class Server:
    """One engine. gpus: order of ALL visible GPUs, of which the first `tp` are used; env: the name of the environment folder."""

    name: str
    env: str
    model: Path
    tp: int
    gpus: tuple[int, ...] = ()
    kv_mib: int = 1024
    max_model_len: int = 4096
    max_batched_tokens: int = 4096
    max_seqs: int = 16
    dtype: str = "bfloat16"
    backend: str = "TRITON_ATTN"
    kv_dtype: str = "auto"
    block_size: int = 64
    hybrid_manager: bool = False
    dummy: bool = False
    extra: tuple[str, ...] = ()
    variables: dict[str, str] = field(default_factory=dict)


@dataclass
class Running:
    server: Server
    child: Child
    url: str
    started: float
    ready_s: float | None = None

    @property
    def name(self) -> str:
        return self.server.name


def command(server: Server, python: Path, port: int, device: str) -> list[str]:
    argv = [
        str(python),
        "-m",
        "vllm.entrypoints.cli.main",
        "serve",
        str(server.model),
        "--served-model-name",
        "m",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
        "--tensor-parallel-size",
        str(server.tp),
        "--dtype",
        server.dtype,
        "--max-model-len",
        str(server.max_model_len),
        "--max-num-batched-tokens",
        str(server.max_batched_tokens),
        "--max-num-seqs",
        str(server.max_seqs),
        "--block-size",
        str(server.block_size),
        "--kv-cache-memory-bytes",
        str(server.kv_mib * 2**20),
        "--no-enable-prefix-caching",
        "--enforce-eager",
        "--disable-uvicorn-access-log",
        "--kv-transfer-config",
        json.dumps(CONNECTOR),
    ]
    if not server.hybrid_manager:
        argv.append("--disable-hybrid-kv-cache-manager")
    if server.kv_dtype != "auto":
        argv += ["--kv-cache-dtype", server.kv_dtype]
    if server.dummy:
        argv += ["--load-format", "dummy"]
    if device == "cuda":
        # The share is only vLLM's start check (free memory of a GPU that others use too); the cache has its own size above.
        argv += ["--attention-backend", server.backend, "--gpu-memory-utilization", "0.05"]
        if server.backend == "FLASH_ATTN":
            # vLLM takes FlashAttention 4 for mixed head sizes as soon as its sources are there, also without the CuTe DSL that they need.
            argv += ["--attention-config", '{"flash_attn_version": 3}']
    return [*argv, *server.extra]


class Fleet:
    """Servers by name; every one is stopped at the end, also after an error."""

    def __init__(self, envs: Path, out: Path, device: str, first_port: int = 21000) -> None:
        self.envs, self.out, self.device, self.next = envs, out, device, first_port
        self.running: dict[str, Running] = {}
        self.shm = ShmWatch()

    def start(self, server: Server) -> None:
        """The process, without waiting. 20 ports of its own keep servers that start together out of each other's way."""
        port, self.next = self.next, self.next + 20
        env = {**os.environ, **COMMON_ENV, **(CPU_ENV if self.device == "cpu" else {}), **server.variables}
        env |= {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port + 1), "VLLM_PORT": str(port + 2)}
        if self.device == "cuda":
            env["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, server.gpus))
        argv = command(server, self.envs / server.env / "bin" / "python", port, self.device)
        child = Child(server.name, argv, env, self.out / "logs" / f"{server.name}.log")
        self.running[server.name] = Running(server, child, f"http://127.0.0.1:{port}", time.monotonic())

    def wait(self, names: list[str], deadline_s: float) -> dict[str, str]:
        """Wait until each is ready, dead or late. Returns name -> what went wrong, for those that cannot be used."""
        end = time.monotonic() + deadline_s
        waiting, bad = set(names), {}
        while waiting:
            self.shm.look(os.getpid())
            for name in sorted(waiting):
                one = self.running[name]
                if (ended := one.child.poll()) is not None:
                    bad[name] = f"ended with exit code {ended.code}\n{tail(one.child.log, 30)}"
                elif healthy(one.url):
                    one.ready_s = round(time.monotonic() - one.started, 1)
                elif time.monotonic() > end:
                    bad[name] = f"not ready after {deadline_s:g} s\n{tail(one.child.log, 12)}"
                else:
                    continue
                waiting.discard(name)
            threading.Event().wait(0.5)
        return bad

    def stop(self, names: list[str] | None = None, grace_s: float = 8.0) -> None:
        chosen = [self.running.pop(name) for name in (names or list(self.running)) if name in self.running]
        self.shm.look(os.getpid(), again=True)
        stop_together([one.child for one in chosen], grace_s)
        self.shm.remove_left()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def healthy(url: str) -> bool:
    try:
        with Exchange("GET", f"{url}/health", timeout_s=2.0) as exchange:
            return exchange.status == 200
    except HttpError:
        return False
