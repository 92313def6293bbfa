"""Run on STOCK vLLM: the bug that the per-region patch mends is still there, with exactly the message that was reported,
or stock moves every byte. The second is the drop rule: then test_matrix.py passes without the patch."""

from __future__ import annotations

import msgspec
import pytest
from pair import Geometry, Settings, handshake_error, pair
from vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata import NixlAgentMetadata

# The head counts and sizes of gemma-4-31B, with one global layer.
GEMMA_31B = Geometry(16, 4, layers=6, head_dim=256, global_head_dim=512)
SMALL = Settings(num_blocks=4)
REPORTED = (
    "SPLIT region 5: remote P KV block_len 131072 must equal local 131072 * remote_heads 4 // local_heads 2 "
    "// block_size_ratio 1."
)
DOWN = "SPLIT region 5: remote P KV block_len 131072 must equal local 131072 * remote_heads 2 // local_heads 4."


def first_line(error: BaseException) -> str:
    """The message of vLLM's assert; pytest may rewrite it and append the operands on further lines."""
    return str(error).splitlines()[0]


@pytest.mark.parametrize(("p", "d", "message"), [(4, 8, REPORTED), (8, 4, DOWN)])
def test_stock_fails_as_reported_or_moves_every_byte(
    p: int, d: int, message: str, record_property: pytest.RecordProperty
) -> None:
    with pair(GEMMA_31B, p, d, SMALL, SMALL) as made:
        made.request(64)
        outcome = made.run()
        if not any(outcome.failed):
            record_property("stock", "moves every byte: drop the patch")
            assert made.differences() == []
            return
        record_property("stock", "fails as reported")
        error = handshake_error(made, rank=0, source=0)
        assert type(error) is AssertionError
        assert first_line(error) == message
        assert made.network.reads == []


def test_stock_decode_with_a_patched_prefill_fails_loudly() -> None:
    """Version skew the other way round: stock ignores the extra key and ends with its own message."""
    with pair(GEMMA_31B, 4, 8, SMALL, SMALL) as made:
        fields = msgspec.msgpack.decode(made.prefill.workers[0].xfer_handshake_metadata.agent_metadata_bytes)
        fields["region_kv_heads"] = [[4]] * 5 + [[1]]
        metadata = msgspec.msgpack.Decoder(NixlAgentMetadata).decode(msgspec.msgpack.encode(fields))
        with pytest.raises(AssertionError) as caught:
            made.decode.workers[0].add_remote_agent(metadata, 0, 4, 1)
        assert first_line(caught.value) == REPORTED


@pytest.mark.parametrize(("p", "d"), [(1, 2), (2, 4), (4, 1), (8, 8)])
def test_stock_is_right_where_heads_scale_alike(p: int, d: int) -> None:
    """The harness itself is not what fails on stock."""
    with pair(Geometry(16, 4), p, d) as made:
        made.request(192)
        outcome = made.run()
        assert not any(outcome.failed)
        assert made.differences() == []
