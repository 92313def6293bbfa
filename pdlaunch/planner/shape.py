"""What one role runs with: the engine arguments that decide its KV cache, with vLLM's defaults."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from pdlaunch.errors import PlanError

GIB = 1 << 30

# Bytes per element; vllm utils/torch_utils.py STR_DTYPE_TO_TORCH_DTYPE. 8-bit and packed formats are stored as uint8 or int8.
DTYPE_BYTES = {
    "float32": 4,
    "float": 4,
    "half": 2,
    "float16": 2,
    "bfloat16": 2,
    "fp8": 1,
    "fp8_e4m3": 1,
    "fp8_e5m2": 1,
    "fp8_inc": 1,
    "int4_per_token_head": 1,
    "int8_per_token_head": 1,
    "fp8_per_token_head": 1,
    "nvfp4": 1,
    "nvfp4_4over6": 1,
    "fp8_ds_mla": 1,
    "nvfp4_ds_mla": 1,
}

# What torch reports as total memory (bytes / 2^30), where a public log shows it; else the vendor's decimal GB. source in docs/planner.md.
GPU_MEMORY_GIB = {"gb300": 276.62, "b300": 275.0, "b200": 178.35, "h200": 139.80, "h100": 79.10, "a100-80gb": 79.15, "l40s": 44.4}


@dataclass(frozen=True, slots=True)
class Backend:
    """What the KV cache must know of an attention backend (get_supported_kernel_block_sizes of its class).

    multiple_of: any multiple is a kernel block. sizes: else only these are. default_block: block size without --block-size.
    """

    name: str
    multiple_of: int | None
    sizes: tuple[int, ...] = ()
    default_block: int = 16

    @property
    def smallest(self) -> int:
        return self.multiple_of if self.multiple_of is not None else min(self.sizes)

    def supports_kernel_block(self, tokens: int) -> bool:
        return tokens % self.multiple_of == 0 if self.multiple_of is not None else tokens in self.sizes

    def kernel_block(self, block_tokens: int) -> int | None:
        """vllm v1/worker/utils.py select_common_block_size: the whole block if the kernel takes it, else its largest legal divisor."""
        if self.supports_kernel_block(block_tokens):
            return block_tokens
        return max((size for size in self.sizes if block_tokens % size == 0), default=None)

    def largest_within(self, budget_tokens: int) -> int:
        """vllm attention.py _largest_kernel_block_within: a sliding layer's block, at most budget_tokens if any size fits."""
        if self.multiple_of is not None:
            return max(self.multiple_of, budget_tokens // self.multiple_of * self.multiple_of)
        return max((size for size in self.sizes if size <= budget_tokens), default=min(self.sizes))


BACKENDS = {
    b.name: b
    for b in (
        Backend("FLASH_ATTN", 16),
        Backend("FLASH_ATTN_HD256", None, (128,), 128),
        Backend("TRITON_ATTN", 16),
        Backend("FLASHINFER", None, (16, 32, 64)),
        Backend("FLASHINFER_SM100", None, (16, 32, 64, 128, 256, 512, 1024)),
        Backend("CPU_ATTN", 32, (), 128),
        Backend("FLASHMLA", None, (64,), 64),
        Backend("FLASHINFER_MLA", None, (32, 64), 32),
        Backend("CUTLASS_MLA", None, (128,), 128),
        Backend("FLASH_ATTN_MLA", 16),
        Backend("TRITON_MLA", 16),
        Backend("CPU_MLA", None, (16,), 16),
    )
}


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What is known about one rank's memory besides its KV cache, in GiB; None is unknown. measured: the values come from a run.

    weights: of one rank. non_torch: growth outside torch after the engine's first snapshot (NCCL, libraries). peak_activation: of
    the profiling run. graph_estimate: what vLLM reserves for CUDA graphs; graph_actual: what they took. cuda_context: taken before
    the first snapshot, so vLLM never charges it.
    """

    weights_gib: float | None = None
    non_torch_gib: float | None = None
    peak_activation_gib: float | None = None
    graph_estimate_gib: float | None = None
    graph_actual_gib: float | None = None
    cuda_context_gib: float | None = None
    measured: bool = False


_COUNTS = (
    "tensor_parallel",
    "pipeline_parallel",
    "data_parallel",
    "replicas",
    "max_model_len",
    "max_num_batched_tokens",
    "max_num_seqs",
    "block_size",
    "num_blocks_override",
)


@dataclass(frozen=True, slots=True)
class RoleShape:
    """The engine arguments of one role. None means "vLLM decides".

    tensor_parallel and pipeline_parallel make one rank group, data_parallel copies it (each copy has its own cache and admits its
    own requests), replicas copies the whole engine. gpu_memory_gib: total per GPU as torch reports it. kv_cache_memory_bytes
    bypasses gpu_memory_utilization. max_num_batched_tokens and async_scheduling matter to the cache: a sliding layer may not free
    what is still in flight. cpu: the engine runs on the CPU platform (block 128, no async scheduling).
    """

    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    data_parallel: int = 1
    expert_parallel: bool = False
    replicas: int = 1
    max_model_len: int = 8192
    max_num_batched_tokens: int = 8192
    max_num_seqs: int = 256
    block_size: int | None = None
    kv_cache_dtype: str = "auto"
    dtype: str = "auto"
    mamba_cache_dtype: str = "auto"
    mamba_ssm_cache_dtype: str = "auto"
    mamba_cache_mode: str | None = None
    prefix_caching: bool = True
    hybrid_manager: bool = True
    backend: str = "FLASH_ATTN"
    speculative_tokens: int = 0
    async_scheduling: bool = True
    v2_model_runner: bool = True
    gpu_memory_gib: float | None = None
    gpu_memory_utilization: float = 0.92
    kv_cache_memory_bytes: int | None = None
    num_blocks_override: int | None = None
    layout: str = "LBHNC"
    memory: MemoryFacts = MemoryFacts()

    def __post_init__(self) -> None:
        """PlanError for a number that no engine can have: a count below 1, a share outside (0, 1], memory that is not positive."""
        for name in _COUNTS:
            value = getattr(self, name)
            if value is not None and value < 1:
                raise PlanError(f"{name} is {value}", rule="at least 1")
        if self.speculative_tokens < 0:
            raise PlanError(f"speculative_tokens is {self.speculative_tokens}", rule="at least 0")
        if not 0 < self.gpu_memory_utilization <= 1:
            raise PlanError(f"gpu_memory_utilization is {self.gpu_memory_utilization}", rule="above 0, at most 1")
        if self.gpu_memory_gib is not None and not 0 < self.gpu_memory_gib < math.inf:
            raise PlanError(f"gpu_memory_gib is {self.gpu_memory_gib}", rule="a positive number of GiB")

    @property
    def gpus(self) -> int:
        return self.tensor_parallel * self.pipeline_parallel * self.data_parallel * self.replicas

    @property
    def cache_copies(self) -> int:
        """Independent caches of the role: data-parallel ranks times replicas. A request lives in one of them."""
        return self.data_parallel * self.replicas

    @property
    def cpu(self) -> bool:
        return self.backend.startswith("CPU_")

    @property
    def concurrent_batches(self) -> int:
        """VllmConfig.max_concurrent_batches: batches scheduled and not yet settled."""
        if self.async_scheduling and not self.cpu:
            if self.v2_model_runner:
                return self.pipeline_parallel + 1
            if self.pipeline_parallel == 1:
                return 2
        return self.pipeline_parallel

    @property
    def max_in_flight_tokens(self) -> int:
        """VllmConfig.max_in_flight_tokens: what a sliding layer must be able to hold beyond its window."""
        return self.concurrent_batches * self.max_num_batched_tokens

    @property
    def state_mode(self) -> str:
        """MambaModelConfig: with prefix caching "align" unless "all" was asked for; without it always "none"."""
        return (self.mamba_cache_mode or "align") if self.prefix_caching else "none"

    def with_changes(self, **changes: object) -> RoleShape:
        make: Callable[..., RoleShape] = replace
        return make(self, **changes)
