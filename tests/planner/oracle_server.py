"""vLLM's own answer, for the planner's tests. Runs inside the engine environment; one JSON case per line in, one answer per line out.

A case is a HF config and the engine arguments of one role. The answer comes from vLLM alone: ModelConfig, VllmConfig and
SpeculativeConfig are built, the real model classes are instantiated on torch's meta device with a fake tensor- and pipeline-parallel
group, the platform aligns the block size, every layer states its own spec, and get_kv_cache_configs makes the pool. Nothing here
computes a page, a block or a group.

Not vLLM's: the CPU build would choose CPU_ATTN for every layer, so for a GPU backend the layers are given that backend's class
(FLASHINFER has no package here: a stand-in carries its published kernel block sizes), and platforms/cpu.py's own overrides are left out.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

os.environ.update(VLLM_LOGGING_LEVEL="CRITICAL", HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", VLLM_NO_USAGE_STATS="1")
_answers = os.fdopen(os.dup(1), "w", buffering=1)
os.dup2(2, 1)

import torch  # noqa: E402
import vllm  # noqa: E402
import vllm.distributed.parallel_state as parallel  # noqa: E402
from vllm.config import (  # noqa: E402
    CacheConfig,
    ModelConfig,
    ParallelConfig,
    SchedulerConfig,
    SpeculativeConfig,
    VllmConfig,
    set_current_vllm_config,
)
from vllm.model_executor.model_loader.utils import get_model_architecture  # noqa: E402
from vllm.model_executor.models import registry  # noqa: E402
from vllm.platforms import interface  # noqa: E402
from vllm.platforms.cpu import CpuPlatform  # noqa: E402
from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend  # noqa: E402
from vllm.v1.attention.backends.flash_attn import FlashAttentionBackend  # noqa: E402
from vllm.v1.attention.backends.mla.flashmla import FlashMLABackend  # noqa: E402
from vllm.v1.attention.backends.mla.triton_mla import TritonMLABackend  # noqa: E402
from vllm.v1.attention.backends.triton_attn import TritonAttentionBackend  # noqa: E402
from vllm.v1.core import kv_cache_utils  # noqa: E402
from vllm.v1.kv_cache_interface import UniformTypeKVCacheSpecs  # noqa: E402
from vllm.v1.worker.gpu.attn_utils import get_kv_cache_spec  # noqa: E402


class FlashInferSizes(FlashAttentionBackend):
    """flashinfer.py:430 without its package: the sizes of GPUs below SM100."""

    @staticmethod
    def get_supported_kernel_block_sizes(kv_cache_spec: Any = None) -> list[int]:
        return [16, 32, 64]

    @classmethod
    def get_preferred_block_size(cls, default_block_size: int) -> int:
        return super(FlashAttentionBackend, cls).get_preferred_block_size(default_block_size)


BACKENDS = {
    "FLASH_ATTN": FlashAttentionBackend,
    "TRITON_ATTN": TritonAttentionBackend,
    "FLASHINFER": FlashInferSizes,
    "CPU_ATTN": CPUAttentionBackend,
    "FLASHMLA": FlashMLABackend,
    "TRITON_MLA": TritonMLABackend,
}
_CPU_OVERRIDES = CpuPlatform.check_and_update_config


class FakeProcesses:
    """A process group that only knows its size."""

    def __init__(self, world_size: int, rank: int) -> None:
        self._size, self._rank = world_size, rank

    def size(self) -> int:
        return self._size

    def rank(self) -> int:
        return self._rank


class FakeGroup:
    """A parallel group that only knows its size and this rank."""

    def __init__(self, world_size: int, rank: int = 0) -> None:
        self.world_size, self.rank_in_group, self.rank, self.ranks = world_size, rank, rank, list(range(world_size))
        self.local_rank, self.first_rank = 0, 0
        self.device_group = self.cpu_group = FakeProcesses(world_size, rank)
        self.device_communicator = self.mq_broadcaster = None
        self.unique_name = "oracle:0"

    @property
    def is_first_rank(self) -> bool:
        return self.rank_in_group == 0

    @property
    def is_last_rank(self) -> bool:
        return self.rank_in_group == self.world_size - 1


def _fake_parallel(tp: int, pp: int, stage: int) -> None:
    for name in ("_DP", "_DCP", "_PCP", "_EPLB"):
        setattr(parallel, name, FakeGroup(1))
    parallel._TP, parallel._EP, parallel._WORLD = FakeGroup(tp), FakeGroup(tp), FakeGroup(tp * pp)
    parallel._PP = FakeGroup(pp, stage)


def _leave_cpu_out(cls: type, config: VllmConfig) -> None:
    config.parallel_config.worker_cls = "vllm.v1.worker.cpu_worker.CPUWorker"


def _inspect_in_process(self: Any) -> Any:
    return registry._ModelInfo.from_model_cls(self.load_model_cls())


registry._LazyRegisteredModel.inspect_model_cls = _inspect_in_process


def _tolerate_no_experts(original: Any) -> Any:
    def set_moe_parameters(self: Any) -> None:
        try:
            original(self)
        except RuntimeError as error:
            if "layer found" not in str(error):
                raise

    set_moe_parameters.tolerant = True
    return set_moe_parameters


def _without_experts(model_class: type) -> None:
    """A model without MoE layers is refused by the bookkeeping of the expert balancer, which has no part in the cache."""
    for cls in model_class.__mro__:
        original = vars(cls).get("set_moe_parameters")
        if original is not None and not hasattr(original, "tolerant"):
            cls.set_moe_parameters = _tolerate_no_experts(original)


def _config(folder: str, shape: dict[str, Any]) -> VllmConfig:
    cpu = shape["backend"].startswith("CPU_")
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "0"  # V2 refuses to be built without Triton; only its batch count matters here
    CpuPlatform.check_and_update_config = _CPU_OVERRIDES if cpu else classmethod(_leave_cpu_out)
    model = ModelConfig(
        model=folder, tokenizer=folder, skip_tokenizer_init=True, max_model_len=shape["max_model_len"], dtype=shape["dtype"]
    )
    optional = {"block_size": shape["block_size"]} if shape["block_size"] else {}
    if shape["mamba_cache_mode"]:
        optional["mamba_cache_mode"] = shape["mamba_cache_mode"]
    cache = CacheConfig(
        cache_dtype=shape["kv_cache_dtype"],
        enable_prefix_caching=shape["prefix_caching"],
        mamba_cache_dtype=shape["mamba_cache_dtype"],
        mamba_ssm_cache_dtype=shape["mamba_ssm_cache_dtype"],
        num_gpu_blocks_override=shape["num_blocks_override"],
        **optional,
    )
    windows = getattr(model.hf_text_config, "layer_types", None)
    if windows is None or all(kind == "sliding_attention" for kind in windows):  # arg_utils.py: only when every layer slides
        cache.sliding_window = model.get_sliding_window()
    ranks = ParallelConfig(
        tensor_parallel_size=shape["tensor_parallel"],
        pipeline_parallel_size=shape["pipeline_parallel"],
        distributed_executor_backend="mp",
    )
    scheduler = SchedulerConfig(
        max_model_len=shape["max_model_len"],
        is_encoder_decoder=False,
        max_num_batched_tokens=shape["max_num_batched_tokens"],
        max_num_seqs=min(shape["max_num_seqs"], shape["max_num_batched_tokens"]),
        disable_hybrid_kv_cache_manager=not shape["hybrid_manager"],
    )
    drafter = None
    if shape["speculative_tokens"]:
        drafter = SpeculativeConfig(
            method="mtp",
            num_speculative_tokens=shape["speculative_tokens"],
            target_model_config=model,
            target_parallel_config=ranks,
        )
    config = VllmConfig(
        model_config=model, cache_config=cache, parallel_config=ranks, scheduler_config=scheduler, speculative_config=drafter
    )
    config.cache_config.kv_cache_layout = "LBHNC"
    if not cpu:
        config.scheduler_config.async_scheduling = shape["async_scheduling"]
    os.environ["VLLM_USE_V2_MODEL_RUNNER"] = "1" if shape["v2_model_runner"] else "0"
    return config


def _build(config: VllmConfig, shape: dict[str, Any], stage: int) -> dict[str, Any]:
    """Layer specs of one pipeline stage's rank."""
    _fake_parallel(shape["tensor_parallel"], shape["pipeline_parallel"], stage)
    with set_current_vllm_config(config), torch.device("meta"):
        model_class, _ = get_model_architecture(config.model_config)
        _without_experts(model_class)
        model_class(vllm_config=config, prefix="")
        if config.speculative_config is not None and parallel._PP.is_last_rank:
            drafter_class, _ = get_model_architecture(config.speculative_config.draft_model_config)
            _without_experts(drafter_class)
            drafter_class(vllm_config=config, prefix="drafter")
    layers = config.compilation_config.static_forward_context
    for layer in layers.values():
        if hasattr(layer, "attn_backend") and shape["backend"] != "CPU_MLA":
            layer.attn_backend = BACKENDS[shape["backend"]]
    if shape["backend"].startswith("CPU_"):
        CpuPlatform.update_block_size_for_backend(config)
    else:
        interface.Platform.update_block_size_for_backend.__func__(CpuPlatform, config)
    with set_current_vllm_config(config):
        return get_kv_cache_spec(config)


