"""What crosses the network for one request: blocks and bytes per decode rank.

Every decode rank pulls its own pages (NIXL pull): with more decode than prefill ranks each reads a slice of a prefill rank's page,
with copied heads each reads its own copy. So the bytes follow from the decode side alone. Checked to the byte on a CPU pair:
nine prompts of about 810 tokens to TP2 moved 2 ranks x 118 blocks x 6 layers x 65,536 bytes.
"""

from __future__ import annotations

from dataclasses import dataclass

from .capacity import Layout
from .specs import LayerSpec


@dataclass(frozen=True, slots=True)
class Transfer:
    """One request of `tokens` prompt tokens. bytes_per_rank: pulled by one decode rank; ranks: decode ranks of one engine copy.

    reads_per_rank: descriptors that one rank posts, one for each block and layer, before NIXL joins neighbours; from a prefill of at
    most the decode TP. Posting one took 2 to 8 us on two H200, for 128 KiB as for 512 (docs/benchmarks.md), so their number sets most of
    the time.
    """

    tokens: int
    blocks_by_group: tuple[int, ...]
    bytes_per_rank: int
    ranks: int
    reads_per_rank: int

    @property
    def total_bytes(self) -> int:
        return self.bytes_per_rank * self.ranks


def pulled_blocks(spec: LayerSpec, tokens: int) -> int:
    """Blocks of one group that decode asks for, without a prefix hit.

    Full: all. Sliding: from the block of the oldest token that the next query reads, clipped to cdiv(window, block) + 1
    (nixl/base_scheduler.py get_exchange_clipped_blocks). Chunked: from the current chunk on. State: the last one.
    """
    if spec.is_state:
        return 1
    total = -(-tokens // spec.block_size)
    if spec.kind == "sliding" and spec.window:
        first = max(0, tokens - spec.window + 1) // spec.block_size
        return min(total - first, -(-spec.window // spec.block_size) + 1)
    if spec.kind == "chunked" and spec.window:
        return total - (tokens // spec.window * spec.window) // spec.block_size
    return total


def transfer(decode: Layout, tokens: int) -> Transfer:
    """Bytes that one prompt moves into the decode engine. Padding inside a page travels with it."""
    by_group = tuple(pulled_blocks(group.first, tokens) for group in decode.groups)
    total = sum(count * group.page_bytes for count, group in zip(by_group, decode.groups, strict=True))
    reads = sum(count * len(group.layers) for count, group in zip(by_group, decode.groups, strict=True))
    return Transfer(tokens, by_group, total, decode.shape.tensor_parallel, reads)
