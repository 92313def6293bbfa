"""What the planner's shapes do not hold and the patches refuse at the handshake: said by `check`, before a GPU is booked."""

from __future__ import annotations

import pytest

from pdlaunch import session
from pdlaunch.errors import PlanError
from pdlaunch.planner.pair import PER_REGION_PATCH, known_patches
from tests.envs import ROOT

HYBRID = {"recipe": "gemma4-p4d8-hybrid", "cluster": "example"}
OFF = {"recipe": "gemma4-p4d8", "cluster": "example"}


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ('extra_args=["--decode-context-parallel-size", "2"]', "decode-context-parallel-size 2"),
        ('engines.decode.extra_args=["-pcp=2"]', "decode: .*prefill-context-parallel-size 2"),
        ('extra_args=["-dcp2"]', "decode-context-parallel-size 2"),
        ('extra_args=["--decode_context_parallel_size=4"]', "decode-context-parallel-size 4"),
        ("engines.decode.env.VLLM_KV_CACHE_LAYOUT=NHD", "decode: .*VLLM_KV_CACHE_LAYOUT in engines.decode.env"),
        ("env.VLLM_KV_CACHE_LAYOUT=NHD", "layout NHD"),
        ("cluster.engine_env.VLLM_KV_CACHE_LAYOUT=LBNHC", "layout LBNHC .*the cluster's engine_env"),
        ("kv_connector_extra_config.enable_permute_local_kv=true", "enable_permute_local_kv"),
    ],
)
@pytest.mark.parametrize("names", [HYBRID, OFF], ids=["both patches", "per region"])
def test_refused_with_either_patch(names: dict[str, str], setting: str, said: str) -> None:
    with pytest.raises(PlanError, match=said):
        session.load_job(ROOT, **names, settings=(setting,))


@pytest.mark.parametrize(
    "setting", ["env.VLLM_KV_CACHE_LAYOUT=HND", 'extra_args=["--decode-context-parallel-size=1"]', 'extra_args=["--max-logprobs", "5"]']
)
def test_what_the_patches_read_passes(setting: str) -> None:
    session.load_job(ROOT, **HYBRID, settings=(setting,))


def test_blocks_outermost_are_read_by_the_per_region_patch_only() -> None:
    setting = ("env.VLLM_KV_CACHE_LAYOUT=BLHNC",)
    session.load_job(ROOT, **OFF, settings=setting)
    with pytest.raises(PlanError, match="layout BLHNC"):
        session.load_job(ROOT, **HYBRID, settings=setting)


def test_a_pair_that_needs_no_patch_is_left_alone() -> None:
    session.load_job(ROOT, recipe="gemma4-p8d8", cluster="example", settings=("env.VLLM_KV_CACHE_LAYOUT=NHD",))


def test_drafts_are_a_warning_with_the_manager_on() -> None:
    drafts = ('extra_args=["--speculative-config", \'{"method": "mtp", "num_speculative_tokens": 1}\']',)
    codes = [row["check"] for row in session.check_rows(session.load_job(ROOT, **HYBRID, settings=drafts))]
    assert codes.count("drafts-unproven") == 2
    assert "drafts-unproven" not in [r["check"] for r in session.check_rows(session.load_job(ROOT, **OFF, settings=drafts))]


def test_a_rebased_patch_counts_as_what_it_is_rebased_from() -> None:
    assert known_patches(["vllm-0.32.0-nixl-per-region-kv-heads", "other"]) == {PER_REGION_PATCH, "other"}