def _group(group: Any) -> dict[str, Any]:
    spec = group.kv_cache_spec
    layers = len(group.layer_names)
    whole = isinstance(spec, UniformTypeKVCacheSpecs)
    return {
        "kind": type(spec.first_spec if whole else spec).__name__,
        "block_size": spec.block_size,
        "layers": layers,
        "page_bytes": spec.page_size_bytes if whole else spec.page_size_bytes * layers,
    }


def answer(case: dict[str, Any]) -> dict[str, Any]:
    shape = case["shape"]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
        configs = [_config(folder, shape) for _ in range(shape["pipeline_parallel"])]
        for config in configs:
            config.model_config.verify_with_parallel_config(config.parallel_config)
        specs = [_build(config, shape, stage) for stage, config in enumerate(configs)]
        first = configs[0]
        pools = kv_cache_utils.get_kv_cache_configs(first, specs, list(case["available_bytes"]))
        groups = kv_cache_utils.get_kv_cache_groups(first, {name: spec for stage in specs for name, spec in stage.items()})
        scheduler = kv_cache_utils.generate_scheduler_kv_cache_config(pools)
        tokens, concurrency = kv_cache_utils.get_kv_cache_capacity(first, scheduler)
    return {
        "block_size": first.cache_config.block_size,
        "groups": [_group(group) for group in groups],
        "num_blocks": scheduler.num_blocks,
        "tokens": tokens,
        "concurrency": concurrency,
        "max_in_flight_tokens": first.max_in_flight_tokens,
        "stage_block_bytes": [kv_cache_utils._pool_bytes_per_block(pool.kv_cache_groups) for pool in pools],
    }


def main() -> None:
    print(json.dumps({"vllm": vllm.__version__}), file=_answers)
    for line in sys.stdin:
        try:
            result = answer(json.loads(line))
        except Exception as error:  # noqa: BLE001 - the top of a process: a wrong reason fails the test with this text
            result = {"refused": f"{type(error).__name__}: {error}", "trace": traceback.format_exc(limit=-6)}
        print(json.dumps(result), file=_answers)


if __name__ == "__main__":
    main()
