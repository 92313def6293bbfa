"""Rules across the keys of a recipe: what vLLM, NIXL, Dynamo or AIPerf would refuse late, or accept and then measure something else."""

from __future__ import annotations

import re

from pdlaunch.errors import RecipeError
from pdlaunch.node.prompts import MIN_PROMPT_TOKENS
from pdlaunch.recipe import Recipe, RoleName


def check(recipe: Recipe) -> None:
    """RecipeError on the first rule that the recipe breaks."""
    for rule in (_check_roles, _check_equal_args, _check_backend, _check_recall, _check_load, _check_nixl):
        rule(recipe)


def _fail(recipe: Recipe, at: str, what: str, rule: str, hint: str = "") -> RecipeError:
    return RecipeError(what, where=recipe.source.where(tuple(int(p) if p.isdigit() else p for p in at.split("."))), rule=rule, hint=hint)


def _check_roles(recipe: Recipe) -> None:
    engines = recipe.engines
    have = ", ".join(engines.present()) or "none"
    if engines.agg is not None and (engines.prefill is not None or engines.decode is not None):
        raise _fail(recipe, "engines", f"roles: {have}", "either prefill and decode, or agg", "remove agg, or prefill and decode")
    if engines.agg is None and (engines.prefill is None or engines.decode is None):
        raise _fail(
            recipe,
            "engines",
            f"roles: {have}",
            "either prefill and decode, or agg",
            "a decode engine without prefill never becomes ready, and the other way round",
        )
    if (engines.control is None) != (recipe.agreement is None):
        raise _fail(
            recipe,
            "engines" if engines.control else "agreement",
            f"engines.control is {'there' if engines.control else 'missing'} and agreement is {'there' if recipe.agreement else 'missing'}",
            "agreement and engines.control go together",
        )
    if engines.control is not None and engines.control.replicas != 1:
        raise _fail(recipe, "engines.control.replicas", f"{engines.control.replicas} control engines", "one control engine")
    if recipe.agreement is not None and min(recipe.agreement.prompt_tokens, default=0) < MIN_PROMPT_TOKENS:
        lengths = f"{list(recipe.agreement.prompt_tokens)}"
        raise _fail(recipe, "agreement.prompt_tokens", lengths, f"one or more lengths of at least {MIN_PROMPT_TOKENS} tokens")


MUST_BE_EQUAL = {
    "block_size": "vLLM 0.31.0 reads wrong KV blocks with HTTP 200 when the block sizes differ, even at equal TP",
    "kv_cache_dtype": "the KV dtype is part of the NIXL handshake: the first request would fail",
    "hybrid_kv_cache_manager": "the manager is part of the NIXL handshake: the first request would fail",
    "dtype": "the dtype is part of the NIXL handshake: the first request would fail",
    "max_model_len": "a prompt that one role accepts must fit the other",
    "quantization": "both roles must serve the same weights",
    "load_format": "both roles must serve the same weights",
}


def _check_equal_args(recipe: Recipe) -> None:
    """Arguments that prefill and decode must share (vLLM's nixl/metadata.py hashes most of them)."""
    if not recipe.disaggregated:
        return
    prefill, decode = recipe.args_of("prefill"), recipe.args_of("decode")
    for name, reason in MUST_BE_EQUAL.items():
        p, d = getattr(prefill, name), getattr(decode, name)
        if p != d:
            role: RoleName = "prefill" if recipe.key_of_arg("prefill", name).startswith("engines") else "decode"
            raise _fail(
                recipe,
                recipe.key_of_arg(role, name),
                f"{name} is {p!r} on prefill and {d!r} on decode",
                f"equal on both roles: {reason}",
                f"set it once under engine_args ({name}: ...)",
            )


def _check_backend(recipe: Recipe) -> None:
    for role, engine in recipe.engines.present().items():
        args = recipe.args_of(role)
        if recipe.backend == "mocker":
            if role == "control":
                raise _fail(recipe, "engines.control", "a control engine beside the mocker", "the mocker's text means nothing")
            if engine.tensor_parallel > 1 or engine.pipeline_parallel > 1:
                raise _fail(recipe, f"engines.{role}.tensor_parallel", f"{engine.tensor_parallel}", "the mocker has no GPUs: leave it at 1")
            continue
        for name in ("mocker_speedup", "mocker_kv_blocks"):
            if getattr(args, name) is not None:
                raise _fail(recipe, recipe.key_of_arg(role, name), f"{name} with backend {recipe.backend}", "only with backend: mocker")
        if args.max_num_batched_tokens and args.max_num_seqs and args.max_num_batched_tokens < args.max_num_seqs:
            raise _fail(
                recipe,
                recipe.key_of_arg(role, "max_num_batched_tokens"),
                f"{args.max_num_batched_tokens} < max_num_seqs {args.max_num_seqs}",
                "vLLM refuses max_num_batched_tokens below max_num_seqs (config/scheduler.py)",
            )
    if recipe.backend == "mocker" and recipe.patches:
        raise _fail(recipe, "patches", f"{list(recipe.patches)}", "the mocker runs no vLLM and no NIXL: leave patches out")


