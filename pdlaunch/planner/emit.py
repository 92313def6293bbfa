"""Values for the recipe that follow from the plan, as a patch that can be laid over it.

Rules: enough sequences for the concurrency of each cache plus a margin, but no more than fit; a decode step holds one token per
sequence and its drafts, so its batch is the largest captured graph plus the margin; prefill batches two prompts; one block size on
both roles. The margins are those of the published GB300 recipes (max-num-seqs = concurrency / DP + 16, batch = capture + 16).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .capacity import Capacity, Layout

MARGIN = 16


@dataclass(frozen=True, slots=True)
class Emitted:
    """values: key -> (value, why), nested as in a recipe: engine_args, then engines.<role>.engine_args."""

    shared: dict[str, tuple[Any, str]]
    roles: dict[str, dict[str, tuple[Any, str]]]
    capture_sizes: tuple[int, ...]

    def patch(self) -> dict[str, Any]:
        """The patch as a recipe's own keys."""
        body: dict[str, Any] = {}
        if self.shared:
            body["engine_args"] = {key: value for key, (value, _) in self.shared.items()}
        for role, values in self.roles.items():
            own = {key: value for key, (value, _) in values.items() if key != "max_cudagraph_capture_size"}
            engine: dict[str, Any] = {"engine_args": own}
            if "max_cudagraph_capture_size" in values:
                engine["extra_args"] = ["--max-cudagraph-capture-size", str(values["max_cudagraph_capture_size"][0])]
            body.setdefault("engines", {})[role] = engine
        return body

    def yaml(self) -> str:
        """The patch as YAML with the reason beside each value."""
        lines: list[str] = []
        for key, (value, why) in self.shared.items():
            lines += ["engine_args:"] if not lines else []
            lines.append(f"  {key}: {value}  # {why}")
        lines.append("engines:")
        for role, values in self.roles.items():
            lines += [f"  {role}:", "    engine_args:"]
            lines += [f"      {key}: {value}  # {why}" for key, (value, why) in values.items() if key != "max_cudagraph_capture_size"]
            if "max_cudagraph_capture_size" in values:
                size, why = values["max_cudagraph_capture_size"]
                lines.append(f'    extra_args: ["--max-cudagraph-capture-size", "{size}"]  # {why}')
        return "\n".join(lines) + "\n"


def capture_sizes(largest: int) -> tuple[int, ...]:
    """vllm config/vllm.py: 1, 2, 4, then every 8 up to 256, then every 16, up to the largest."""
    sizes = [n for n in (1, 2, 4) if n <= largest]
    sizes += range(8, min(largest, 255) + 1, 8)
    sizes += range(256, largest + 1, 16)
    return tuple(sizes)


def captured(tokens: int) -> int:
    """Smallest size that vLLM captures and that holds a batch of so many tokens; at most 1024, beyond which it runs uncaptured."""
    sizes: tuple[int, ...] = (1, 2, 4, *range(8, 256, 8), *range(256, 1025, 16))
    return min(size for size in sizes if size >= min(tokens, 1024))


def _sequences(layout: Layout, concurrency: int | None, fits: int | None) -> tuple[int, str]:
    copies = layout.shape.cache_copies
    if concurrency is None and fits is None:
        return layout.shape.max_num_seqs, "as given: neither concurrency nor memory is known"
    if concurrency is None:
        return max(1, fits or 1), "as many requests as one cache holds"
    wanted = -(-concurrency // copies) + MARGIN
    if fits is not None and fits < wanted:
        return max(1, fits), f"as many requests as one cache holds; concurrency {concurrency} over {copies} caches wants {wanted}"
    return wanted, f"concurrency {concurrency} over {copies} caches, plus {MARGIN}"


def emit(prefill: Layout, decode: Layout, tokens: int, concurrency: int | None, cache: Capacity | None) -> Emitted:
    """Values for a pair. tokens: prompt plus output. cache: decode's capacity, None when its memory is unknown."""
    fits = None if cache is None else cache.requests(tokens, held=True)
    seqs, why = _sequences(decode, concurrency, fits)
    shared: dict[str, tuple[Any, str]] = {}
    blocks = prefill.choice.block_size, decode.choice.block_size
    if blocks[0] != blocks[1] or prefill.shape.block_size is not None:
        shared["block_size"] = max(blocks), "one size on both roles" + ("" if blocks[0] == blocks[1] else f"; vLLM alone: {blocks}")
    depth = decode.shape.speculative_tokens
    largest = captured(seqs * (1 + depth))
    sizes = capture_sizes(largest)
    batch = max(largest + MARGIN, max(blocks) if decode.shape.state_mode == "align" and cache_has_state(decode) else 0)
    roles: dict[str, dict[str, tuple[Any, str]]] = {
        "prefill": {"max_num_batched_tokens": (2 * tokens, "two prompts in one step")},
        "decode": {
            "max_num_seqs": (seqs, why),
            "max_num_batched_tokens": (batch, f"largest captured batch plus {MARGIN}"),
        },
    }
    if not decode.shape.cpu:
        roles["decode"]["max_cudagraph_capture_size"] = largest, f"holds {seqs} sequences x {1 + depth} tokens"
    return Emitted(shared, roles, sizes)


def cache_has_state(layout: Layout) -> bool:
    return any(group.first.is_state for group in layout.groups)
