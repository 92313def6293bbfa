"""What each switch of a role costs or gives, in requests of a given length."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from pdlaunch.errors import PlanError

from .capacity import Layout, plan_layout
from .shape import RoleShape


@dataclass(frozen=True, slots=True)
class Lever:
    """change: engine arguments as a person writes them. held, printed: requests that one cache holds between decode steps, and
    vLLM's printed concurrency at that length, after the change; minus the same before it. price_percent: change of the held price.
    refused: vLLM's reason when the change does not start, or, of a pair of roles, why the caches could not be handed over then.
    changes: the same as fields of the shape.
    """

    change: str
    price_percent: float | None
    held: int | None
    printed: float | None
    refused: str = ""
    changes: Mapping[str, object] = field(default_factory=dict)


def _candidates(layout: Layout) -> list[tuple[str, dict[str, object]]]:
    shape, model = layout.shape, layout.model
    found: list[tuple[str, dict[str, object]]] = []
    if len(layout.groups) > 1 or not shape.hybrid_manager:
        flag = not shape.hybrid_manager
        found.append((f"hybrid_kv_cache_manager: {str(flag).lower()}", {"hybrid_manager": flag}))
    if shape.kv_cache_dtype == "auto":
        found.append(("kv_cache_dtype: fp8", {"kv_cache_dtype": "fp8"}))
    else:
        found.append(("kv_cache_dtype: auto", {"kv_cache_dtype": "auto"}))
    if any(group.first.is_state for group in layout.groups):
        flag = not shape.prefix_caching
        found.append((f"prefix_caching: {str(flag).lower()}", {"prefix_caching": flag}))
        other = "bfloat16" if shape.mamba_ssm_cache_dtype != "bfloat16" else "float32"
        found.append((f"mamba_ssm_cache_dtype: {other}", {"mamba_ssm_cache_dtype": other}))
    if model.drafter:
        depth = 0 if shape.speculative_tokens else len(model.drafter)
        found.append((f"speculative_tokens: {depth}", {"speculative_tokens": depth}))
    if any(group.first.kind == "sliding" for group in layout.groups) and shape.max_num_batched_tokens > 2048:
        found.append(("max_num_batched_tokens: 2048", {"max_num_batched_tokens": 2048}))
    for tp in (shape.tensor_parallel // 2, shape.tensor_parallel * 2):
        if tp:
            found.append((f"tensor_parallel: {tp} (weights and memory as now)", {"tensor_parallel": tp}))
    return found


def _count(layout: Layout, tokens: int, kv: int) -> tuple[int, float]:
    blocks = kv // layout.block_bytes
    return (blocks - 1) // layout.steady(tokens).blocks, blocks / layout.admission(tokens).blocks


def levers(layout: Layout, tokens: int, kv_bytes: int | None) -> tuple[Lever, ...]:
    """Every lever that the model and the role have. kv_bytes: bytes for KV on one rank, held constant; None if unknown."""
    found = []
    shape: RoleShape = layout.shape
    for text, changes in _candidates(layout):
        try:
            other = plan_layout(layout.model, shape.with_changes(**changes))
        except PlanError as error:
            found.append(Lever(text, None, None, None, error.what, changes))
            continue
        before, after = layout.steady(tokens).bytes, other.steady(tokens).bytes
        held, printed = None, None
        if kv_bytes is not None:
            now, then = _count(layout, tokens, kv_bytes), _count(other, tokens, kv_bytes)
            held, printed = then[0] - now[0], then[1] - now[1]
        found.append(Lever(text, 100 * (after - before) / before, held, printed, "", changes))
    return tuple(found)
