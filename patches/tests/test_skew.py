"""Peers of another version, and peers whose words do not fit their memory."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from pair import Geometry, Settings, handshake_error, pair, recorded_peers
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata, NixlHandshakePayload

HEADS = Geometry(16, 4, layers=12)


def without_field(worker: Any) -> None:
    """The payload of an unpatched peer: the key is not on the wire."""
    payload = worker.xfer_handshake_metadata
    fields = msgspec.msgpack.decode(payload.agent_metadata_bytes)
    del fields["region_kv_heads"]
    worker.xfer_handshake_metadata = NixlHandshakePayload(payload.compatibility_hash, msgspec.msgpack.encode(fields))


@pytest.mark.parametrize(("p", "d"), [(4, 8), (1, 8), (8, 4), (8, 1)])
def test_unpatched_prefill_fails_loudly_and_is_named(p: int, d: int) -> None:
    with pair(HEADS, p, d) as made:
        for worker in made.prefill.workers:
            without_field(worker)
        error = handshake_error(made)
        assert isinstance(error, RuntimeError), repr(error)
        assert f"from TP {p} (remote) to TP {d} (local)" in str(error)
        assert "does not advertise KV heads per region. Apply the per-region KV heads patch to both" in str(error)
        assert recorded_peers(made.decode.workers[0]) == {}


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 4), (4, 1), (8, 8)])
def test_unpatched_prefill_keeps_working_where_stock_does(p: int, d: int) -> None:
    with pair(HEADS, p, d) as made:
        for worker in made.prefill.workers:
            without_field(worker)
        made.request(192)
        outcome = made.run()
        assert not any(outcome.failed)
        assert made.differences() == []


def test_a_newer_peer_with_unknown_keys_is_read() -> None:
    with pair(HEADS, 4, 8) as made:
        fields = msgspec.msgpack.decode(made.prefill.workers[0].xfer_handshake_metadata.agent_metadata_bytes)
        fields["from_the_future"] = [1, 2, 3]
        metadata = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(msgspec.msgpack.encode(fields))
        assert made.decode.workers[0].add_remote_agent(metadata, 0, 4, 1) == "prefill/0"


def set_heads(region: int, heads: list[int]) -> Any:
    def change(metadata: Any) -> None:
        metadata.region_kv_heads[region] = heads

    return change


def scale_length(region: int, factor: int) -> Any:
    def change(metadata: Any) -> None:
        metadata.block_lens[region] *= factor

    return change


def cut(field: str) -> Any:
    def change(metadata: Any) -> None:
        getattr(metadata, field).pop()

    return change


LIES = {
    "half the sliding heads": (set_heads(0, [2]), "do not follow the TP sizes in region 0: local 2 at TP 8, remote 2 at TP 4"),
    "double the global heads": (set_heads(5, [2]), "Region 5: remote block_len"),
    "no heads": (set_heads(5, [0]), "do not follow the TP sizes in region 5"),
    "three heads": (set_heads(5, [3]), "do not follow the TP sizes in region 5"),
    "longer blocks": (scale_length(5, 2), "Region 5: remote block_len"),
    "longer split blocks": (scale_length(0, 2), "Region 0: remote block_len"),
    "a region less in the heads": (cut("region_kv_heads"), "Number of KV regions must match: local 12, remote 11/12/12"),
    "a region less in the lengths": (cut("block_lens"), "local 12, remote 12/11/12"),
    "a region less in the addresses": (cut("kv_caches_base_addr"), "local 12, remote 12/12/11"),
}


@pytest.mark.parametrize("lie", LIES)
def test_lying_peers_fail_before_anything_is_recorded(lie: str) -> None:
    change, message = LIES[lie]
    with pair(HEADS, 4, 8) as made:
        error = handshake_error(made, change=change)
        assert isinstance(error, RuntimeError), repr(error)
        assert message in str(error)
        assert "engine prefill" in str(error)
        assert recorded_peers(made.decode.workers[0]) == {}


def test_a_second_prefill_rank_that_lies_fails_the_handshake() -> None:
    """Decode TP below prefill TP meets several ranks; an honest first one does not cover the second."""
    with pair(HEADS, 8, 4) as made:
        assert handshake_error(made, rank=0, source=0) is None
        error = handshake_error(made, rank=0, source=1, change=set_heads(0, [4]))
        assert isinstance(error, RuntimeError)
        assert list(made.decode.workers[0].dst_xfer_side_handles["prefill"]) == [0]


def test_hybrid_manager_on_one_side_only_is_a_hash_mismatch() -> None:
    with pair(HEADS, 4, 8, Settings(hybrid=True, num_blocks=48), Settings()) as made:
        assert made.prefill.workers[0].compat_hash != made.decode.workers[0].compat_hash
        made.request(384)
        outcome = made.run()
        assert outcome.failed == [{"req0"}] * 8
        assert made.network.reads == []
