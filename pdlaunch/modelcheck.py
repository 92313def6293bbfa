"""Recipe -> the planner's view of it: shapes per role, findings before anything is booked, and the transfer that must be seen."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pdlaunch.cluster import Cluster
from pdlaunch.errors import PlanError, RecipeError, Where
from pdlaunch.flags import flag_list, given
from pdlaunch.node.prompts import MIN_PROMPT_TOKENS
from pdlaunch.node.spec import PageSmoke, SmokePrompt, TransferGroup, TransferPrediction
from pdlaunch.planner.capacity import plan_layout
from pdlaunch.planner.compat import check_roles
from pdlaunch.planner.config import load_config
from pdlaunch.planner.families import read_model
from pdlaunch.planner.layers import Model
from pdlaunch.planner.pair import PER_GROUP_PATCH, PER_REGION_PATCH, known_patches, needed_patches_of, unevenly_scaled
from pdlaunch.planner.rules import Finding, role_findings
from pdlaunch.planner.shape import BACKENDS, RoleShape
from pdlaunch.recipe import Recipe, RoleName

PAIR_CODES = frozenset({"mixed-heads", "mixed-heads-direction", "tp-ratio", "prefill-replicates"})
"""Findings that allow_unsupported_pair lets through: vLLM refuses such a pair at the first request, which a run can show."""

ROLES: tuple[RoleName, ...] = ("prefill", "decode")
SMOKE_ANSWER_TOKENS = 24
SMOKE_SPREAD_TOKENS = 64
"""At least so many lengths are good for a prompt beyond the window: notes of a prompt have about 14 tokens."""

ASSUMED_BACKEND = "FLASH_ATTN"


@dataclass(frozen=True)
class ModelCheck:
    warnings: tuple[Finding, ...]
    mixed_heads: bool
    prediction: TransferPrediction | None
    notes: tuple[Finding, ...] = ()
    """Findings that are no problem: why a patch is needed, which layers keep how many heads per rank."""
    page_smoke: PageSmoke | None = None


def asked_backend(recipe: Recipe, role: RoleName, cluster: Cluster) -> str:
    """The attention backend of a role; on the CPU vLLM takes its own whatever is asked for."""
    asked = recipe.args_of(role).attention_backend
    return "CPU_ATTN" if cluster.device == "cpu" else ASSUMED_BACKEND if asked in (None, "auto") else str(asked)


def unpriced_backends(recipe: Recipe, cluster: Cluster) -> list[Finding]:
    """A warning for each role whose attention backend the planner has no block sizes of: role_shape then takes ASSUMED_BACKEND.

    An error where the other role has another one: in a shape the two may look alike.
    """
    found = []
    asked = {role: asked_backend(recipe, role, cluster) for role in recipe.engines.present()}
    pair = {asked[role] for role in ROLES if role in asked}
    if len(pair) == 2 and not pair <= set(BACKENDS):
        message = f"attention backend {asked['prefill']} at prefill, {asked['decode']} at decode; vLLM: NIXL compatibility hash mismatch"
        found.append(Finding("error", "attention-backend", message, "the same attention backend on both roles"))
    for role, backend in asked.items():
        if backend not in BACKENDS:
            known = [name for name in flag_list("dynamo.vllm").by_name["--attention-backend"]["choices"] if name in BACKENDS]
            message = f"{role}: block sizes, capacity and the hand-over are not known with {backend}: what is said is for {ASSUMED_BACKEND}"
            found.append(Finding("warning", "backend-unknown", message, f"attention_backend: one of {', '.join(known)}"))
    return found


def role_shape(recipe: Recipe, role: RoleName, cluster: Cluster) -> RoleShape:
    """The planner's shape of a role: the recipe's values, vLLM's defaults where it has none."""
    engine, args = recipe.engines.present()[role], recipe.args_of(role)
    backend = asked_backend(recipe, role, cluster)
    if backend not in BACKENDS:
        backend = ASSUMED_BACKEND
    shape = RoleShape(
        tensor_parallel=engine.tensor_parallel,
        pipeline_parallel=engine.pipeline_parallel,
        data_parallel=engine.data_parallel,
        replicas=engine.replicas,
        backend=backend,
        block_size=args.block_size,
        kv_cache_dtype=args.kv_cache_dtype or "auto",
        dtype=args.dtype or "auto",
        prefix_caching=args.prefix_caching is not False,
        hybrid_manager=args.hybrid_kv_cache_manager is not False,
        async_scheduling=args.async_scheduling is not False,
        kv_cache_memory_bytes=None if args.kv_cache_memory_mib is None else args.kv_cache_memory_mib << 20,
    )
    given = {
        name: value
        for name in ("max_model_len", "max_num_seqs", "max_num_batched_tokens", "gpu_memory_utilization")
        if (value := getattr(args, name)) is not None
    }
    return shape.with_changes(**given)


