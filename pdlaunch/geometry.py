"""Which rank holds which KV heads, and who reads them from whom: the hand-off head by head, as the page draws it.

A rank holds max(1, K // tp) of a layer's K KV heads, copies included (QKVParallelLinear of vLLM 0.31.0). What a hand-off costs is in
planner/transfer.py, whether vLLM can do it in planner/compat.py; tests/test_geometry.py holds the three against each other.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from pdlaunch.errors import PlanError


@dataclass(frozen=True)
class LayerKind:
    """Layers of one shape. layers: their indices. kv_heads: of the whole model. head_size_k, head_size_v: elements."""

    name: str
    layers: tuple[int, ...]
    kv_heads: int
    head_size_k: int
    head_size_v: int


@dataclass(frozen=True)
class Read:
    """Decode rank `decode_rank` takes KV heads `heads` (indices in the whole model) of one layer kind from `prefill_rank`.

    whole: the prefill rank's complete page is read; otherwise a slice of it.
    """

    kind: str
    decode_rank: int
    prefill_rank: int
    heads: range
    whole: bool


def heads_per_rank(kv_heads: int, tp: int) -> int:
    """KV heads of a layer on one rank. PlanError unless one of the two divides the other (vLLM's own assertion)."""
    if tp < 1 or kv_heads < 1 or (kv_heads % tp and tp % kv_heads):
        raise PlanError(f"{kv_heads} KV heads over TP {tp}", rule="TP divides the KV heads or is a multiple of them")
    return max(1, kv_heads // tp)


def heads_of_rank(kv_heads: int, rank: int, tp: int) -> range:
    """The KV heads that one rank holds; with tp above kv_heads neighbours hold copies of one head."""
    first = rank * kv_heads // tp
    return range(first, first + heads_per_rank(kv_heads, tp))


def hand_off(kinds: Sequence[LayerKind], prefill_tp: int, decode_tp: int) -> list[Read]:
    """Every read of the patched connector, per layer kind, by decode rank and then prefill rank; for drawing a pair.

    Of prefill ranks that hold copies of one head a decode rank reads the first in its own share of ranks.
    """
    _check_tp(prefill_tp, decode_tp)
    reads = []
    for kind in kinds:
        for rank in range(decode_tp):
            mine = heads_of_rank(kind.kv_heads, rank, decode_tp)
            taken: set[int] = set()
            for source in _sources(rank, prefill_tp, decode_tp):
                theirs = heads_of_rank(kind.kv_heads, source, prefill_tp)
                heads = range(max(mine.start, theirs.start), min(mine.stop, theirs.stop))
                if heads and not taken & set(heads):
                    taken |= set(heads)
                    reads.append(Read(kind.name, rank, source, heads, heads == theirs))
    return reads


def _sources(decode_rank: int, prefill_tp: int, decode_tp: int) -> range:
    """Prefill ranks that a decode rank shakes hands with (TransferTopology.handshake_target_ranks)."""
    if decode_tp >= prefill_tp:
        source = decode_rank * prefill_tp // decode_tp
        return range(source, source + 1)
    ratio = prefill_tp // decode_tp
    return range(decode_rank * ratio, (decode_rank + 1) * ratio)


def _check_tp(prefill_tp: int, decode_tp: int) -> None:
    if min(prefill_tp, decode_tp) < 1 or max(prefill_tp, decode_tp) % min(prefill_tp, decode_tp):
        sizes = f"prefill TP {prefill_tp} and decode TP {decode_tp}"
        raise PlanError(sizes, rule="one of them divides the other", hint="use powers of two")


def layer_kinds(config: dict[str, Any]) -> list[LayerKind]:
    """The attention layers of a HF config.json, grouped by shape, in order of their first layer.

    Reads gemma-3, gemma-4 (per_layer_config, or global_head_dim and num_global_key_value_heads gated by attention_k_eq_v;
    layers that share another one's cache are left out), gpt-oss, and plain grouped-query models; a multimodal config by
    its text_config. vLLM stores K and V even where attention_k_eq_v makes them equal. PlanError names a missing key.
    """
    text = config.get("text_config", config)
    model_type = str(text.get("model_type", ""))
    for key in ("num_hidden_layers", "num_attention_heads"):
        if not isinstance(text.get(key), int):
            raise PlanError(f"config.json has no whole number {key!r}", rule="a HF config of an attention model")
    if any(key in text for key in ("kv_lora_rank", "layers_block_type", "linear_num_key_heads")):
        raise PlanError(f"{model_type} has layers other than grouped-query attention", rule="the planner knows those families")
    types = _layer_types(text, model_type)
    shared = int(text.get("num_kv_shared_layers") or 0)
    overrides = _overrides(text, model_type, types)
    found: dict[tuple[str, int, int], list[int]] = defaultdict(list)
    for i, name in enumerate(types[: len(types) - shared]):
        layer = {**text, **overrides.get(i, {})}
        heads = int(layer.get("num_key_value_heads") or text["num_attention_heads"])
        found[name, heads, _head_dim(layer)].append(i)
    return [LayerKind(name, tuple(layers), heads, dim, dim) for (name, heads, dim), layers in found.items()]


def _head_dim(layer: dict[str, Any]) -> int:
    if layer.get("head_dim"):
        return int(layer["head_dim"])
    if not isinstance(layer.get("hidden_size"), int):
        raise PlanError("config.json has neither 'head_dim' nor 'hidden_size'", rule="a HF config of an attention model")
    return int(layer["hidden_size"]) // int(layer["num_attention_heads"])


def _layer_types(text: dict[str, Any], model_type: str) -> list[str]:
    count = int(text["num_hidden_layers"])
    types = text.get("layer_types")
    if types is None and model_type.startswith(("gemma3", "gemma4")):
        pattern = int(text.get("sliding_window_pattern") or 6)
        types = ["full_attention" if (i + 1) % pattern == 0 else "sliding_attention" for i in range(count)]
    if types is None:
        types = ["full_attention"] * count
    if len(types) != count:
        raise PlanError(f"{len(types)} layer_types for {count} layers", rule="one per layer")
    if model_type.startswith("gemma4"):
        types = [*types[:-1], "full_attention"]
    return [str(name) for name in types]


def _overrides(text: dict[str, Any], model_type: str, types: list[str]) -> dict[int, dict[str, Any]]:
    """Layer index -> keys that differ from the model's (transformers configuration_gemma4.py)."""
    written = text.get("per_layer_config")
    if written is not None:
        return {int(i): dict(keys) for i, keys in written.items()}
    if not model_type.startswith("gemma4"):
        return {}
    wide: dict[str, Any] = {"head_dim": text.get("global_head_dim", 512)}
    if text.get("attention_k_eq_v", False) and text.get("num_global_key_value_heads"):
        wide["num_key_value_heads"] = text["num_global_key_value_heads"]
    return {i: wide for i, name in enumerate(types) if name == "full_attention"}
