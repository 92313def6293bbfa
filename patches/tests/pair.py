"""A prefill and a decode engine made of vLLM's real NIXL connector workers, one per TP rank, in one process on CPU.

Real: VllmConfig, KV cache specs, groups and allocation, connector workers, the handshake over ZeroMQ with its msgpack
payload and listener, block reads, notifications, reference counts. Replaced: the NIXL agent (copying_nixl), the rank
and world size that torch.distributed would give, and the model runner (the test writes the caches itself).
"""

from __future__ import annotations

import contextlib
import json
import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import msgspec
import numpy as np
import torch
from copying_nixl import Network
from vllm.config import (
    CacheConfig,
    DeviceConfig,
    KVTransferConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    VllmConfig,
)
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker as bw
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.base_scheduler import NixlBaseConnectorScheduler
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlConnectorMetadata
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.pull_worker import NixlPullConnectorWorker
from vllm.model_executor.layers.attention.attention import Attention
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.core.kv_cache_utils import get_kv_cache_config_from_groups, get_kv_cache_groups
from vllm.v1.kv_cache_interface import KVCacheLayout, UniformTypeKVCacheSpecs
from vllm.v1.worker.utils import allocate_kv_cache

# What a D cache holds before anything arrives; random data of a test avoids it.
UNTOUCHED = 0x5A5A
DEADLINE_S = 30.0


