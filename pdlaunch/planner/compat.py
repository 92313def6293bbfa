"""Can these two roles hand a cache over? Asked before anything is booked, answered by the rules of vLLM 0.31.0's NIXL connector.

A finding is an error when vLLM would refuse to start, refuse the handshake, or return wrong text; a warning when it would run worse
than the recipe promises. Each says what to change, and, where memory is known, what the change costs in requests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from pdlaunch.errors import PlanError

from . import managers
from .capacity import capacity, plan_layout
from .families import read_model
from .layers import Model
from .memory import kv_bytes
from .pair import PER_GROUP_PATCH, PER_REGION_PATCH, Pair, copies_above, needed_patches, needed_patches_of, requests_lost, unevenly_scaled
from .rules import Finding, role_findings
from .shape import RoleShape
from .specs import backend_of, model_dtype
from .transfer import transfer

MIB = 1 << 20


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
    if copies_above(pair) and not (PER_REGION_PATCH in pair.patches and pair.one_table):
        message = f"prefill TP {p} exceeds both decode TP {d} and the {pair.model.kv_heads} KV heads: stock vLLM asserts at the handshake"
        fix = f"prefill TP of at most {pair.model.kv_heads}, or decode TP of at least {p}"
        fix += f", or {PER_REGION_PATCH} with hybrid_kv_cache_manager: false"
        yield Finding("error", "prefill-replicates", message, fix)


def _pipeline(pair: Pair) -> Iterator[Finding]:
    """nixl/base_worker.py __init__: pull mode refuses stages with several KV cache groups."""
    for role, layout in (("prefill", pair.prefill), ("decode", pair.decode)):
        if layout.shape.pipeline_parallel > 1 and len(layout.groups) > 1:
            message = f"{role}: NixlConnector refuses pipeline_parallel above 1 with several KV cache groups (hybrid KV cache manager on)"
            fix = "pipeline_parallel: 1" + ("" if pair.has_state else ", or hybrid_kv_cache_manager: false on both roles")
            yield Finding("error", "pp-groups", message, fix)


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
    price = requests_lost(pair.decode, block_size=common)
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


HANDOVER: tuple[Callable[[Pair], Iterator[Finding]], ...] = (
    _same,
    _tensor_parallel,
    _pipeline,
    managers.mixed_heads,
    managers.page_layout,
    managers.padded_pages,
    _block_sizes,
)
"""Rules that decide whether the caches can be handed over."""


def refusals(pair: Pair) -> list[Finding]:
    return [finding for rule in HANDOVER for finding in rule(pair) if finding.severity == "error"]


def _manager_choice(pair: Pair) -> Iterator[Finding]:
    """Where heads scale unevenly: both settings of the hybrid manager side by side with the patches that each needs, and which to take."""
    if pair.has_state or not unevenly_scaled(pair.model, pair.p.tensor_parallel, pair.d.tensor_parallel):
        return
    tokens, prices, rows, refused = pair.d.max_model_len, [], [], []
    for on in (True, False):
        try:
            sides = [plan_layout(pair.model, shape.with_changes(hybrid_manager=on)) for shape in (pair.p, pair.d)]
        except PlanError:
            return
        decode, patches = sides[1], needed_patches_of(*sides)
        prices.append(decode.steady(tokens).blocks * decode.block_bytes)
        refused.append([finding.message for finding in refusals(Pair(pair.model, sides[0], decode, patches))])
        memory = kv_bytes(pair.model, decode.shape)
        try:
            fit = "" if memory is None else f"{capacity(decode, memory).requests(tokens, held=True)} of them fit at decode, "
        except PlanError:
            fit = "none fits at decode, "
        held, moved = prices[-1] / MIB, transfer(decode, tokens).bytes_per_rank / MIB
        row = f"a request of {tokens:,} tokens holds {held:,.0f} MiB per rank, {fit}it moves {moved:,.0f} MiB to each; "
        rows.append(row + (f"refused: {refused[-1][0]}" if refused[-1] else ", ".join(sorted(patches))))
    best, why = None if refused[1] else False, "smaller or equal price"
    if refused[0]:
        why = "the other is refused"
    elif prices[0] < prices[1] and managers.proven(pair):
        best, why = True, f"{prices[1] / prices[0]:.1f} times the requests"
    elif prices[0] < prices[1]:
        why = f"the other is proven with TRITON_ATTN, not with {pair.d.backend} and these heads"
    for on, row in zip((True, False), rows, strict=True):
        mark = f"; recommended: {why}" if on == best else ""
        yield Finding("info", f"manager-{'on' if on else 'off'}", f"hybrid_kv_cache_manager: {str(on).lower()}: {row}{mark}")


CHECKS = (*HANDOVER, _manager_choice, _sizes, managers.many_reads)


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
