"""Rules of pairs whose layers keep different head counts: patches, page layouts, and the hybrid manager on or off side by side."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from .layers import Attention
from .pair import PER_GROUP_PATCH, PER_REGION_PATCH, Pair, copies_above, needed_patches, requests_lost, unevenly_scaled
from .rules import Finding
from .specs import heads_per_rank, model_dtype
from .transfer import transfer

PER_GROUP_BACKENDS = {"CPU_ATTN": None, "FLASH_ATTN": 256, "TRITON_ATTN": None}
"""Backends whose pages the per-group patch knows -> largest head size of the kernels that have run with it, None: any.

Runs were token-exact with heads of 64 and 128, and moved the right bytes with 256 and 512 (docs/hybrid-manager.md, Evidence); the byte
order of a page does not depend on the head size. FLASH_ATTN ran as FlashAttention 3, which ends at 256; where heads differ in size vLLM
takes version 4 for all layers if it can (models/config.py Gemma4Config), whose pages nobody has read here."""
PER_GROUP_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
_MANY_READS = 5_000


def _heads_text(pair: Pair, uneven: list[Attention]) -> str:
    p, d = pair.p.tensor_parallel, pair.d.tensor_parallel
    parts = [f"{a.label}: {heads_per_rank(a.kv_heads, p)} -> {heads_per_rank(a.kv_heads, d)} per rank" for a in uneven]
    wide = f"{heads_per_rank(pair.model.kv_heads, p)} -> {heads_per_rank(pair.model.kv_heads, d)}"
    return f"{'; '.join(parts)}, while vLLM assumes {wide} for every layer"


def mixed_heads(pair: Pair) -> Iterator[Finding]:
    uneven = unevenly_scaled(pair.model, pair.p.tensor_parallel, pair.d.tensor_parallel)
    needed = needed_patches(pair)
    unused = pair.patches & {PER_REGION_PATCH, PER_GROUP_PATCH} - needed
    if unused:
        yield Finding("info", "patch-not-needed", f"{', '.join(sorted(unused))}: this pair's cache does not need it")
    missing = sorted(needed - pair.patches)
    if not needed or (missing and not uneven and copies_above(pair)):
        return  # the latter is said by prefill-replicates
    why = "prefill TP above the KV heads and above decode TP" if copies_above(pair) else "the roles unify pages to different block sizes"
    why = _heads_text(pair, uneven) if uneven else why
    if PER_GROUP_PATCH in needed and pair.p.tensor_parallel > pair.d.tensor_parallel:
        message = f"hybrid manager on with prefill TP above decode TP: {why}; {PER_GROUP_PATCH} reads one way only"
        fix = f"decode TP of at least prefill TP, or hybrid_kv_cache_manager: false with {PER_REGION_PATCH}"
        yield Finding("error", "mixed-heads-direction", message, fix, requests_lost(pair.decode, hybrid_manager=False))
    elif missing:
        price = requests_lost(pair.decode, hybrid_manager=False) if PER_GROUP_PATCH in missing else None
        fix = f"{PER_REGION_PATCH} with hybrid_kv_cache_manager: false on both roles"
        not_either = [f.message for f in page_layout(replace(pair, patches=pair.patches | needed)) if f.severity == "error"]
        if not_either:
            why += f"; {not_either[0]}"
        else:
            fix = f"patches: [{', '.join(sorted(needed))}]" + (f", or {fix}" if PER_GROUP_PATCH in missing else "")
        yield Finding("error", "mixed-heads", f"stock vLLM refuses this pair: {why}", fix, price)
    else:
        yield Finding("info", "mixed-heads-patched", f"needs {', '.join(sorted(needed))}, which the recipe applies: {why}")


def page_layout(pair: Pair) -> Iterator[Finding]:
    """Token splits depend on the byte order of a backend's pages, so the per-group patch knows a list of them."""
    if PER_GROUP_PATCH not in needed_patches(pair) & pair.patches:
        return
    if pair.p.tensor_parallel < pair.d.tensor_parallel:
        for ours, theirs in zip(pair.decode.groups, pair.prefill.groups, strict=False):
            if theirs.first.block_size % ours.first.block_size:
                sizes = f"blocks of {theirs.first.block_size} tokens at prefill and {ours.first.block_size} at decode"
                message = f"{PER_GROUP_PATCH} reads larger blocks into smaller ones only; {ours.first.kind} layers have {sizes}"
                fix = "a smaller decode TP, or hybrid_kv_cache_manager: false"
                yield Finding("error", "page-layout", message, fix, requests_lost(pair.decode, hybrid_manager=False))
                break
    backend = pair.d.backend
    if backend not in PER_GROUP_BACKENDS:
        message = f"{PER_GROUP_PATCH} does not know the page layout of {backend}"
        fix = f"attention_backend: one of {', '.join(PER_GROUP_BACKENDS)}, or hybrid_kv_cache_manager: false"
        yield Finding("error", "page-layout", message, fix)
    elif pair.d.cpu and model_dtype(pair.model, pair.d) != "float32":
        message = f"{PER_GROUP_PATCH} knows the pages of CPU_ATTN in float32 only"
        yield Finding("error", "page-layout", message, "dtype: float32 on both roles")
    elif pair.d.kv_cache_dtype not in PER_GROUP_KV_DTYPES:
        message = f"{PER_GROUP_PATCH} refuses a cache of {pair.d.kv_cache_dtype}: it knows pages of 16 and 32 bit numbers"
        yield Finding("error", "page-layout", message, "kv_cache_dtype: auto, or hybrid_kv_cache_manager: false")
    elif not proven(pair):
        sizes = f"heads of {PER_GROUP_BACKENDS[backend]} at most, this model has {_head_size(pair)} and needs version 4"
        message = f"{PER_GROUP_PATCH} with {backend}: only FlashAttention 3 has run, for {sizes}"
        fix = "attention_backend: TRITON_ATTN, or trust a run only with recall before, during and after load"
        yield Finding("warning", "per-group-unproven", message, fix)