@dataclass(frozen=True)
class Geometry:
    """Attention layers of a model: five sliding, one global, as in gemma-4; or all alike with global_heads None."""

    sliding_heads: int
    global_heads: int | None
    layers: int = 6
    head_dim: int = 32
    global_head_dim: int = 64

    def is_global(self, layer: int) -> bool:
        return self.global_heads is not None and layer % 6 == 5

    def heads(self, layer: int) -> int:
        return self.global_heads if self.is_global(layer) else self.sliding_heads  # type: ignore[return-value]

    def dim(self, layer: int) -> int:
        return self.global_head_dim if self.is_global(layer) else self.head_dim

    def heads_of_rank(self, layer: int, rank: int, tp: int) -> range:
        """KV heads that QKVParallelLinear gives a rank: a share, or one head that several ranks hold copies of."""
        total = self.heads(layer)
        first = rank * total // tp
        return range(first, first + max(1, total // tp))

    def minimum_bytes(self, tp: int, tokens: int) -> int:
        """Bytes that all ranks of one engine hold for whole blocks of `tokens` tokens (bf16, K and V)."""
        per_token = sum(max(1, self.heads(i) // tp) * self.dim(i) * 2 * 2 for i in range(self.layers))
        return tp * tokens * per_token


@lru_cache
def model_dir(geometry: Geometry) -> str:
    """A folder with the config of a Gemma-4 text model (or a Llama one) of this geometry."""
    heads = max(geometry.sliding_heads, geometry.global_heads or 1)
    config: dict[str, Any] = {
        "dtype": "bfloat16",
        "hidden_size": 2 * heads * geometry.head_dim,
        "intermediate_size": 64,
        "num_attention_heads": 2 * heads,
        "num_key_value_heads": geometry.sliding_heads,
        "head_dim": geometry.head_dim,
        "num_hidden_layers": geometry.layers,
        "vocab_size": 64,
        "max_position_embeddings": 8192,
    }
    if geometry.global_heads is None:
        config |= {"model_type": "llama", "architectures": ["LlamaForCausalLM"]}
    else:
        globals_ = [i for i in range(geometry.layers) if geometry.is_global(i)]
        wide = {"head_dim": geometry.global_head_dim, "num_key_value_heads": geometry.global_heads}
        config |= {
            "model_type": "gemma4_text",
            "architectures": ["Gemma4ForCausalLM"],
            "layer_types": [
                "full_attention" if geometry.is_global(i) else "sliding_attention" for i in range(geometry.layers)
            ],
            "per_layer_config": {str(i): wide for i in globals_},
            "sliding_window": 1024,
            "hidden_size_per_layer_input": 0,
            "vocab_size_per_layer_input": 64,
            "attention_k_eq_v": True,
            "num_kv_shared_layers": 0,
        }
    folder = Path(tempfile.mkdtemp(prefix="geometry-"))
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


@lru_cache
def model_config(geometry: Geometry) -> ModelConfig:
    return ModelConfig(
        model=model_dir(geometry), skip_tokenizer_init=True, dtype="bfloat16", max_model_len=4096
    )


@dataclass
class Settings:
    """What an engine is started with. block_size: tokens. num_blocks: blocks of the pool, block 0 is vLLM's null block."""

    block_size: int = 64
    num_blocks: int = 12
    hybrid: bool = False
    layout: str = "LBHNC"
    host_buffer: bool = False
    page_padding: int = 0
    worker_class: type = NixlPullConnectorWorker
    extra_config: dict[str, Any] = field(default_factory=dict)
    permute: bool = False
    dcp: int = 1


def _config(geometry: Geometry, settings: Settings) -> VllmConfig:
    config = VllmConfig(
        model_config=model_config(geometry),
        cache_config=CacheConfig(block_size=settings.block_size),
        scheduler_config=SchedulerConfig(
            max_num_seqs=8,
            max_num_batched_tokens=4096,
            max_model_len=4096,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=not settings.hybrid,
        ),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector",
            kv_role="kv_both",
            kv_buffer_device="cpu",
            enable_permute_local_kv=settings.permute,
            kv_connector_extra_config=settings.extra_config,
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.kv_cache_layout = settings.layout
    config.cache_config.num_gpu_blocks_override = settings.num_blocks
    return config


def _specs(geometry: Geometry, config: VllmConfig, tp: int, page_padding: int) -> dict[str, Any]:
    """KV cache specs as the attention layers themselves give them."""
    specs = {}
    for i in range(geometry.layers):
        sliding = geometry.global_heads is not None and not geometry.is_global(i)
        layer = SimpleNamespace(
            attn_type="decoder",
            kv_cache_dtype="auto",
            kv_cache_torch_dtype=torch.bfloat16,
            sliding_window=1024 if sliding else None,
            attn_backend=CPUAttentionBackend,
            num_kv_heads=len(geometry.heads_of_rank(i, 0, tp)),
            head_size=geometry.dim(i),
            head_size_v=geometry.dim(i),
        )
        spec = Attention.get_kv_cache_spec(layer, config)
        if page_padding:
            object.__setattr__(spec, "page_size_padded", spec.unpadded_page_size_bytes + page_padding)
        specs[f"model.layers.{i}.self_attn.attn"] = spec
    return specs


class Engine:
    """All TP ranks of one engine."""

    def __init__(
        self, network: Network, geometry: Geometry, tp: int, engine_id: str, settings: Settings | None = None
    ) -> None:
        self.network, self.geometry, self.tp, self.engine_id = network, geometry, tp, engine_id
        self.settings = settings or Settings()
        self.config = _config(geometry, self.settings)
        self.config.parallel_config.tensor_parallel_size = tp
        self.config.parallel_config.decode_context_parallel_size = self.settings.dcp
        groups = get_kv_cache_groups(self.config, _specs(geometry, self.config, tp, self.settings.page_padding))
        self.kv_config = get_kv_cache_config_from_groups(self.config, groups, 1 << 34)
        self.workers: list[Any] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        for rank in range(tp):
            self._start_rank(rank)
        self.free = {g: list(range(1, self.kv_config.num_blocks)) for g in range(len(groups))}
        self._stop = threading.Event()
        self.port = 0

    def _start_rank(self, rank: int) -> None:
        with mock.patch.multiple(
            bw,
            NixlWrapper=lambda name, config: self.network.agent(f"{self.engine_id}/{rank}"),
            nixl_agent_config=None,
            get_current_attn_backends=lambda *_: [CPUAttentionBackend],
            get_tensor_model_parallel_rank=lambda: rank,
            get_tensor_model_parallel_world_size=lambda: self.tp,
        ), mock.patch.object(bw.current_platform, "discover_numa_topology", return_value=[]):
            worker = self.settings.worker_class(self.config, self.engine_id, self.kv_config)
        layout = KVCacheLayout[self.settings.layout]
        kernel_sizes = [group.kv_cache_spec.block_size for group in self.kv_config.kv_cache_groups]
        caches = allocate_kv_cache(self.kv_config, torch.device("cpu"), layout, kernel_sizes)
        for cache in caches.values():
            bits(cache).fill_(UNTOUCHED)
        if self.settings.host_buffer:
            worker.use_host_buffer = True
            worker.copy_blocks = _copy_blocks
        worker.register_kv_caches(caches)
        self.workers.append(worker)
        self.caches.append(caches)

    # --- blocks ---
    def specs(self, group: int) -> dict[str, Any]:
        spec, names = self.kv_config.kv_cache_groups[group].kv_cache_spec, self.kv_config.kv_cache_groups[group].layer_names
        if isinstance(spec, UniformTypeKVCacheSpecs):
            return dict(spec.kv_cache_specs)
        return dict.fromkeys(names, spec)

    def allocate(self, tokens: int, rng: np.random.Generator) -> list[list[int]]:
        """Block ids per KV cache group for a prompt, in random order, as a used pool gives them. Groups never share
        a block id, because they share the pool."""
        pool = self.free[0]
        tables = []
        for group in self.kv_config.kv_cache_groups:
            need = -(-tokens // group.kv_cache_spec.block_size)
            taken = [pool.pop(int(rng.integers(len(pool)))) for _ in range(need)]
            tables.append(taken)
        return tables

    def pages(self, rank: int, layer: int, table: list[list[int]]) -> torch.Tensor:
        """The tokens of a request in one layer's cache: [block, head, token, K|V] as int16 bit patterns (a view per
        block list; indexing copies)."""
        name = f"model.layers.{layer}.self_attn.attn"
        group = self.kv_config.transfer_group_index_by_layer[name]
        return bits(self.caches[rank][name])[table[group]]

    def write(self, rank: int, layer: int, table: list[list[int]], content: torch.Tensor) -> None:
        name = f"model.layers.{layer}.self_attn.attn"
        group = self.kv_config.transfer_group_index_by_layer[name]
        bits(self.caches[rank][name])[table[group]] = content

    def block_tokens(self, layer: int) -> int:
        name = f"model.layers.{layer}.self_attn.attn"
        return self.kv_config.kv_cache_groups[self.kv_config.transfer_group_index_by_layer[name]].kv_cache_spec.block_size

    # --- handshake ---
    def listen(self) -> None:
        """Serve the ranks' handshake payloads with the scheduler's own listener on a loopback port."""
        encoder = msgspec.msgpack.Encoder()
        payloads = {(0, r): encoder.encode(w.xfer_handshake_metadata) for r, w in enumerate(self.workers)}
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        ready = threading.Event()
        threading.Thread(
            target=NixlBaseConnectorScheduler._nixl_handshake_listener,
            args=(payloads, ready, self._stop, "127.0.0.1", self.port),
            daemon=True,
        ).start()
        if not ready.wait(DEADLINE_S):
            raise TimeoutError(f"handshake listener of {self.engine_id} did not start")

    def close(self) -> None:
        self._stop.set()
        for worker in self.workers:
            worker.shutdown()

    def metadata(self, rank: int) -> Any:
        """The rank's NixlAgentMetadata as a peer decodes it."""
        payload = self.workers[rank].xfer_handshake_metadata.agent_metadata_bytes
        return msgspec.msgpack.Decoder(bw.NixlAgentMetadata).decode(payload)


def bits(cache: torch.Tensor) -> torch.Tensor:
    return cache.view(torch.int16)


def _copy_blocks(source: dict, target: dict, source_ids: list[int], target_ids: list[int], direction: str) -> None:
    for name, cache in source.items():
        target[name][target_ids] = cache[source_ids]


@dataclass
class Request:
    """One prompt. tokens: a multiple of every block size. hit_blocks: blocks of each group that decode already holds."""

    name: str
    tokens: int
    content: list[torch.Tensor]  # per layer [token, head, K|V] bit patterns
    prefill: list[list[int]]
    decode: list[list[int]]
    hit_blocks: int = 0


@dataclass
class Outcome:
    received: list[set[str]]
    failed: list[set[str]]
    freed: list[set[str]]


class Pair:
    """Prefill and decode of one model over one network."""

    def __init__(
        self, geometry: Geometry, p: int, d: int, prefill: Settings | None = None, decode: Settings | None = None
    ) -> None:
        self.network, self.geometry = Network(), geometry
        self.prefill = Engine(self.network, geometry, p, "prefill", prefill)
        self.decode = Engine(self.network, geometry, d, "decode", decode)
        self.rng = np.random.default_rng(p * 1000 + d)
        self.requests: list[Request] = []

    def request(self, tokens: int, hit_blocks: int = 0) -> Request:
        """Compute a prompt on prefill: every rank's caches hold its heads of one random content."""
        content = [
            torch.from_numpy(self.rng.integers(0, 0x5A5A, (tokens, self.geometry.heads(i), 2 * self.geometry.dim(i)), np.int16))
            for i in range(self.geometry.layers)
        ]
        made = Request(
            name=f"req{len(self.requests)}",
            tokens=tokens,
            content=content,
            prefill=self.prefill.allocate(tokens, self.rng),
            decode=self.decode.allocate(tokens, self.rng),
            hit_blocks=hit_blocks,
        )
        for rank in range(self.prefill.tp):
            for i in range(self.geometry.layers):
                self.prefill.write(rank, i, made.prefill, self._blocks(self.prefill, rank, i, made))
        for rank in range(self.decode.tp):
            for i in range(self.geometry.layers):
                hit = self._blocks(self.decode, rank, i, made)[:hit_blocks]
                self.decode.write(rank, i, [group[:hit_blocks] for group in made.decode], hit)
        self.requests.append(made)
        return made

    def _blocks(self, engine: Engine, rank: int, layer: int, request: Request) -> torch.Tensor:
        """[block, head, token, K|V] that this rank must hold for the request."""
        heads = self.geometry.heads_of_rank(layer, rank, engine.tp)
        mine = request.content[layer][:, heads.start : heads.stop]
        blocked = mine.reshape(-1, engine.block_tokens(layer), len(heads), mine.shape[-1])
        return blocked.permute(0, 2, 1, 3)

    def run(self, *, hold_first: bool = False) -> Outcome:
        """Hand every request over, all in flight at once, until each decode rank has an answer for each of them."""
        self.prefill.listen()
        self._offer()
        metadata = self._wanted()
        outcome = Outcome(
            [set() for _ in self.decode.workers], [set() for _ in self.decode.workers], [set() for _ in self.prefill.workers]
        )
        self.network.held = hold_first
        for worker in self.decode.workers:
            worker.start_load_kv(metadata())
        if hold_first:
            self._poll(outcome, lambda: all(len(w._recving_transfers) == self._awaited() for w in self.decode.workers))
            self.network.held = False
        self._poll(outcome, lambda: all(len(done) == self._awaited() for done in outcome.received))
        self._collect_freed(outcome)
        return outcome

    def _awaited(self) -> int:
        return sum(len(r.decode[0]) > r.hit_blocks for r in self.requests)

    def _offer(self) -> None:
        """What prefill's scheduler tells its workers: these requests are computed, keep their blocks."""
        for worker in self.prefill.workers:
            if self.prefill.settings.host_buffer:
                save = NixlConnectorMetadata()
                for r in self.requests:
                    save.add_new_req_to_save(r.name, r.prefill, {})
                worker.save_kv_to_host(save)
            metadata = NixlConnectorMetadata()
            metadata.reqs_in_batch = {r.name for r in self.requests}
            metadata.reqs_to_send = {r.name: time.perf_counter() + 600 for r in self.requests}
            worker.start_load_kv(metadata)

    def _wanted(self) -> Any:
        def build() -> NixlConnectorMetadata:
            metadata = NixlConnectorMetadata()
            for r in self.requests:
                missing = [group[r.hit_blocks :] for group in r.decode]
                awaiting = any(missing)
                metadata.add_new_req_to_recv(
                    r.name,
                    missing if awaiting else [],
                    {
                        "remote_block_ids": r.prefill if awaiting else [],
                        "remote_engine_id": "prefill",
                        "remote_request_id": r.name,
                        "remote_host": "127.0.0.1",
                        "remote_port": self.prefill.port,
                        "tp_size": self.prefill.tp,
                        "remote_num_tokens": r.tokens,
                    },
                    local_num_computed_blocks=tuple(r.hit_blocks for _ in r.decode),
                    awaiting_kvs=awaiting,
                )
            return metadata

        return build

    def _poll(self, outcome: Outcome, done: Any) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while True:
            for rank, worker in enumerate(self.decode.workers):
                results = worker.get_transfer_results()
                outcome.received[rank] |= results.finished_recving
                outcome.failed[rank] |= results.failed_recving
                worker.start_load_kv(NixlConnectorMetadata())
            if done():
                return
            if time.monotonic() > deadline:
                raise TimeoutError(f"still waiting after {DEADLINE_S} s: {outcome}")
            threading.Event().wait(0.002)

    def _collect_freed(self, outcome: Outcome) -> None:
        for rank, worker in enumerate(self.prefill.workers):
            outcome.freed[rank] |= worker.get_transfer_results().finished_sending

    def differences(self) -> list[str]:
        """Where a decode cache is not exactly what it must be: wrong bytes of a request, or any other byte changed."""
        found = []
        for rank in range(self.decode.tp):
            for i in range(self.geometry.layers):
                found += self._differences(rank, i)
        return found

    def _differences(self, rank: int, layer: int) -> Iterator[str] | list[str]:
        found = []
        for r in self.requests:
            got, want = self.decode.pages(rank, layer, r.decode), self._blocks(self.decode, rank, layer, r)
            wrong = (got != want).flatten(1).any(1)
            found += [f"rank {rank} layer {layer} {r.name} block {b}" for b in wrong.nonzero().flatten().tolist()]
        return found

    def stray_writes(self) -> list[str]:
        """Blocks of decode that no request owns and that changed."""
        used = {b for r in self.requests for group in r.decode for b in group}
        others = [b for b in range(self.decode.kv_config.num_blocks) if b not in used]
        return [
            f"rank {rank} {name} block {b}"
            for rank, caches in enumerate(self.decode.caches)
            for name, cache in caches.items()
            for b in others
            if (bits(cache)[b] != UNTOUCHED).any()
        ]

    def close(self) -> None:
        self.prefill.close()
        self.decode.close()


@contextlib.contextmanager
def pair(*args: Any, **kwargs: Any) -> Iterator[Pair]:
    made = Pair(*args, **kwargs)
    try:
        yield made
    finally:
        made.close()


def handshake_error(made: Pair, rank: int = 0, source: int = 0, change: Any = None) -> Exception | None:
    """The error of one decode rank meeting one prefill rank, with the peer's metadata changed by `change`."""
    metadata = made.prefill.metadata(source)
    if change is not None:
        change(metadata)
    try:
        made.decode.workers[rank].add_remote_agent(metadata, source, made.prefill.tp, metadata.dcp_size)
    except (AssertionError, NotImplementedError, RuntimeError) as error:
        return error
    return None


def recorded_peers(worker: Any) -> dict[str, Any]:
    """Everything a worker has stored about remote engines; empty after a refusal."""
    stored = {
        "agents": dict(worker._remote_agents),
        "blocks": [e for e in worker.dst_num_blocks if e != worker.engine_id],
        "mappings": dict(worker.tp_mappings),
        "engines": dict(worker.transfer_topo._engines),
        "addresses": [e for e in worker.kv_caches_base_addr if e != worker.engine_id],
        "remote lists": {e: h for e, h in worker.dst_xfer_side_handles.items() if h},
        "split lists": dict(worker.src_xfer_handles_by_tp_ratio),
        "NIXL calls": worker.nixl_wrapper.calls.count("add_remote_agent"),
    }
    return {name: value for name, value in stored.items() if value}
