"""Can these two roles hand a cache over? Asked before anything is booked, answered by the rules of vLLM 0.31.0's NIXL connector.

A finding is an error when vLLM would refuse to start, refuse the handshake, or return wrong text; a warning when it would run worse
than the recipe promises. Each says what to change, and, where memory is known, what the change costs in requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pdlaunch.errors import PlanError

from .capacity import Layout, capacity, plan_layout
from .families import read_model
from .layers import Attention, Model
from .memory import kv_bytes
from .rules import Finding, role_findings
from .shape import RoleShape
from .specs import backend_of, heads_per_rank, model_dtype
from .transfer import transfer

PER_REGION_PATCH = "vllm-0.31.0-nixl-per-region-kv-heads"
PER_GROUP_PATCH = "vllm-0.31.0-nixl-per-group-pages"
PER_GROUP_BACKENDS = {"CPU_ATTN": None, "FLASH_ATTN": 256, "TRITON_ATTN": None}
"""Backends whose pages the per-group patch knows -> largest head size of the kernels that have run with it, None: any.

Runs were token-exact with heads of 64 and 128, and moved the right bytes with 256 and 512 (docs/hybrid-manager.md, Evidence); the byte
order of a page does not depend on the head size. FLASH_ATTN ran as FlashAttention 3, which ends at 256; where heads differ in size vLLM
takes version 4 for all layers if it can (models/config.py Gemma4Config), whose pages nobody has read here."""
PER_GROUP_KV_DTYPES = ("auto", "bfloat16", "float16", "float32")
_MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Pair:
    """A model with the two layouts that were derived from the roles' shapes, and the patches that will be applied."""

    model: Model
    prefill: Layout
    decode: Layout
    patches: frozenset[str]

    @property
    def p(self) -> RoleShape:
        return self.prefill.shape

    @property
    def d(self) -> RoleShape:
        return self.decode.shape

    @property
    def has_state(self) -> bool:
        return any(group.first.is_state for group in self.decode.groups)


def _same(pair: Pair) -> Iterator[Finding]:
    """Factors of the NIXL compatibility hash (nixl/metadata.py compute_nixl_compatibility_hash) and the cache layout."""
    p, d = pair.p, pair.d
    refusal = "vLLM: NIXL compatibility hash mismatch"
    if p.hybrid_manager != d.hybrid_manager:
        fix = "the same engine_args.hybrid_kv_cache_manager on both roles"
        yield Finding("error", "hybrid-manager", f"hybrid KV cache manager on one role only; {refusal}", fix)
    if p.kv_cache_dtype != d.kv_cache_dtype:
        message = f"KV dtype {p.kv_cache_dtype} at prefill, {d.kv_cache_dtype} at decode; {refusal}"
        yield Finding("error", "kv-dtype", message, "the same engine_args.kv_cache_dtype on both roles")
    if model_dtype(pair.model, p) != model_dtype(pair.model, d):
        yield Finding("error", "dtype", f"model dtype differs between the roles; {refusal}", "the same engine_args.dtype on both roles")
    if p.backend.removesuffix("_SM100").removesuffix("_HD256") != d.backend.removesuffix("_SM100").removesuffix("_HD256"):
        message = f"attention backend {p.backend} at prefill, {d.backend} at decode; {refusal}"
        yield Finding("error", "attention-backend", message, "the same attention backend on both roles")
    if bool(p.speculative_tokens) != bool(d.speculative_tokens):
        message = f"speculative tokens on one role only ({p.speculative_tokens} and {d.speculative_tokens}); {refusal}"
        yield Finding("error", "speculation", message, "the MTP head on both roles or on none; its depth may differ")
    if p.layout != d.layout:
        yield Finding("error", "kv-layout", f"KV layout {p.layout} at prefill, {d.layout} at decode", "LBHNC on both roles")
    if pair.has_state and (p.mamba_cache_dtype, p.mamba_ssm_cache_dtype) != (d.mamba_cache_dtype, d.mamba_ssm_cache_dtype):
        message = "state dtypes differ between the roles: a state would be read with the wrong width"
        yield Finding("error", "state-dtype", message, "the same mamba_cache_dtype and mamba_ssm_cache_dtype")


