"""Two engines with the hybrid KV cache manager on, driven by vLLM's own scheduler, as one process on CPU.

Real: everything of pair.py, and on both sides vLLM's Scheduler with its KVCacheManager, prefix cache, block pool and NIXL
scheduler connector, and KVOutputAggregator. Replaced: the NIXL agent, and the model runner: `step` writes the keys and values
of the scheduled tokens into the pages of every rank, and checks that every key that those queries attend is there. Pages are
written in the byte order of the attention backend; for CPU_ATTN by vLLM's own operator.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from types import SimpleNamespace
from typing import Any
from unittest import mock

import numpy as np
import pair as single
import torch
from copying_nixl import Network
from vllm import _custom_ops as ops
from vllm.config import CacheConfig, DeviceConfig, KVTransferConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.nixl import base_worker as bw
from vllm.model_executor.layers.attention.attention import Attention
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend
from vllm.v1.core.kv_cache_utils import (
    generate_scheduler_kv_cache_config,
    get_kv_cache_config_from_groups,
    get_kv_cache_groups,
    get_request_block_hasher,
    init_none_hash,
    resolve_kv_cache_block_sizes,
)
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import KVCacheLayout
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import Request, RequestStatus
from vllm.v1.structured_output import StructuredOutputManager
from vllm.v1.worker.utils import allocate_kv_cache

MAX_TOKENS = 1280
FILL = 0x5A
# For engines that get no further; a loaded machine needs minutes where an idle one needs a second.
DEADLINE_S = 300.0
BACKENDS = {b.get_name(): b for b in (CPUAttentionBackend, FlashAttentionBackend, TritonAttentionBackend)}
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Side:
    """What an engine is started with. num_blocks: blocks of the pool. batch_tokens: tokens per step (chunked prefill)."""

    backend: str = "FLASH_ATTN"
    dtype: str = "bfloat16"
    block_size: int = 64
    window: int = 256
    num_blocks: int = 120
    prefix_caching: bool = False
    batch_tokens: int = 4096
    layout: str = "LBHNC"
    worker_class: type = single.NixlPullConnectorWorker
    host_buffer: bool = False
    hybrid: bool = True


CPU = Side("CPU_ATTN", "float32")


@lru_cache
def _model_config(geometry: single.Geometry, dtype: str) -> ModelConfig:
    return ModelConfig(model=single.model_dir(geometry), skip_tokenizer_init=True, dtype=dtype, max_model_len=MAX_TOKENS)


def _config(geometry: single.Geometry, side: Side, engine_id: str, tp: int) -> VllmConfig:
    config = VllmConfig(
        model_config=_model_config(geometry, side.dtype),
        cache_config=CacheConfig(block_size=side.block_size, enable_prefix_caching=side.prefix_caching),
        scheduler_config=SchedulerConfig(
            max_num_seqs=16,
            max_num_batched_tokens=side.batch_tokens,
            max_model_len=MAX_TOKENS,
            is_encoder_decoder=False,
            disable_hybrid_kv_cache_manager=not side.hybrid,
            async_scheduling=False,
        ),
        parallel_config=ParallelConfig(),
        kv_transfer_config=KVTransferConfig(
            kv_connector="NixlConnector", kv_role="kv_both", kv_buffer_device="cpu", engine_id=engine_id, kv_load_failure_policy="fail"
        ),
        device_config=DeviceConfig("cpu"),
    )
    config.cache_config.kv_cache_layout = side.layout
    config.cache_config.num_gpu_blocks_override = side.num_blocks
    config.parallel_config.tensor_parallel_size = tp
    return config


def _specs(geometry: single.Geometry, side: Side, config: VllmConfig, tp: int) -> dict[str, Any]:
    """KV cache specs as the attention layers themselves give them."""
    specs = {}
    for i in range(geometry.layers):
        layer = SimpleNamespace(
            attn_type="decoder",
            kv_cache_dtype="auto",
            kv_cache_torch_dtype=_DTYPES[side.dtype],
            sliding_window=None if geometry.is_global(i) else side.window,
            attn_backend=BACKENDS[side.backend],
            num_kv_heads=len(geometry.heads_of_rank(i, 0, tp)),
            head_size=geometry.dim(i),
            head_size_v=geometry.dim(i),
        )
        specs[layer_name(i)] = Attention.get_kv_cache_spec(layer, config)
    return specs


def layer_name(index: int) -> str:
    return f"model.layers.{index}.self_attn.attn"


@lru_cache(maxsize=32)
def content(geometry: single.Geometry, family: int, layer: int) -> torch.Tensor:
    """[token, head of the whole model, K|V] of every prompt of a family; prompts of one family are prefixes of one another."""
    generator = torch.Generator().manual_seed(family * 1009 + layer)
    return torch.rand(MAX_TOKENS, geometry.heads(layer), 2 * geometry.dim(layer), generator=generator)


def write_pages(backend: str, cache: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Put tokens into a layer's cache [block, head, token, K|V] in the byte order of the backend. slots: block * tokens + token."""
    blocks, heads, tokens, width = cache.shape
    if backend == "CPU_ATTN":  # as in CPUAttentionBackendImpl.do_kv_cache_update
        keys, values = cache.view(blocks, heads, 2 * tokens, -1).chunk(2, dim=2)
        k, v = (part.contiguous().to(cache.dtype) for part in rows.split(width // 2, dim=-1))
        ops.cpu_attn_reshape_and_cache(k, v, keys, values, slots, "vec")
    else:  # FlashAttentionImpl, TritonAttentionImpl: kv_cache.transpose(1, 2).split(head_size, dim=-1)
        k, v = cache.transpose(1, 2).split(width // 2, dim=-1)
        for half, part in ((k, rows[..., : width // 2]), (v, rows[..., width // 2 :])):
            half[slots // tokens, slots % tokens] = part.to(cache.dtype)


@dataclass
class Done:
    """How a request ended: its kv_transfer_params, and the finish reason."""

    params: dict[str, Any] | None
    reason: str


@dataclass
class Tracked:
    family: int
    request: Request
    checked: bool = False


class HybridEngine(single.Engine):
    """All TP ranks of one engine and its scheduler."""

    def __init__(self, network: Network, geometry: single.Geometry, tp: int, engine_id: str, side: Side) -> None:
        self.network, self.geometry, self.tp, self.engine_id, self.side = network, geometry, tp, engine_id, side
        self.config = _config(geometry, side, engine_id, tp)
        groups = get_kv_cache_groups(self.config, _specs(geometry, side, self.config, tp))
        self.kv_config = get_kv_cache_config_from_groups(self.config, groups, 1 << 34)
        self.config.cache_config.num_gpu_blocks = self.kv_config.num_blocks
        self.workers: list[Any] = []
        self.caches: list[dict[str, torch.Tensor]] = []
        for rank in range(tp):
            self._start_rank(rank)
        self._stop, self.port = threading.Event(), 0
        scheduled = generate_scheduler_kv_cache_config([self.kv_config])
        block_size, hash_block_size = resolve_kv_cache_block_sizes(scheduled, self.config)
        self.scheduler = Scheduler(
            self.config, scheduled, StructuredOutputManager(self.config), block_size=block_size, hash_block_size=hash_block_size
        )
        init_none_hash(sha256)
        self._hasher = get_request_block_hasher(hash_block_size, sha256) if side.prefix_caching else None
        self._aggregator = KVOutputAggregator(tp)
        self.tracked: dict[str, Tracked] = {}
        self.done: dict[str, Done] = {}
        self.wrong: list[str] = []
        # Blocks that a transfer or the model runner may write.
        self.writable: set[int] = set()

    def _start_rank(self, rank: int) -> None:
        backend = BACKENDS[self.side.backend]
        with (
            mock.patch.multiple(
                bw,
                NixlWrapper=lambda name, config: self.network.agent(f"{self.engine_id}/{rank}"),
                nixl_agent_config=None,
                get_current_attn_backends=lambda *_: [backend],
                get_tensor_model_parallel_rank=lambda: rank,
                get_tensor_model_parallel_world_size=lambda: self.tp,
            ),
            mock.patch.object(bw.current_platform, "discover_numa_topology", return_value=[]),
        ):
            worker = self.side.worker_class(self.config, self.engine_id, self.kv_config)
        kernel_sizes = [group.kv_cache_spec.block_size for group in self.kv_config.kv_cache_groups]
        caches = allocate_kv_cache(self.kv_config, torch.device("cpu"), KVCacheLayout[self.side.layout], kernel_sizes)
        for cache in caches.values():
            cache.view(torch.uint8).fill_(FILL)
        if self.side.host_buffer:
            worker.use_host_buffer = True
        worker.register_kv_caches(caches)
        self.workers.append(worker)
        self.caches.append(caches)

    # --- requests ---
    def add(self, name: str, family: int, tokens: int, max_tokens: int, params: dict[str, Any]) -> None:
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True, extra_args={"kv_transfer_params": params})
        sampling.update_from_generation_config({}, 0)
        prompt = [family * MAX_TOKENS + i for i in range(tokens)]
        request = Request(name, prompt, sampling, None, block_hasher=self._hasher)
        self.tracked[name] = Tracked(family, request)
        self.scheduler.add_request(request)

    def abort(self, name: str) -> None:
        self.scheduler.finish_requests(name, RequestStatus.FINISHED_ABORTED)

    def shuffle_pool(self, seed: int) -> None:
        """Put the free blocks in random order, as a used pool has them."""
        queue = self.scheduler.kv_cache_manager.block_pool.free_block_queue
        blocks = queue.popleft_n(queue.num_free_blocks)
        queue.append_n([blocks[i] for i in np.random.default_rng(seed).permutation(len(blocks))])

    def pages(self) -> list[list[torch.Tensor]]:
        """Per rank and region, the pool as [block, byte]."""
        found = []
        for caches in self.caches:
            unique = {c.data_ptr(): c for c in caches.values()}
            found.append([c.view(torch.uint8).reshape(c.shape[0], -1) for c in unique.values()])
        return found

    # --- one engine step ---
    def step(self) -> None:
        output = self.scheduler.schedule()
        before = [[region.clone() for region in regions] for regions in self.pages()]
        metadata = output.kv_connector_metadata
        for meta in metadata.reqs_to_recv.values():
            self.writable |= {block for group in meta.local_block_ids for block in group}
        for worker in self.workers:
            worker.start_load_kv(metadata)
        results = [worker.get_transfer_results() for worker in self.workers]
        self._check_strays(before)
        sampled = [self._compute(name, count) for name, count in output.num_scheduled_tokens.items()]
        names = list(output.num_scheduled_tokens)
        outputs = []
        for result in results:
            connector = KVConnectorOutput(
                finished_sending=result.finished_sending or None,
                finished_recving=result.finished_recving or None,
                failed_recving=result.failed_recving,
            )
            outputs.append(ModelRunnerOutput(names, {n: i for i, n in enumerate(names)}, sampled, kv_connector_output=connector))
        answers = self.scheduler.update_from_output(output, self._aggregator.aggregate(outputs))
        for answer in (row for client in answers.values() for row in client.outputs):
            if answer.finish_reason is not None:
                self.done[answer.request_id] = Done(answer.kv_transfer_params, str(answer.finish_reason))

    def _check_strays(self, before: list[list[torch.Tensor]]) -> None:
        for rank, (old, new) in enumerate(zip(before, self.pages(), strict=True)):
            for region, (a, b) in enumerate(zip(old, new, strict=True)):
                if torch.equal(a, b):
                    continue
                changed = (a != b).any(1).nonzero().flatten().tolist()
                self.wrong += [f"rank {rank} region {region}: stray write to block {c}" for c in changed if c not in self.writable]

    def _compute(self, name: str, count: int) -> list[int]:
        """The model runner: attend to what is there, write what is new. Returns the sampled tokens."""
        tracked = self.tracked[name]
        end = tracked.request.num_computed_tokens
        start = end - count
        tables = self.scheduler.kv_cache_manager.get_block_ids(name)
        for layer in range(self.geometry.layers):
            window = None if self.geometry.is_global(layer) else self.side.window
            self._attend(tracked, layer, start, window, tables)
            for rank in range(self.tp):
                slots = self._slots(layer, range(start, end), tables)
                write_pages(self.side.backend, self.caches[rank][layer_name(layer)], slots, self._rows(tracked, layer, rank, start, end))
        tracked.checked = True
        if end < tracked.request.num_tokens:
            return []
        return [tracked.family * MAX_TOKENS + end]

    def _rows(self, tracked: Tracked, layer: int, rank: int, start: int, end: int) -> torch.Tensor:
        heads = self.geometry.heads_of_rank(layer, rank, self.tp)
        return content(self.geometry, tracked.family, layer)[start:end, heads.start : heads.stop]

    def _slots(self, layer: int, tokens: range, tables: Any) -> torch.Tensor:
        size = self.block_tokens(layer)
        table = tables[self.kv_config.transfer_group_index_by_layer[layer_name(layer)]]
        return torch.tensor([table[t // size] * size + t % size for t in tokens], dtype=torch.int64)

    def _attend(self, tracked: Tracked, layer: int, start: int, window: int | None, tables: Any) -> None:
        """Every byte of every key and value before `start` that the query at `start` sees."""
        first = 0 if window is None else max(0, start - window + 1)
        size = self.block_tokens(layer)
        if window is not None and first and (first + 1) % size == 0 and not tracked.checked:
            first += 1  # stock as well, with equal TP: the oldest key of the first decode step lies in a dropped block
        if first >= start:
            return
        slots = self._slots(layer, range(first, start), tables)
        blocks = sorted({int(s) // size for s in slots})
        where = f"{tracked.request.request_id} layer {layer} start {start}"
        if 0 in blocks:
            self.wrong.append(f"{where}: an attended token lies in the null block")
            return
        at = {block: i for i, block in enumerate(blocks)}
        local = torch.tensor([at[int(s) // size] * size + int(s) % size for s in slots])
        for rank in range(self.tp):
            cache = self.caches[rank][layer_name(layer)][blocks]
            wanted = []
            for fill in (0, 255):
                page = torch.empty_like(cache)
                page.view(torch.uint8).fill_(fill)
                write_pages(self.side.backend, page, local, self._rows(tracked, layer, rank, first, start))
                wanted.append(page.view(torch.uint8))
            known = wanted[0] == wanted[1]
            width = cache.shape[1] * cache.shape[3] * cache.element_size()
            assert int(known.sum()) == len(local) * width
            bad = (known & (cache.view(torch.uint8) != wanted[0])).flatten(1).any(1).nonzero().flatten().tolist()
            self.wrong += [f"{where} rank {rank}: wrong bytes in block {blocks[b]}" for b in bad]


class Hybrid:
    """Prefill and decode of one model over one network."""

    def __init__(self, geometry: single.Geometry, p: int, d: int, prefill: Side, decode: Side | None = None) -> None:
        self.network, self.geometry = Network(), geometry
        self.prefill = HybridEngine(self.network, geometry, p, "prefill", prefill)
        self.decode = HybridEngine(self.network, geometry, d, "decode", decode or prefill)
        self.prefill.listen()
        self.prefill.shuffle_pool(p)
        self.decode.shuffle_pool(100 + d)
        self.numbers = iter(range(1_000_000))

    def until(self, done: Callable[[], bool], *engines: HybridEngine) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not done():
            for engine in engines:
                engine.step()
            if time.monotonic() > deadline:
                raise TimeoutError("the engines do not get on")
            threading.Event().wait(0.001)

    def compute(self, tokens: int, family: int = 1) -> tuple[str, dict[str, Any]]:
        """Prefill a prompt; what the router would hand to decode."""
        name = f"r{next(self.numbers)}"
        self.prefill.add(name, family, tokens, 1, {"do_remote_decode": True, "do_remote_prefill": False})
        self.until(lambda: name in self.prefill.done, self.prefill)
        params = dict(self.prefill.done[name].params or {})
        return name, params | {"remote_host": "127.0.0.1", "remote_port": self.prefill.port}

    def send(self, name: str, params: dict[str, Any], tokens: int, family: int = 1, output: int = 3) -> None:
        self.decode.add(name, family, tokens, output, params)

    def serve(self, tokens: int, family: int = 1, output: int = 3) -> Done:
        """One prompt through both roles."""
        name, params = self.compute(tokens, family)
        self.send(name, params, tokens, family, output)
        self.until(lambda: name in self.decode.done, self.decode)
        return self.decode.done[name]

    def drained(self) -> bool:
        """Prefill holds no blocks for decode any more."""
        return not any(w._reqs_to_send or w._reqs_to_process for w in self.prefill.workers)

    def drain(self) -> None:
        self.until(self.drained, self.prefill)

    def moved_bytes(self) -> int:
        return sum(read.nbytes for read in self.network.reads)

    def predicted_bytes(self, tokens: int) -> int:
        """The planner's formula (pdlaunch/node/spec.py), from decode's own groups."""
        total = 0
        for group in self.decode.kv_config.kv_cache_groups:
            spec = group.kv_cache_spec
            blocks = -(-tokens // spec.block_size)
            if window := getattr(spec, "sliding_window", None):
                blocks -= max(0, tokens - window + 1) // spec.block_size
            total += blocks * spec.page_size_bytes * len(group.layer_names)
        return total * self.decode.tp

    def close(self) -> None:
        for engine in (self.prefill, self.decode):
            engine.scheduler.connector.shutdown()
            engine.close()


@contextlib.contextmanager
def hybrid(*args: Any) -> Iterator[Hybrid]:
    made = Hybrid(*args)
    try:
        yield made
    finally:
        made.close()
