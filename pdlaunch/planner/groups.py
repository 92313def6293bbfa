"""Which layers share a block table: page unification and grouping. vllm v1/core/kv_cache_utils.py get_kv_cache_groups.

One pool of equal blocks serves every layer. Layers of one group use the same block ids; a request takes blocks for each group.
So the number of groups, not the number of layers, multiplies a request's blocks, and the widest group sets a block's bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pdlaunch.errors import PlanError

from .blocks import SpecLayers
from .specs import LayerSpec


@dataclass(frozen=True)
class Group:
    """Layers with one block table. specs has one entry, or several when all need the same blocks but differ in page bytes."""

    specs: SpecLayers

    @property
    def first(self) -> LayerSpec:
        return next(iter(self.specs))

    @property
    def layers(self) -> list[int]:
        return [index for indices in self.specs.values() for index in indices]

    @property
    def page_bytes(self) -> int:
        """Bytes of one block in all the layers of this group."""
        return sum(spec.page_bytes * len(indices) for spec, indices in self.specs.items())

    def on_stage(self, stages: list[int], stage: int) -> Group:
        """The same group with only the layers of one pipeline stage (_project_kv_cache_groups_to_worker)."""
        return Group({spec: [i for i in indices if stages[i] == stage] for spec, indices in self.specs.items()})


@dataclass(frozen=True)
class Grouping:
    """groups, and how they came about: "one kind", "one type" (equal blocks, different pages), or "unified pages".

    padding_layers: layers' worth of pages that no layer fills, as vLLM warns ("Add n padding layers").
    """

    groups: tuple[Group, ...]
    path: str
    padding_layers: int = 0


def mergeable(specs: list[LayerSpec]) -> bool:
    """Whether vLLM's merge() accepts them as one spec: equal, or full attention that differs only in one promoted window."""
    first = specs[0]
    if first.kind != "full":
        return all(spec == first for spec in specs)
    if any(spec.kind != "full" or spec.storage() != first.storage() for spec in specs):
        return False
    windows = {spec.promoted_window for spec in specs} - {None}
    chunks = {spec.promoted_chunk for spec in specs} - {None}
    return len(windows) <= 1 and len(chunks) <= 1 and not (windows and chunks)


def one_type(specs: list[LayerSpec]) -> bool:
    """UniformTypeKVCacheSpecs.is_uniform_type: every layer always needs the same number of blocks."""
    first = specs[0]
    if len({spec.block_size for spec in specs}) > 1:
        return False
    if first.is_full:
        return all(spec.is_full for spec in specs)
    if first.kind in ("sliding", "chunked"):
        return all(spec.kind == first.kind and spec.window == first.window for spec in specs)
    same = (first.speculative_blocks, first.page_bytes)
    return all(spec.is_state and (spec.speculative_blocks, spec.page_bytes) == same for spec in specs)


def promote(specs: SpecLayers) -> SpecLayers:
    """Hybrid manager off: local layers keep every token (unify_hybrid_kv_cache_specs).

    PlanError where vLLM raises: states, or layers of several windows and no full layer, cannot become one type.
    """
    kinds = list(specs)
    if mergeable(kinds) or one_type(kinds):
        return specs
    full_blocks = {spec.block_size for spec in kinds if spec.is_full}
    common = next(iter(full_blocks)) if len(full_blocks) == 1 else None
    promoted: SpecLayers = {}
    for spec, indices in specs.items():
        new = spec
        if full_blocks and spec.kind in ("sliding", "chunked"):
            new = replace(
                spec,
                kind="full",
                block_size=common or spec.block_size,
                window=None,
                promoted_window=spec.window if spec.kind == "sliding" else None,
                promoted_chunk=spec.window if spec.kind == "chunked" else None,
            )
        promoted.setdefault(new, []).extend(indices)
    if not (mergeable(list(promoted)) or one_type(list(promoted))):
        rule = "vLLM: Failed to promote local KV cache specs to one unified type"
        raise PlanError("this model cannot run with the hybrid KV cache manager off", rule=rule, hint="hybrid_kv_cache_manager: true")
    return promoted


def _resize(spec: LayerSpec, page: int) -> LayerSpec:
    """unify_kv_cache_spec_page_size: a smaller page grows by more tokens per block if it divides, else by padding."""
    own = spec.page_bytes
    if own == page:
        return spec
    if spec.is_state or page % own:
        if spec.kind in ("mla", "indexer"):
            raise PlanError(
                f"an {spec.kind} page of {own} bytes does not divide the largest page of {page} bytes",
                rule="vLLM cannot pad MLA pages (unify_kv_cache_spec_page_size)",
            )
        return replace(spec, padded=page)
    return replace(spec, block_size=spec.block_size * (page // own))


def unify_pages(specs: SpecLayers) -> SpecLayers:
    page = max(spec.page_bytes for spec in specs)
    unified: SpecLayers = {}
    for spec, indices in specs.items():
        unified.setdefault(_resize(spec, page), []).extend(indices)
    return unified


def _buckets(specs: SpecLayers) -> list[tuple[list[LayerSpec], list[int]]]:
    buckets: list[tuple[list[LayerSpec], list[int]]] = []
    for spec, indices in specs.items():
        for members, layers in buckets:
            if mergeable([*members, spec]):
                members.append(spec)
                layers.extend(indices)
                break
        else:
            buckets.append(([spec], list(indices)))
    return buckets


def _equal_groups(specs: SpecLayers) -> Grouping:
    """_get_kv_cache_groups_uniform_page_size: split every bucket into groups of equal width.

    The width is the smallest bucket, or the largest if that is under 1.5 times the smallest (then the small one is padded).
    Layers are dealt round robin so that pipeline stages stay balanced.
    """
    buckets = _buckets(specs)
    smallest, largest = min(len(layers) for _, layers in buckets), max(len(layers) for _, layers in buckets)
    width = largest if largest < smallest * 1.5 else smallest
    groups: list[Group] = []
    padding = 0
    for members, layers in buckets:
        count = -(-len(layers) // width)
        padding += count * width - len(layers)
        groups += [Group({members[0]: layers[i::count]}) for i in range(count)]
    return Grouping(tuple(groups), "unified pages", padding)


def group_layers(specs: SpecLayers, hybrid_manager: bool) -> Grouping:
    """Groups of one engine, in vLLM's order of attempts: all layers alike, all of one type, else equal pages in equal groups."""
    if not hybrid_manager:
        specs = promote(specs)
    kinds = list(specs)
    if mergeable(kinds):
        return Grouping((Group({kinds[0]: sorted(i for indices in specs.values() for i in indices)}),), "one kind")
    if one_type(kinds):
        return Grouping((Group(specs),), "one type")
    return _equal_groups(unify_pages(specs))