def _tensor_parallel(pair: Pair) -> Iterator[Finding]:
    """TransferTopology.tp_ratio and the assertions of _validate_remote_agent_handshake."""
    p, d = pair.p.tensor_parallel, pair.d.tensor_parallel
    if p != d and max(p, d) % min(p, d):
        message = f"tensor parallel sizes {p} and {d}: one must be a multiple of the other"
        yield Finding("error", "tp-ratio", message, "powers of two")
        return
    if pair.p.pipeline_parallel != pair.d.pipeline_parallel:
        message = "pipeline stages differ between the roles: the connector aligns regions by name, which no test here covers"
        yield Finding("warning", "pp-differs", message, "the same pipeline_parallel on both roles")
    if p > d and p > pair.model.kv_heads and not pair.model.uses_mla and not pair.has_state:
        message = f"prefill TP {p} exceeds both decode TP {d} and the {pair.model.kv_heads} KV heads: vLLM asserts at the handshake"
        yield Finding("error", "prefill-replicates", message, f"prefill TP of at most {pair.model.kv_heads}, or decode TP of at least {p}")


def unevenly_scaled(model: Model, prefill_tp: int, decode_tp: int) -> list[Attention]:
    """Layers whose heads per rank do not scale as the model-wide head count does: stock vLLM slices them wrongly."""
    wide = heads_per_rank(model.kv_heads, prefill_tp), heads_per_rank(model.kv_heads, decode_tp)
    uneven = []
    for attention in model.attention_kinds():
        own = heads_per_rank(attention.kv_heads, prefill_tp), heads_per_rank(attention.kv_heads, decode_tp)
        if own[0] * wide[1] != own[1] * wide[0]:
            uneven.append(attention)
    return uneven


def _heads_text(pair: Pair, uneven: list[Attention]) -> str:
    p, d = pair.p.tensor_parallel, pair.d.tensor_parallel
    parts = [f"{a.label}: {heads_per_rank(a.kv_heads, p)} -> {heads_per_rank(a.kv_heads, d)} per rank" for a in uneven]
    wide = f"{heads_per_rank(pair.model.kv_heads, p)} -> {heads_per_rank(pair.model.kv_heads, d)}"
    return f"{'; '.join(parts)}, while vLLM assumes {wide} for every layer"


def needed_patches(pair: Pair) -> frozenset[str]:
    """Patches without which this pair cannot hand its cache over."""
    uneven = unevenly_scaled(pair.model, pair.p.tensor_parallel, pair.d.tensor_parallel)
    both_on = pair.p.hybrid_manager and pair.d.hybrid_manager
    several_groups = len(pair.decode.groups) > 1 or len(pair.prefill.groups) > 1
    if both_on and several_groups and not pair.has_state and pair.p.block_size == pair.d.block_size:
        if uneven or pair.prefill.scheduler_block != pair.decode.scheduler_block:
            return frozenset({PER_REGION_PATCH, PER_GROUP_PATCH})
        return frozenset()
    return frozenset({PER_REGION_PATCH}) if uneven else frozenset()


def needed_patches_of(prefill: Layout, decode: Layout) -> frozenset[str]:
    return needed_patches(Pair(decode.model, prefill, decode, frozenset()))