def check(recipe: Recipe, cluster: Cluster, config: Path) -> ModelCheck:
    """PlanError on a shape that vLLM 0.31.0 would refuse or answer wrongly; warnings are returned.

    config: the model's config.json. When it is not visible here nothing can be checked: a RecipeError unless models_visible is false.
    """
    if recipe.backend == "mocker":
        return ModelCheck((), False, None)
    if not config.is_file():
        if not cluster.models_visible and not recipe.model.config:
            return ModelCheck((), False, None)
        raise _missing(recipe, cluster, config)
    model = read_model(load_config(config), str(config))
    findings = _findings(recipe, cluster, model)
    errors = [f for f in findings if f.severity == "error"]
    refused = [f for f in errors if not (recipe.allow_unsupported_pair and f.code in PAIR_CODES)]
    if refused:
        worst = refused[0]
        hint = worst.fix
        if worst.code in PAIR_CODES:
            hint += "; or allow_unsupported_pair: REASON to let the run show the failure"
        raise PlanError(worst.message, where=_where(recipe, worst), rule=f"vLLM {recipe.versions.vllm} ({worst.code})", hint=hint)
    if recipe.allow_unsupported_pair and not errors:
        raise RecipeError(
            f"{recipe.allow_unsupported_pair!r}, but this pair is supported",
            where=recipe.source.where("allow_unsupported_pair"),
            rule="only for a pair that the listed patches and vLLM cannot serve",
            hint="remove the key",
        )
    mixed = False
    if recipe.engines.prefill is not None and recipe.engines.decode is not None:
        mixed = bool(unevenly_scaled(model, recipe.engines.prefill.tensor_parallel, recipe.engines.decode.tensor_parallel))
    return ModelCheck(
        tuple(f for f in findings if f.severity == "warning"),
        mixed,
        _prediction(recipe, cluster, model) if not errors else None,
        tuple(f for f in findings if f.severity == "info"),
        _page_smoke(recipe, cluster, model),
    )


def _findings(recipe: Recipe, cluster: Cluster, model: Model) -> list[Finding]:
    if recipe.disaggregated:
        prefill, decode = (role_shape(recipe, role, cluster) for role in ROLES)
        found = check_roles(model, prefill, decode, known_patches(recipe.patches))
        found += _beyond_patches(recipe, cluster, model)
    else:
        found = role_findings(model, "agg", role_shape(recipe, "agg", cluster))
    if recipe.engines.control is not None:
        found = role_findings(model, "control", role_shape(recipe, "control", cluster)) + found
    return found + unpriced_backends(recipe, cluster)


CONTEXT_PARALLEL = ("--decode-context-parallel-size", "--prefill-context-parallel-size")
DRAFTS = "--speculative-config"
LAYOUT = "VLLM_KV_CACHE_LAYOUT"
LAYOUTS = {PER_REGION_PATCH: ("LBHNC", "HND", "BLHNC"), PER_GROUP_PATCH: ("LBHNC", "HND")}
"""Patch -> values of VLLM_KV_CACHE_LAYOUT that it reads; both refuse the others at the handshake (region_heads.py, group_pages.py)."""


def _beyond_patches(recipe: Recipe, cluster: Cluster, model: Model) -> list[Finding]:
    """What a RoleShape does not hold and the pair's patches refuse at the handshake, or were never run with."""
    try:
        needed = needed_patches_of(*(plan_layout(model, role_shape(recipe, role, cluster)) for role in ROLES))
    except PlanError:
        return []
    found: list[Finding] = []
    if not needed:
        return found
    patch = PER_GROUP_PATCH if PER_GROUP_PATCH in needed else PER_REGION_PATCH
    for role in ROLES:
        engine = recipe.engines.present()[role]
        words = (*recipe.extra_args, *engine.extra_args)
        flags = given("dynamo.vllm", words, [recipe.source.where("extra_args")] * len(words))
        for name in CONTEXT_PARALLEL:
            if flags.get(name, "1") != "1":
                message = f"{role}: {patch} refuses context parallelism ({name} {flags[name]})"
                found.append(Finding("error", "context-parallel", message, f"remove {name}"))
        if patch == PER_GROUP_PATCH and DRAFTS in flags:
            message = f"{role}: {patch} has not been run with speculative decoding"
            found.append(Finding("warning", "drafts-unproven", message, f"no {DRAFTS}, or trust recall and agreement only"))
        set_in = next(((key, env[LAYOUT]) for key, env in _environments(recipe, cluster, role) if LAYOUT in env), None)
        if set_in is not None and set_in[1] not in LAYOUTS[patch]:
            message = f"{role}: {patch} does not read pages in the layout {set_in[1]} ({LAYOUT} in {set_in[0]})"
            found.append(Finding("error", "kv-layout", message, f"one of {', '.join(LAYOUTS[patch])}, or leave it unset"))
    if recipe.kv_connector_extra_config.get("enable_permute_local_kv"):
        message = f"{patch} refuses kv_connector_extra_config.enable_permute_local_kv: pages are not permuted on receive"
        found.append(Finding("error", "kv-permute", message, "remove the key"))
    return found