def _check_recall(recipe: Recipe) -> None:
    if recipe.backend == "mocker":
        for name in ("recall", "agreement"):
            if getattr(recipe, name) is not None:
                raise _fail(recipe, name, f"{name} with the mocker", "the mocker generates random tokens: leave it out")
        return
    if recipe.recall is None:
        return
    if recipe.recall.prompt_tokens < MIN_PROMPT_TOKENS:
        raise _fail(recipe, "recall.prompt_tokens", f"{recipe.recall.prompt_tokens}", f"at least {MIN_PROMPT_TOKENS} tokens")
    limit, needed = recipe.engine_args.max_model_len, recipe.recall.prompt_tokens + recipe.recall.max_tokens
    if limit is not None and needed > limit:
        raise _fail(
            recipe,
            "recall.prompt_tokens",
            f"{recipe.recall.prompt_tokens} + {recipe.recall.max_tokens} tokens to generate = {needed}",
            f"at most max_model_len {limit}",
        )
    if not recipe.recall.when:
        raise _fail(recipe, "recall.when", "an empty list", "at least one of before, during, after")
    if "during" in recipe.recall.when and not recipe.load:
        raise _fail(
            recipe, "recall.when", "during without load", "'during' runs beside an AIPerf phase", "add a load phase, or leave 'during' out"
        )
    if recipe.engine_args.load_format == "dummy":
        raise _fail(recipe, "recall", "recall with load_format: dummy", "random weights answer nothing: leave recall out, use agreement")


def _check_load(recipe: Recipe) -> None:
    """What AIPerf 0.13.0 would refuse at start, or accept and then measure something else."""
    seen: set[str] = set()
    limit = recipe.engine_args.max_model_len
    for i, phase in enumerate(recipe.load):
        at = f"load.{i}"
        if phase.name in seen:
            raise _fail(recipe, f"{at}.name", f"a second phase {phase.name!r}", "each phase has its own name and folder")
        seen.add(phase.name)
        if (phase.concurrency is None) == (phase.request_rate_per_s is None):
            raise _fail(
                recipe, at, f"concurrency {phase.concurrency}, request_rate_per_s {phase.request_rate_per_s}", "exactly one of the two"
            )
        if phase.concurrency is not None and phase.requests < phase.concurrency:
            raise _fail(
                recipe,
                f"{at}.requests",
                f"{phase.requests} requests at concurrency {phase.concurrency}",
                "at least as many requests as concurrency, or the concurrency is never reached",
            )
        if limit is not None and phase.input_tokens + phase.output_tokens > limit:
            raise _fail(
                recipe, f"{at}.input_tokens", f"{phase.input_tokens} + {phase.output_tokens} tokens", f"at most max_model_len {limit}"
            )
        if phase.slos_ms and not phase.streaming and {"time_to_first_token", "inter_token_latency"} & set(phase.slos_ms):
            raise _fail(recipe, f"{at}.slos_ms", "a limit on first or inter-token time without streaming", "streaming: true")
        if phase.timeout_s > recipe.time_limit_minutes * 60 and "timeout_s" in recipe.source.data["load"][i]:
            raise _fail(
                recipe, f"{at}.timeout_s", f"{phase.timeout_s:g} s", f"below time_limit_minutes ({recipe.time_limit_minutes} minutes)"
            )
    if recipe.deadlines.engines_s > recipe.time_limit_minutes * 60:
        raise _fail(
            recipe,
            "deadlines.engines_s",
            f"{recipe.deadlines.engines_s:g} s",
            f"below time_limit_minutes ({recipe.time_limit_minutes} minutes)",
            "raise time_limit_minutes, or the job ends INCOMPLETE while engines may still start",
        )


PROGRESS_THREAD_PATCH = re.compile(r"nixl-.*-progress-thread-delay")


def check_nixl_delay(recipe: Recipe) -> None:
    """Asked when the patches are known to exist: a misspelt name must not be reported as this one missing."""
    has_patch = any(PROGRESS_THREAD_PATCH.fullmatch(p) for p in recipe.patches)
    if recipe.nixl_progress_thread_delay_us is not None and not has_patch:
        raise _fail(
            recipe,
            "nixl_progress_thread_delay_us",
            f"{recipe.nixl_progress_thread_delay_us}",
            "stock NIXL ignores NIXL_PTHR_DELAY_US",
            f"add nixl-{recipe.versions.nixl}-progress-thread-delay to patches",
        )


def _check_nixl(recipe: Recipe) -> None:
    if recipe.kv_connector_extra_config.get("enforce_handshake_compat") is False:
        raise _fail(
            recipe,
            "kv_connector_extra_config.enforce_handshake_compat",
            "false",
            "the handshake check is what stops two incompatible engines: never off",
        )
    for i, patch in enumerate(recipe.patches):
        if patch in recipe.patches[:i]:
            raise _fail(recipe, f"patches.{i}", f"{patch!r} is there twice", "each patch once")