def _head_size(pair: Pair) -> int:
    return max(attention.head_size for attention in pair.model.attention_kinds())


def proven(pair: Pair) -> bool:
    """Whether the kernels that this pair takes have run with the per-group patch and given the right tokens."""
    limit = PER_GROUP_BACKENDS.get(pair.d.backend, 0)
    return limit is None or _head_size(pair) <= limit


def padded_pages(pair: Pair) -> Iterator[Finding]:
    """Seen with vLLM's own scheduler and connector on both sides: wrong bytes in the global layers, no error
    (docs/hybrid-manager.md, Limits; patches/tests/test_padded_pages.py)."""
    if pair.p.tensor_parallel == pair.d.tensor_parallel or not (pair.p.hybrid_manager and pair.d.hybrid_manager):
        return
    specs = {spec for layout in (pair.prefill, pair.decode) for group in layout.groups for spec in group.specs}
    padded = sorted({spec.kind for spec in specs if spec.padded is not None and not spec.is_state})
    if padded:
        message = (
            f"vLLM pads the pages of {', '.join(padded)} layers to unify them, and between TP sizes cuts heads out of the padded length"
        )
        fix = "hybrid_kv_cache_manager: false on both roles, or one TP for both"
        yield Finding("error", "padded-pages", f"{message}: wrong text, no error", fix, requests_lost(pair.decode, hybrid_manager=False))


def many_reads(pair: Pair) -> Iterator[Finding]:
    """On GPUs the number of reads sets most of the time of a hand-over (two H200 over NVLink, docs/benchmarks.md).

    Said for what was measured: head slices, manager off. With it on the same change was not run, and a prompt has a fifth of the reads.
    """
    tokens, block = pair.d.max_model_len, pair.d.block_size or pair.decode.scheduler_block
    moved = transfer(pair.decode, tokens)
    slices = pair.p.tensor_parallel < pair.d.tensor_parallel
    if not slices or pair.d.hybrid_manager or pair.d.cpu or pair.has_state or block >= 256 or moved.reads_per_rank < _MANY_READS:
        return
    reads = f"{moved.reads_per_rank:,} reads of {moved.bytes_per_rank / moved.reads_per_rank / 1024:,.0f} KiB per decode rank"
    message = f"{tokens:,} tokens are {reads}, and posting one took 2 to 8 us on two H200 whatever its size"
    yield Finding(
        "info", "many-reads", message, "block_size: 256 on both roles moved the bytes of such a pair in a third of the time there"
    )
