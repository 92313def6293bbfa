"""Recipes and clusters: every shipped one loads, and every bad input is one message with place, value, rule and next step."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pdlaunch import cluster, recipe
from pdlaunch.errors import LaunchError, PlacementError, PlanError, RecipeError
from tests.golden_cases import CASES, ROOT, build

RECIPES = sorted((ROOT / "recipes").glob("*.yaml"))
CLUSTERS = sorted((ROOT / "clusters").glob("*.yaml"))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_shipped_recipe_loads_and_has_a_golden_bundle(path: Path) -> None:
    assert recipe.load(path).description
    assert path.stem in {name for name, _ in CASES}


@pytest.mark.parametrize("path", CLUSTERS, ids=lambda p: p.stem)
def test_shipped_cluster_loads_and_is_used(path: Path) -> None:
    assert cluster.load(path).description
    assert path.stem in {site for _, site in CASES}


# (recipe, cluster, overrides, error, parts of its message)
BAD = [
    (
        "tiny-p1d2",
        "local",
        ["engines.decode.tensor_parallel=3"],
        PlanError,
        ["--set engines.decode.tensor_parallel=3", "attention heads (8)", "one of 1, 2, 4, 8"],
    ),
    (
        "tiny-p1d2",
        "local",
        ["patches=[nixl-1.4.1-progress-thread-delay]"],
        PlanError,
        [
            "tiny-p1d2.yaml:",
            "engines.decode.tensor_parallel",
            "1 -> 1 per rank",
            "vllm-0.31.0-nixl-per-region-kv-heads",
            "allow_unsupported_pair",
        ],
    ),
    (
        "tiny-p2d1",
        "local",
        ["engine_args.hybrid_kv_cache_manager=true"],
        PlanError,
        ["reads one way only", "mixed-heads-direction", "allow_unsupported_pair"],
    ),
    ("tiny-p1d1", "local", ["allow_unsupported_pair=why"], RecipeError, ["this pair is supported", "remove the key"]),
    (
        "gemma4-p4d8",
        "example",
        ["engines.decode.replicas=9"],
        PlacementError,
        ["prefill 1 x 4 GPUs, decode 9 x 8 GPUs need 10 nodes of 8 GPUs", "lends 4 nodes"],
    ),
    ("gemma4-p4d8", "local-gpu", [], LaunchError, ["local-gpu"]),
    ("gemma4-p4d8", "local", [], RecipeError, ["no environment with exactly the patches", "launch.py patch apply"]),
    (
        "tiny-p1d2",
        "local",
        ["engines.decode.engine_args.block_size=128"],
        RecipeError,
        ["--set engines.decode.engine_args.block_size=128", "64 on prefill and 128 on decode", "wrong KV blocks with HTTP 200", "next:"],
    ),
    (
        "tiny-p1d2",
        "local",
        ["engines.prefill.engine_args.kv_cache_dtype=fp8"],
        RecipeError,
        ["kv_cache_dtype is 'fp8' on prefill and None on decode"],
    ),
    (
        "tiny-p1d2",
        "local",
        ["engines.decode.engine_args.hybrid_kv_cache_manager=true"],
        RecipeError,
        ["hybrid_kv_cache_manager", "equal on both roles"],
    ),
    ("tiny-p1d1", "local", ["engines.agg={replicas: 1}"], RecipeError, ["either prefill and decode, or agg"]),
    ("tiny-p1d1", "local", ["engines={decode: {}}"], RecipeError, ["a decode engine without prefill never becomes ready"]),
    ("tiny-p1d1", "local", ["engines={}"], RecipeError, ["roles: none"]),
    ("tiny-p1d1", "local", ["engines.control={}"], RecipeError, ["agreement and engines.control go together"]),
    (
        "tiny-p1d1",
        "local",
        ["recall.prompt_tokens=5000"],
        RecipeError,
        ["5000 + 24 tokens to generate = 5024", "at most max_model_len 4096"],
    ),
    ("tiny-p1d1", "local", ["load=[]"], RecipeError, ["during without load"]),
    (
        "tiny-p1d1",
        "local",
        ["recall.when=[before, durring]"],
        RecipeError,
        ["'durring' is not a legal value", "did you mean 'during'?"],
    ),
    ("tiny-p1d1", "local", ["load.0.concurrency=null"], RecipeError, ["tiny-p1d1.yaml:", "load[0]", "exactly one of the two"]),
    ("tiny-p1d1", "local", ["load.0.request_rate_per_s=2"], RecipeError, ["exactly one of the two"]),
    ("tiny-p1d1", "local", ["load.0.requests=1"], RecipeError, ["1 requests at concurrency 2"]),
    ("tiny-p1d1", "local", ["load.0.input_tokens=4090"], RecipeError, ["4090 + 16 tokens", "max_model_len 4096"]),
    ("tiny-p1d1", "local", ["load.0.name=../x"], RecipeError, ["must match"]),
    ("tiny-p1d1", "local", ["load.0.warmup_requests=-1"], RecipeError, ["at least 0"]),
    ("tiny-p1d1", "local", [f"load.0.requests={'9' * 23}"], RecipeError, ["999 is too large", "at most 9007199254740992"]),
    ("tiny-p1d1", "local", [f"deadlines.engines_s=1{'0' * 400}"], RecipeError, ["is too large"]),
    ("tiny-p1d1", "local", ['description="a\\0b"'], RecipeError, ["the character '\\x00'"]),
    ("tiny-p1d1", "local", ["time_limit_minutes=0"], RecipeError, ["0 is too small"]),
    ("tiny-p1d1", "local", ["time_limit_minutes=2h"], RecipeError, ["expected a whole number, found '2h'"]),
    ("tiny-p1d1", "local", ["time_limit_minutes=5"], RecipeError, ["deadlines.engines_s", "600 s", "below time_limit_minutes (5 minutes)"]),
    ("tiny-p1d1", "local", ["deadlines.engines_s=forever"], RecipeError, ["expected a number, found 'forever'"]),
    ("tiny-p1d1", "local", ["patches=[]"], RecipeError, ["NIXL_PTHR_DELAY_US", "add nixl-1.4.1-progress-thread-delay to patches"]),
    ("tiny-p1d1", "local", ["kv_connector_extra_config.enforce_handshake_compat=false"], RecipeError, ["never off"]),
    ("tiny-p1d1", "local", ["engine_args.max_num_seqs=9000"], RecipeError, ["4096 < max_num_seqs 9000"]),
    ("tiny-p1d1", "local", ["engine_args.load_format=dummy"], RecipeError, ["random weights answer nothing"]),
    ("tiny-p1d1", "local", ["engine_args.kv_cache_dtype=fp9"], RecipeError, ["--set engine_args.kv_cache_dtype=fp9", "one of auto"]),
    ("tiny-p1d1", "local", ["engine_args.tool_call_parser=gemma5"], RecipeError, ["tool_call_parser 'gemma5'", "did you mean 'gemma4'?"]),
    ("tiny-p1d1", "local", ["engine_args.mocker_speedup=2"], RecipeError, ["only with backend: mocker"]),
    (
        "tiny-p1d1",
        "local",
        ["model.id=models/none"],
        RecipeError,
        ["--set model.id=models/none", "models/none/config.json does not exist", "models of"],
    ),
    ("mocker-p1d1", "local", ["recall={prompt_tokens: 800}"], RecipeError, ["recall with the mocker"]),
    ("mocker-p1d1", "local", ["engines.decode.tensor_parallel=2"], RecipeError, ["the mocker has no GPUs"]),
    ("mocker-p1d1", "local", ["engine_args.enforce_eager=true"], RecipeError, ["enforce_eager with the mocker"]),
    (
        "tiny-p1d1",
        "local",
        ["patches=[nixl-1.4.1-progress-thread-delay, nixl-1.4.1-progress-thread-delay]"],
        RecipeError,
        ["is there twice"],
    ),
    ("tiny-p1d1", "local", ["patches=[banana]"], RecipeError, ["--set patches=[banana]: unknown patch 'banana'"]),
    (
        "tiny-p1d1",
        "local",
        ["patches=[nixl-1.4.1-progres-thread-delay]"],
        RecipeError,
        ["unknown patch", "did you mean 'nixl-1.4.1-progress-thread-delay'?"],
    ),
    ("tiny-p1d1", "local", ["versions.nixl=1.5.0"], RecipeError, ["patches[0]", "is for nixl 1.4.1, and versions.nixl is 1.5.0"]),
    (
        "gemma4-p4d8-hybrid",
        "example",
        ["versions.vllm=0.30.0"],
        RecipeError,
        ["patches[0]: vllm-0.31.0-nixl-per-region-kv-heads is for vllm 0.31.0, and versions.vllm is 0.30.0", "next: versions.vllm: 0.31.0"],
    ),
    (
        "gemma4-p4d8-hybrid",
        "example",
        ["versions.vllm=0.32.0"],
        RecipeError,
        ["versions.vllm: 0.31.0; vllm-0.32.0-nixl-per-region-kv-heads is the patch for 0.32.0"],
    ),
    ("gemma4-p8d8", "example", ["engine_args.attention_backend=BANANA"], RecipeError, ["attention_backend 'BANANA'", "TRITON_ATTN"]),
    ("gemma4-p8d8", "example", ["engine_args.attention_backend=triton_attn"], RecipeError, ["did you mean 'TRITON_ATTN'?"]),
    (
        "gemma4-p8d8",
        "example",
        ["engines.decode.engine_args.attention_backend=FLASH_ATTN_HD256"],
        RecipeError,
        ["engines.decode.engine_args.attention_backend", "did you mean 'FLASH_ATTN'?"],
    ),
    (
        "gemma4-p8d8",
        "example",
        ["engines.decode.engine_args.attention_backend=FLEX_ATTENTION"],
        PlanError,
        ["attention backend FLASH_ATTN at prefill, FLEX_ATTENTION at decode", "hash mismatch"],
    ),
]


@pytest.mark.parametrize(
    ("settings", "codes"),
    [
        ((), []),
        (("versions.vllm=0.31.0+cpu",), []),
        (("engine_args.attention_backend=TRITON_ATTN",), []),
        (("engine_args.attention_backend=auto",), []),
        (("versions.vllm=0.32.0",), ["other-version"]),
        (("versions.dynamo=1.7.0",), ["other-version"]),
        (("engine_args.attention_backend=FLEX_ATTENTION",), ["backend-unknown", "backend-unknown"]),
    ],
    ids=str,
)
def test_what_the_checks_do_not_know_is_a_warning(settings: tuple[str, ...], codes: list[str]) -> None:
    assert [w.code for w in build("gemma4-p8d8", "example", settings).warnings] == codes


def test_hashes_are_those_of_the_versions_that_the_recipe_names() -> None:
    stock = build("gemma4-p8d8", "example").spec.proof.file_sha256
    newer = build("gemma4-p8d8", "example", ("versions.vllm=0.32.0",)).spec.proof.file_sha256
    older = build("gemma4-p8d8", "example", ("versions.vllm=0.30.0",)).spec.proof.file_sha256
    metadata = "vllm/distributed/kv_transfer/kv_connector/v1/nixl/metadata.py"
    assert stock[metadata] != newer[metadata]
    assert metadata not in older


@pytest.mark.parametrize(("name", "site", "settings", "error", "parts"), BAD, ids=[f"{b[0]}-{' '.join(b[2]) or b[1]}"[:70] for b in BAD])
def test_bad_input_is_one_message(name: str, site: str, settings: list[str], error: type[LaunchError], parts: list[str]) -> None:
    with pytest.raises(error) as e:
        build(name, site, tuple(settings))
    message = str(e.value)
    for part in parts:
        assert part in message, message
    assert "rule:" in message
    assert e.value.exit_code == 2
    assert e.value.where is not None


def test_names_and_paths(tmp_path: Path) -> None:
    folder = ROOT / "recipes"
    assert recipe.find("tiny-p1d1", folder, "recipe") == folder / "tiny-p1d1.yaml"
    with pytest.raises(RecipeError, match="did you mean 'tiny-agg'"):
        recipe.find("tiny-aag", folder, "recipe")
    with pytest.raises(RecipeError, match="no recipe file"):
        recipe.find("./none.yaml", folder, "recipe")
    copy = tmp_path / "other.yaml"
    copy.write_text((folder / "tiny-p1d1.yaml").read_text(encoding="utf-8"), encoding="utf-8")
    with pytest.raises(RecipeError, match=re.escape(f"{copy}:2 name: name is 'tiny-p1d1' but the file is other.yaml")):
        recipe.load(recipe.find(str(copy), folder, "recipe"))


CLUSTER_BAD = [
    ("local-slurm", ["slurm=null"], "launcher: slurm needs slurm"),
    ("local", ["device=cuda"], "at least 1 with device: cuda"),
    ("local-slurm", ["engines_share_gpus=true"], "only with launcher: local"),
    ("local", ["environments=[{patches: [], python: a, image: b}]"], "exactly one of the two"),
    ("local", ["environments=[{patches: []}]"], "exactly one of the two"),
    ("local", ["environments=[{patches: [], image: b}]"], "needs launcher: slurm and a container section"),
    ("local", ["environments=[{patches: [], python: a}, {patches: [], python: b}]"], "the same patches as environments[0]"),
    ("local-slurm", ["slurm.mem_per_engine_rank=8 GB"], "must match"),
    ("local-slurm", ["slurm.gres=gpu:a b"], "must match"),
    ("local", ["network.http_port=70000"], "at most 65535"),
]


@pytest.mark.parametrize(("site", "settings", "message"), CLUSTER_BAD, ids=[" ".join(c[1])[:60] for c in CLUSTER_BAD])
def test_bad_cluster(site: str, settings: list[str], message: str) -> None:
    with pytest.raises(RecipeError) as e:
        cluster.load(ROOT / "clusters" / f"{site}.yaml", tuple(settings))
    assert message in str(e.value)
    assert str(e.value).startswith((f"--set cluster.{settings[0].split('=')[0]}", str(ROOT)))


def test_role_arguments_win_over_those_of_every_engine() -> None:
    found = recipe.load(ROOT / "recipes" / "gemma4-p4d8.yaml")
    assert found.args_of("prefill").max_num_batched_tokens == 16384
    assert found.args_of("decode").max_num_batched_tokens == 8192
    assert found.args_of("prefill").block_size == found.args_of("decode").block_size == 64


def test_a_file_of_keys_is_laid_over_a_recipe_and_recorded(tmp_path: Path) -> None:
    patch = tmp_path / "patch.yaml"
    decode = "decode:\n    engine_args: {max_num_seqs: 4}\n    extra_args: [--seed, '7']\n"
    patch.write_text(f"engine_args:\n  block_size: 128\nengines:\n  {decode}")
    found = recipe.load(ROOT / "recipes" / "tiny-p1d2.yaml", (f"@{patch}",))
    assert found.engine_args.block_size == 128
    assert found.engines.decode is not None
    assert found.engines.decode.extra_args == ("--seed", "7")
    assert found.source.overrides["engines.decode.engine_args.max_num_seqs"] == "4"
    with pytest.raises(RecipeError, match="does not exist"):
        recipe.load(ROOT / "recipes" / "tiny-p1d2.yaml", (f"@{tmp_path / 'none.yaml'}",))


def test_prompts_too_short_for_a_list_are_refused() -> None:
    with pytest.raises(RecipeError, match=r"recall\.prompt_tokens"):
        recipe.load(ROOT / "recipes" / "tiny-p1d2.yaml", ("recall.prompt_tokens=100",))
    with pytest.raises(RecipeError, match=r"agreement\.prompt_tokens"):
        recipe.load(ROOT / "recipes" / "tiny-p4d8.yaml", ("agreement.prompt_tokens=[100, 400]",))