def _mixed_heads(pair: Pair) -> Iterator[Finding]:
    uneven = unevenly_scaled(pair.model, pair.p.tensor_parallel, pair.d.tensor_parallel)
    needed = needed_patches(pair)
    unused = pair.patches & {PER_REGION_PATCH, PER_GROUP_PATCH} - needed
    if unused:
        yield Finding("info", "patch-not-needed", f"{', '.join(sorted(unused))}: this pair's cache does not need it")
    if not needed:
        return
    why = _heads_text(pair, uneven) if uneven else "the roles unify pages to different block sizes"
    missing = sorted(needed - pair.patches)
    if PER_GROUP_PATCH in needed and pair.p.tensor_parallel > pair.d.tensor_parallel:
        message = f"hybrid manager on with prefill TP above decode TP: {why}; {PER_GROUP_PATCH} reads one way only"
        fix = f"decode TP of at least prefill TP, or hybrid_kv_cache_manager: false with {PER_REGION_PATCH}"
        yield Finding("error", "mixed-heads-direction", message, fix, _requests_lost(pair.decode, hybrid_manager=False))
    elif missing:
        fix = f"patches: [{', '.join(sorted(needed))}]"
        price = None
        if PER_GROUP_PATCH in missing:
            fix += f", or {PER_REGION_PATCH} with hybrid_kv_cache_manager: false on both roles"
            price = _requests_lost(pair.decode, hybrid_manager=False)
        yield Finding("error", "mixed-heads", f"stock vLLM refuses this pair: {why}", fix, price)
    else:
        yield Finding("info", "mixed-heads-patched", f"needs {', '.join(sorted(needed))}, which the recipe applies: {why}")


def _page_layout(pair: Pair) -> Iterator[Finding]:
    """Token splits depend on the byte order of a backend's pages, so the per-group patch knows a list of them."""
    if PER_GROUP_PATCH not in needed_patches(pair) & pair.patches:
        return
    if pair.p.tensor_parallel < pair.d.tensor_parallel:
        for ours, theirs in zip(pair.decode.groups, pair.prefill.groups, strict=False):
            if theirs.first.block_size % ours.first.block_size:
                sizes = f"blocks of {theirs.first.block_size} tokens at prefill and {ours.first.block_size} at decode"
                message = f"{PER_GROUP_PATCH} reads larger blocks into smaller ones only; {ours.first.kind} layers have {sizes}"
                fix = "a smaller decode TP, or hybrid_kv_cache_manager: false"
                yield Finding("error", "page-layout", message, fix, _requests_lost(pair.decode, hybrid_manager=False))
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
    elif not _proven(pair):
        sizes = f"heads of {PER_GROUP_BACKENDS[backend]} at most, this model has {_head_size(pair)} and needs version 4"
        message = f"{PER_GROUP_PATCH} with {backend}: only FlashAttention 3 has run, for {sizes}"
        fix = "attention_backend: TRITON_ATTN, or trust a run only with recall before, during and after load"
        yield Finding("warning", "per-group-unproven", message, fix)


def _head_size(pair: Pair) -> int:
    return max(attention.head_size for attention in pair.model.attention_kinds())


def _proven(pair: Pair) -> bool:
    """Whether the kernels that this pair takes have run with the per-group patch and given the right tokens."""
    limit = PER_GROUP_BACKENDS.get(pair.d.backend, 0)
    return limit is None or _head_size(pair) <= limit


def _manager_choice(pair: Pair) -> Iterator[Finding]:
    """Where heads scale unevenly: both settings of the hybrid manager side by side, and which one to take."""
    if pair.has_state or not unevenly_scaled(pair.model, pair.p.tensor_parallel, pair.d.tensor_parallel):
        return
    tokens, prices, rows = pair.d.max_model_len, [], []
    for on in (True, False):
        try:
            sides = [plan_layout(pair.model, shape.with_changes(hybrid_manager=on)) for shape in (pair.p, pair.d)]
        except PlanError:
            return
        decode = sides[1]
        prices.append(decode.steady(tokens).blocks * decode.block_bytes)
        memory = kv_bytes(pair.model, decode.shape)
        try:
            fit = "" if memory is None else f"{capacity(decode, memory).requests(tokens, held=True)} of them fit at decode, "
        except PlanError:
            fit = "none fits at decode, "
        held, moved = prices[-1] / _MIB, transfer(decode, tokens).bytes_per_rank / _MIB
        patches = ", ".join(sorted(needed_patches_of(*sides)))
        rows.append(f"a request of {tokens:,} tokens holds {held:,.0f} MiB per rank, {fit}it moves {moved:,.0f} MiB to each; {patches}")
    reads_up = pair.p.tensor_parallel < pair.d.tensor_parallel
    proven = _proven(pair) and pair.d.kv_cache_dtype in PER_GROUP_KV_DTYPES
    best, why = False, "smaller or equal price"
    if prices[0] < prices[1]:
        best, why = reads_up and proven, f"{prices[1] / prices[0]:.1f} times the requests"
        if not reads_up:
            why = "the other needs decode TP above prefill TP"
        elif not proven:
            why = f"the other is not proven with {pair.d.backend}, this head size and KV dtype"
    for on, row in zip((True, False), rows, strict=True):
        mark = f"; recommended: {why}" if on == best else ""
        yield Finding("info", f"manager-{'on' if on else 'off'}", f"hybrid_kv_cache_manager: {str(on).lower()}: {row}{mark}")