def _environments(recipe: Recipe, cluster: Cluster, role: RoleName) -> tuple[tuple[str, dict[str, str]], ...]:
    """Where an engine's variables come from, the strongest first."""
    own = recipe.engines.present()[role].env
    return (f"engines.{role}.env", own), ("env", recipe.env), ("the cluster's engine_env", cluster.engine_env)


def _where(recipe: Recipe, finding: Finding) -> Where:
    """The key that a finding is about: the role that its message starts with, else the engines."""
    role = finding.message.partition(":")[0]
    key = {"context-parallel": "extra_args", "kv-permute": "kv_connector_extra_config.enable_permute_local_kv"}.get(finding.code)
    if key is not None:
        return recipe.source.where(key)
    if finding.code == "kv-layout":
        return recipe.source.where("env" if recipe.env else "engines")
    if role in recipe.engines.present():
        name = {"max-model-len": "max_model_len", "block-backend": "block_size"}.get(finding.code)
        if name is not None:
            return recipe.source.where(recipe.key_of_arg(role, name))
        key = "pipeline_parallel" if finding.code in ("pp-layers", "pp-groups") else "tensor_parallel"
        return recipe.source.where(("engines", role, key))
    if recipe.disaggregated and finding.code in PAIR_CODES:
        return recipe.source.where("engines.decode.tensor_parallel")
    return recipe.source.where("engines")


def _missing(recipe: Recipe, cluster: Cluster, config: Path) -> RecipeError:
    key = "model.config" if recipe.model.config else "model.id"
    return RecipeError(
        f"{config} does not exist",
        where=recipe.source.where(key),
        rule="a model folder with config.json",
        hint=f"add {recipe.model.id} to models of {cluster.source.path}, or set model.config to a committed config.json",
    )


def _prediction(recipe: Recipe, cluster: Cluster, model: Model) -> TransferPrediction | None:
    """Bytes that a prompt moves: every decode rank pulls its own pages, so they follow from the decode side alone (planner/transfer.py)."""
    if not recipe.disaggregated:
        return None
    shape = role_shape(recipe, "decode", cluster)
    layout = plan_layout(model, shape)
    if any(group.first.is_state for group in layout.groups):
        return None
    groups = tuple(
        TransferGroup(
            group.first.block_size,
            group.first.window or 0 if group.first.kind == "sliding" else 0,
            (group.page_bytes,) * shape.tensor_parallel,
        )
        for group in layout.groups
    )
    parts = [
        f"{shape.tensor_parallel} ranks x blocks of {g.block_size_tokens} tokens x {g.bytes_per_block_per_decode_rank[0]} bytes"
        + (f" within {g.window_tokens} tokens" if g.window_tokens else "")
        for g in groups
    ]
    return TransferPrediction(groups, " + ".join(parts))


def _page_smoke(recipe: Recipe, cluster: Cluster, model: Model) -> PageSmoke | None:
    """What the gate asks where a page may hold other tokens at prefill than at decode; RecipeError when max_model_len is too small for it.

    None for recurrent models: a state is handed over whole.
    """
    if not recipe.disaggregated or recipe.args_of("decode").hybrid_kv_cache_manager is False:
        return None
    layouts = [plan_layout(model, role_shape(recipe, role, cluster)) for role in ROLES]
    specs = [group.first for layout in layouts for group in layout.groups]
    if all(len(layout.groups) == 1 for layout in layouts) or any(spec.is_state for spec in specs):
        return None
    answer = SMOKE_ANSWER_TOKENS if recipe.recall is None else recipe.recall.max_tokens
    smoke = page_smoke(max(s.block_size for s in specs), max((s.window or 0 for s in specs if s.kind == "sliding"), default=0), answer)
    longest = max(prompt.maximum_tokens for prompt in smoke.prompts) + answer
    for role in ROLES:
        limit = recipe.args_of(role).max_model_len
        if limit is not None and limit < longest:
            raise RecipeError(
                f"max_model_len {limit} is too small for the gate's prompt beyond the sliding window",
                where=recipe.source.where(recipe.key_of_arg(role, "max_model_len")),
                rule=f"block of {smoke.block_tokens} tokens, window of {smoke.window_tokens}: {longest} tokens with the answer",
                hint="a larger max_model_len, or hybrid_kv_cache_manager: false on both roles",
            )
    return smoke


def page_smoke(block_tokens: int, window_tokens: int, max_tokens: int) -> PageSmoke:
    """Prompts of at least one whole block and a remainder of at most half of one; and of a whole block more than the window."""
    whole = max(block_tokens, -(-MIN_PROMPT_TOKENS // block_tokens) * block_tokens)
    prompts = [SmokePrompt("short_last_page", whole + 1, whole + block_tokens // 2)]
    if window_tokens:
        least = max(window_tokens, whole) + block_tokens
        prompts.append(SmokePrompt("beyond_window", least + 1, least + max(block_tokens, SMOKE_SPREAD_TOKENS)))
    return PageSmoke(block_tokens, window_tokens, tuple(prompts), max_tokens)
