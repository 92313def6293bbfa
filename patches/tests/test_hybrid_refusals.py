"""What a plan per group does not cover is refused at the handshake, before anything about the peer is recorded."""

from __future__ import annotations

from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from hybrid_engines import CPU, Side, hybrid
from pair import Geometry, Settings, handshake_error, pair, recorded_peers
from test_requests import log_lines
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.push_worker import NixlPushConnectorWorker
from vllm.v1.attention.backends import cpu_attn

SMALL = Geometry(4, 1)
ROWS = Side()
OFF = "--disable-hybrid-kv-cache-manager on both prefill and decode"


def refused(kind: type[Exception], words: list[str], *, side: Side = ROWS, change: Any = None, local: Any = None, tp: Any = (1, 2)) -> None:
    with hybrid(SMALL, *tp, side) as made:
        worker = made.decode.workers[0]
        if local is not None:
            local(worker)
        error = handshake_error(made, change=change)  # type: ignore[arg-type]
        assert isinstance(error, kind), repr(error)
        for word in ["engine prefill", *words]:
            assert word in str(error)
        assert recorded_peers(worker) == {}
        assert worker._group_src_handles == {}


def page(**changes: Any) -> Any:
    def change(metadata: Any) -> None:
        metadata.group_pages[-1] = replace(metadata.group_pages[-1], **changes)

    return change


def set_field(name: str, value: Any) -> Any:
    return lambda target: setattr(target, name, value)


LIES = {
    "other layers": (page(layers="0" * 16), "KV cache groups hold different layers"),
    "a group less": (lambda m: m.group_pages.pop(), "local 6 groups, remote 5"),
    "more heads": (page(heads=2), "contradict blocks of"),
    "no heads": (page(heads=0), "do not follow the TP sizes in KV cache group 5"),
    "three heads": (page(heads=3), "do not follow the TP sizes in KV cache group 5"),
    "half the tokens": (page(block_tokens=64), "remote pages of"),
    "other byte order": (page(strips=((64, 2), (1, 128))), "Set the same --kv-cache-dtype"),
    "longer blocks": (lambda m: m.block_lens.__setitem__(0, m.block_lens[0] * 2), "contradict blocks of"),
    "a region more": (lambda m: m.block_lens.append(m.block_lens[0]), "Number of KV regions must match: local 1, remote 2/1"),
    "other owners": (set_field("region_group_ids", [3]), "KV regions belong to different KV cache groups"),
}


@pytest.mark.parametrize("lie", LIES)
def test_peers_that_contradict_themselves(lie: str) -> None:
    change, words = LIES[lie]
    refused(RuntimeError, [words], change=change)


def test_blocks_that_hold_no_whole_number_of_local_ones() -> None:
    words = ["local blocks of 64 tokens do not divide remote blocks of 96", "--block-size", OFF]
    refused(NotImplementedError, words, change=page(block_tokens=96))


LARGER_AT_DECODE = [
    *(((16, 4), p, d) for p, d in ((1, 16), (2, 16), (4, 16), (8, 16), (4, 32), (8, 32))),
    *(((8, 2), p, d) for p, d in ((1, 8), (2, 8), (4, 8), (4, 16))),
    *(((4, 1), p, d) for p, d in ((1, 4), (2, 4), (1, 8), (2, 8))),
]