def _requests_lost(layout: Layout, **changes: object) -> int | None:
    """Requests of max_model_len that one cache holds fewer, by the steady price, after a change; None if memory is unknown."""
    before = kv_bytes(layout.model, layout.shape)
    if before is None:
        return None
    shape = layout.shape.with_changes(**changes)
    try:
        after = capacity(plan_layout(layout.model, shape), before)
        now = capacity(layout, before)
    except PlanError:
        return None
    length = shape.max_model_len
    return now.requests(length, held=True) - after.requests(length, held=True)


def _kernel_blocks(pair: Pair) -> tuple[int | None, int | None]:
    blocks = pair.prefill.scheduler_block, pair.decode.scheduler_block
    return backend_of(pair.p).kernel_block(blocks[0]), backend_of(pair.d).kernel_block(blocks[1])


def _common_block(pair: Pair) -> int:
    return max(pair.prefill.choice.block_size, pair.decode.choice.block_size)


def _state_blocks(pair: Pair, kernels: tuple[int, int]) -> Iterator[Finding]:
    """Recurrent models: pages of different sizes are legal only in whole kernel blocks, and never with prefix caching."""
    p, d = pair.prefill.scheduler_block, pair.decode.scheduler_block
    common = _common_block(pair)
    fix = f"block_size: {common} on both roles"
    price = _requests_lost(pair.decode, block_size=common)
    if kernels[1] % kernels[0]:
        message = f"blocks of {p} and {d} tokens become kernel blocks of {kernels[0]} and {kernels[1]}; decode's must be a multiple"
        yield Finding("error", "kernel-blocks", message, fix, price)
    if p != d and (pair.p.prefix_caching or pair.d.prefix_caching):
        message = f"logical blocks differ ({p} at prefill, {d} at decode): vLLM refuses that for recurrent models with prefix caching"
        yield Finding("error", "state-blocks-prefix", message, f"prefix_caching: false on both roles, or {fix}", price)
    elif p != d and not kernels[1] % kernels[0]:
        message = f"logical blocks differ ({p} at prefill, {d} at decode): accepted without prefix caching since vLLM PR 49612"
        yield Finding("info", "state-blocks", message)


def _block_sizes(pair: Pair) -> Iterator[Finding]:
    """TransferTopology.block_size_ratio; and the 0.31.0 fault that makes unequal block sizes return wrong text."""
    kernels = _kernel_blocks(pair)
    if kernels[0] is None or kernels[1] is None:
        yield Finding("error", "kernel-block", "no kernel block divides the block size", "another block_size or attention backend")
        return
    if pair.has_state:
        yield from _state_blocks(pair, (kernels[0], kernels[1]))
        return
    p, d = pair.prefill.choice.block_size, pair.decode.choice.block_size
    if p != d:
        message = f"block size {p} at prefill, {d} at decode: vLLM 0.31.0 then returns wrong text with HTTP 200"
        yield Finding("error", "block-size", message, f"block_size: {_common_block(pair)} on both roles")
    elif kernels[0] != kernels[1] and PER_GROUP_PATCH not in needed_patches(pair):
        message = f"kernel blocks of {kernels[0]} and {kernels[1]} tokens: vLLM refuses or rewrites such pages"
        yield Finding("error", "kernel-blocks", message, "the same kernel block size on both roles")


