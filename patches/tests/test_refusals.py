"""What cannot be right is refused before anything about the peer is recorded, with both sides and the flag to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from pair import Geometry, Settings, handshake_error, pair, recorded_peers
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker

HEADS = Geometry(16, 4)
HMA = "--disable-hybrid-kv-cache-manager on both prefill and decode"


def refused(
    p: int, d: int, prefill: Settings, decode: Settings, words: list[str], change: Any = None, local: Any = None
) -> None:
    """One handshake that must end in NotImplementedError with these words."""
    with pair(HEADS, p, d, prefill, decode) as made:
        for worker in made.decode.workers:
            if local is not None:
                local(worker)
        error = handshake_error(made, rank=0, source=0, change=change)
        assert isinstance(error, NotImplementedError), repr(error)
        for word in [f"local TP {d}, remote TP {p} (engine prefill)", *words]:
            assert word in str(error)
        assert recorded_peers(made.decode.workers[0]) == {}


@pytest.mark.parametrize(("p", "d"), [(1, 8), (2, 8), (4, 8), (8, 1), (8, 2), (8, 4)])
def test_hybrid_manager_where_it_matters(p: int, d: int) -> None:
    on = Settings(hybrid=True, num_blocks=48)
    refused(p, d, on, on, ["layers share cache region 0 (local KV heads [", "as the hybrid KV cache manager makes them", HMA])


def test_block_sizes() -> None:
    words = ["block sizes differ: local 64 (kernel 64), remote 32 (kernel 32) tokens", "--block-size on both prefill and decode"]
    refused(4, 8, Settings(block_size=32), Settings(block_size=64), words)
    refused(8, 4, Settings(block_size=32), Settings(block_size=64), words)


def test_logical_block_sizes_over_equal_kernel_blocks() -> None:
    def split_kernel_blocks(metadata: Any) -> None:
        metadata.physical_blocks_per_logical_kv_block = 2

    words = ["local 64 (kernel 64), remote 128 (kernel 64) tokens"]
    refused(4, 8, Settings(), Settings(), words, change=split_kernel_blocks)


def test_permutation_on_receive() -> None:
    words = ["KV cache layouts differ: local LBNHC, remote LBHNC", "enable_permute_local_kv", "VLLM_KV_CACHE_LAYOUT"]
    refused(4, 8, Settings(), Settings(layout="LBNHC", permute=True), words)
    refused(4, 8, Settings(), Settings(layout="LBNHC"), words)


def test_layout_that_interleaves_heads() -> None:
    token_major = Settings(layout="LBNHC")
    refused(4, 8, token_major, token_major, ["layout LBNHC does not keep the heads", "VLLM_KV_CACHE_LAYOUT=HND on both"])


@pytest.mark.parametrize("side", ["local dcp", "local pcp", "remote dcp", "remote pcp"])
def test_context_parallelism(side: str) -> None:
    where, kind = side.split()

    def change(metadata: Any) -> None:
        if where == "remote":
            setattr(metadata, f"{kind}_size", 2)

    def local(worker: Any) -> None:
        if where == "local":
            setattr(worker, f"{kind}_size", 2)

    words = [f"{side} 2", "--decode-context-parallel-size and --prefill-context-parallel-size"]
    refused(4, 8, Settings(), Settings(), words, change=change, local=local)


def test_padded_pages() -> None:
    """A page with a tail is not `heads` equal slices. Stock registers such pages in packed layouts only, where all layers
    then share one region."""
    packed = Settings(layout="BLHNC", page_padding=4096)
    refused(4, 8, packed, packed, ["layers share cache region 0", HMA])

    def pad(worker: Any) -> None:
        spec = worker._layer_specs["model.layers.0.self_attn.attn"]
        padded = replace(spec, page_size_padded=spec.unpadded_page_size_bytes + 4096)
        worker._region_kv_heads.add(0, "model.layers.0", padded, padded.page_size_bytes, 64)

    refused(4, 8, Settings(), Settings(), ["region 0 cannot be cut by heads", "(padded page)", HMA], local=pad)


def test_push_mode() -> None:
    push = Settings(worker_class=NixlPushConnectorWorker)
    words = ["NixlPushConnector (transfer mode 'push') is not supported", '"kv_connector": "NixlConnector"']
    refused(4, 8, push, push, words)
    refused(8, 4, push, push, words)


def test_attention_backends() -> None:
    def change(metadata: Any) -> None:
        metadata.attn_backend_name = "FLASH_ATTN"

    words = ["attention backends differ: local CPU_ATTN, remote FLASH_ATTN", "--attention-backend on both"]
    refused(4, 8, Settings(), Settings(), words, change=change)


def test_a_refusal_through_the_whole_path_fails_the_request_and_nothing_else() -> None:
    on = Settings(hybrid=True, num_blocks=48)
    with pair(HEADS, 4, 8, on, on) as made:
        made.request(384)
        outcome = made.run()
        assert outcome.failed == [{"req0"}] * 8
        assert outcome.freed == [set()] * 4
        assert made.network.reads == []
        assert all(recorded_peers(worker) == {} for worker in made.decode.workers)


def test_uniform_models_are_not_refused() -> None:
    """The same configurations with layers that scale alike stay with stock: accepted, or stock's own refusal."""
    uniform = Geometry(16, None)
    for settings in (Settings(layout="BLHNC"), Settings(block_size=32)):
        with pair(uniform, 4, 8, settings, settings) as made:
            assert handshake_error(made) is None
    push = Settings(worker_class=NixlPushConnectorWorker)
    with pair(uniform, 8, 4, push, push) as made:
        assert handshake_error(made) is None