@pytest.mark.parametrize(("heads", "p", "d"), LARGER_AT_DECODE)
def test_decode_tp_at_which_sliding_layers_get_the_larger_blocks(heads: tuple[int, int], p: int, d: int) -> None:
    """One sliding head per rank has half the bytes of a global one, so its pages hold 128 tokens at decode and 64 at prefill."""
    with hybrid(Geometry(*heads), p, d, Side(num_blocks=8)) as made:
        for rank, worker in enumerate(made.decode.workers):
            error = handshake_error(made, rank, rank * p // d)  # type: ignore[arg-type]
            assert isinstance(error, NotImplementedError)
            assert "KV cache group 0: local blocks of 128 tokens do not divide remote blocks of 64 (engine prefill)" in str(error)
            assert "a smaller decode TP" in str(error)
            assert OFF in str(error)
            assert recorded_peers(worker) == {}
            assert worker._group_src_handles == {}


@pytest.mark.parametrize("field", ["dcp_size", "pcp_size"])
def test_context_parallelism(field: str) -> None:
    words = ["pipeline and context parallelism are not supported", f"{field[:3]} 2"]
    refused(NotImplementedError, [f"remote {words[1]}", words[0]], change=set_field(field, 2))
    refused(NotImplementedError, [f"local {words[1]}", words[0]], local=set_field(field, 2))


def test_pipeline_parallelism() -> None:
    refused(NotImplementedError, ["pipeline 2"], local=set_field("pp_size", 2))


def test_push_mode() -> None:
    push = Side(worker_class=NixlPushConnectorWorker)
    refused(NotImplementedError, ["NixlPushConnector (transfer mode 'push') is not supported"], side=push)


@pytest.mark.parametrize("tp", [(2, 1), (4, 2), (4, 1)])
def test_decode_tp_below_prefill_tp(tp: tuple[int, int]) -> None:
    refused(NotImplementedError, ["decode TP must be at least prefill TP", OFF], tp=tp)


def test_attention_backends_differ() -> None:
    words = ["attention backends differ: local FLASH_ATTN, remote TRITON_ATTN"]
    refused(NotImplementedError, words, change=set_field("attn_backend_name", "TRITON_ATTN"))


def test_unknown_attention_backends_are_named() -> None:
    with mock.patch("vllm.v1.attention.backends.flash_attn.FlashAttentionBackend.get_name", return_value="FLASHINFER"):
        words = ["local KV cache group 0: the page layout of attention backend FLASHINFER is not known"]
        refused(NotImplementedError, [*words, "CPU_ATTN, FLASH_ATTN, TRITON_ATTN", OFF])


def test_cpu_pages_of_other_element_types() -> None:
    refused(NotImplementedError, ["CPU_ATTN orders torch.bfloat16 pages for", "--dtype float32"], side=Side("CPU_ATTN", "bfloat16"))


@pytest.mark.parametrize("isa", ["amx", "neon", "vec16"])
def test_cpu_pages_of_other_instruction_sets(isa: str) -> None:
    with mock.patch.object(cpu_attn, "_get_attn_isa", return_value=isa):
        refused(NotImplementedError, [f"CPU_ATTN orders torch.float32 pages for {isa}", "--dtype float32"], side=CPU)


def test_token_major_layout_and_host_buffers() -> None:
    refused(NotImplementedError, ["KV cache layout LBNHC (supported: LBHNC)", OFF], side=Side(layout="LBNHC"))
    with mock.patch("pair.NixlPullConnectorWorker.initialize_host_xfer_buffer", autospec=True) as stage:
        stage.side_effect = lambda self, kv_caches: setattr(self, "host_xfer_buffers", {n: c.clone() for n, c in kv_caches.items()})
        refused(NotImplementedError, ["kv_buffer_device=cpu stages pages in host memory"], side=Side(host_buffer=True))


def test_a_peer_without_this_patch_gets_the_refusal_of_the_one_below() -> None:
    refused(NotImplementedError, ["layers share cache region 0", OFF], change=set_field("group_pages", None))


def test_hybrid_manager_off_at_the_peer_is_a_hash_mismatch() -> None:
    with pair(SMALL, 1, 2, Settings(), Settings(hybrid=True, num_blocks=48)) as made:
        made.request(256)
        outcome = made.run()
        assert outcome.failed == [{"req0"}] * 2
        assert all(recorded_peers(worker) == {} for worker in made.decode.workers)


@pytest.mark.parametrize(("heads", "p", "d"), [((4, 1), 2, 1), ((4, 1), 1, 4), ((16, 4), 8, 16)])
def test_a_refusal_through_the_whole_path_fails_the_request_and_nothing_else(heads: tuple[int, int], p: int, d: int) -> None:
    with hybrid(Geometry(*heads), p, d, Side(num_blocks=60)) as made:
        done = made.serve(385)
        assert done.reason == "error"
        assert made.moved_bytes() == 0
        assert [recorded_peers(worker) for worker in made.decode.workers] == [{}] * d


def test_one_plan_line_per_decode_rank_and_one_active_line_per_rank() -> None:
    with log_lines("vllm.distributed.kv_transfer.kv_connector.v1.nixl.group_pages") as lines, hybrid(SMALL, 1, 2, Side()) as made:
        made.serve(100)
        made.serve(200)
    active = "NIXL per-group KV pages active: rank={}/{} groups=5 of {} tokens x {} heads, 1 of {} tokens x 1 heads"
    plan = "NIXL per-group KV pages plan: engine=prefill rank={}/2 remote_tp=1 groups=6 regions=1 head_split=5 token_split=1"
    assert sorted(lines) == sorted(
        [active.format(0, 1, 64, 4, 128), *(active.format(r, 2, 64, 2, 64) for r in (0, 1)), *(plan.format(r) for r in (0, 1))]
    )


def test_descriptor_lists_are_released_with_the_engine() -> None:
    with hybrid(SMALL, 1, 2, CPU) as made:
        made.serve(100)
        agents = [worker.nixl_wrapper for worker in made.decode.workers]
        assert all(len(agent.lists) == 3 for agent in agents)
    assert all(agent.lists == {} for agent in agents)