def _sizes(pair: Pair) -> Iterator[Finding]:
    """What each role can admit, where its memory is known; and the lengths."""
    if pair.d.max_model_len < pair.p.max_model_len:
        message = f"decode max_model_len {pair.d.max_model_len} is below prefill's {pair.p.max_model_len}: long prompts fail at decode"
        yield Finding("error", "max-model-len-pair", message, "decode max_model_len of at least prompt plus output")
    for role, layout in (("prefill", pair.prefill), ("decode", pair.decode)):
        memory = kv_bytes(layout.model, layout.shape)
        if memory is None:
            yield Finding("info", "memory-unknown", f"{role}: GPU memory or weights unknown, so capacity is not checked")
            continue
        try:
            cache = capacity(layout, memory)
        except PlanError as error:
            yield Finding("error", "does-not-fit", f"{role}: {error.what}; {error.rule}", error.hint)
            continue
        seqs = layout.shape.max_num_seqs
        if pair.has_state and seqs > cache.num_blocks:
            message = f"{role}: max_num_seqs ({seqs}) exceeds available Mamba cache blocks ({cache.num_blocks}); graph capture stops"
            yield Finding("error", "seqs-above-blocks", message, f"max_num_seqs of at most {cache.num_blocks}")
        fits = cache.requests(layout.shape.max_model_len, held=True)
        if seqs > fits:
            length = layout.shape.max_model_len
            message = (
                f"{role}: {fits} requests fit if all reach max_model_len {length}, max_num_seqs is {seqs}: the rest would be preempted"
            )
            yield Finding("info", "seqs-above-capacity", message, f"max_num_seqs of at most {fits}, or shorter requests")


_MANY_READS = 5_000


def _reads(pair: Pair) -> Iterator[Finding]:
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


CHECKS: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _same,
    _tensor_parallel,
    _mixed_heads,
    _page_layout,
    _manager_choice,
    _block_sizes,
    _sizes,
    _reads,
)


def check_roles(model: Model, prefill: RoleShape, decode: RoleShape, patches: frozenset[str]) -> list[Finding]:
    """All findings for a model that is already read, errors first. Never raises for a bad pair: the reason becomes a finding."""
    found = role_findings(model, "prefill", prefill) + role_findings(model, "decode", decode)
    if not any(f.severity == "error" for f in found):
        layouts = []
        for role, shape in (("prefill", prefill), ("decode", decode)):
            try:
                layouts.append(plan_layout(model, shape))
            except PlanError as error:
                found.append(Finding("error", "role-refused", f"{role}: {error.what}; {error.rule}", error.hint))
        if len(layouts) == 2:
            pair = Pair(model, layouts[0], layouts[1], patches)
            found += [finding for check in CHECKS for finding in check(pair)]
    order = {"error": 0, "warning": 1, "info": 2}
    return sorted(found, key=lambda finding: order[finding.severity])


def check_pair(
    model_config: Mapping[str, Any], prefill: RoleShape, decode: RoleShape, patches: frozenset[str] = frozenset()
) -> list[Finding]:
    """Whether prefill can hand its cache to decode: what `check` and `submit` ask.

    model_config: the HF config. PlanError only when the config itself cannot be read.
    """
    return check_roles(read_model(model_config), prefill, decode, patches)


def check_concurrency(cache_copies: int, requests_per_cache: int, max_num_seqs: int, concurrency: int) -> list[Finding]:
    """A load's concurrency against decode: data-parallel copies, the scheduler's limit and what the caches hold."""
    found = []
    if concurrency < cache_copies:
        message = f"concurrency {concurrency} leaves {cache_copies - concurrency} of {cache_copies} decode caches empty"
        found.append(Finding("warning", "idle-copies", message, f"concurrency of at least {cache_copies}, or fewer copies"))
    if concurrency > cache_copies * max_num_seqs:
        message = f"concurrency {concurrency} exceeds {cache_copies} x max_num_seqs {max_num_seqs}: the rest waits"
        found.append(Finding("warning", "concurrency-above-seqs", message, f"max_num_seqs of {-(-concurrency // cache_copies)}"))
    if concurrency > cache_copies * requests_per_cache:
        message = f"concurrency {concurrency} exceeds the {cache_copies} x {requests_per_cache} requests that the caches hold"
        found.append(Finding("warning", "concurrency-above-capacity", message, "lower concurrency, or a lever of `plan --search`"))
    return found
