"""Both settings of the hybrid manager side by side, and page layouts that the per-group patch does not know."""

from __future__ import annotations

import re

import pytest

from pdlaunch.planner.capacity import plan_layout
from pdlaunch.planner.command import find
from pdlaunch.planner.compat import check_roles
from pdlaunch.planner.config import load_config
from pdlaunch.planner.families import read_model
from pdlaunch.planner.pair import PER_GROUP_PATCH, PER_REGION_PATCH, needed_patches_of
from pdlaunch.planner.roleplan import plan_pair
from pdlaunch.planner.rules import Finding
from pdlaunch.planner.shape import RoleShape
from pdlaunch.planner.transfer import transfer
from tests.envs import ROOT
from tests.planner.models import model

BOTH = frozenset({PER_REGION_PATCH, PER_GROUP_PATCH})
GEMMA = RoleShape(max_model_len=32768, block_size=64, hybrid_manager=True, gpu_memory_gib=140.0)


def found(p: int, d: int, shape: RoleShape = GEMMA, patches: frozenset[str] = BOTH) -> dict[str, Finding]:
    sides = [shape.with_changes(tensor_parallel=tp) for tp in (p, d)]
    return {f.code: f for f in check_roles(model("gemma-4-31b-it"), *sides, patches)}


def test_both_choices_with_their_requests_bytes_and_patches() -> None:
    rows = found(4, 8)
    on, off = rows["manager-on"].message, rows["manager-off"].message
    assert "holds 746 MiB per rank" in on
    assert "moves 740 MiB to each" in on
    assert PER_GROUP_PATCH in on
    assert "holds 3,840 MiB per rank" in off
    assert "moves 3,840 MiB to each" in off
    assert PER_GROUP_PATCH not in off
    fits = [int(re.search(r"(\d+) of them fit", text).group(1)) for text in (on, off)]  # type: ignore[union-attr]
    assert fits[0] > 5 * fits[1]


@pytest.mark.parametrize("manager", [True, False])
def test_the_choices_do_not_depend_on_the_one_that_was_made(manager: bool) -> None:
    rows = found(4, 8, GEMMA.with_changes(hybrid_manager=manager))
    assert [rows[code].message for code in ("manager-on", "manager-off")] == [
        found(4, 8)[code].message for code in ("manager-on", "manager-off")
    ]


def test_on_a_cpu_the_manager_on_is_recommended() -> None:
    cpu = GEMMA.with_changes(backend="CPU_ATTN", dtype="float32")
    rows = found(4, 8, cpu)
    assert "recommended" in rows["manager-on"].message
    assert "recommended" not in rows["manager-off"].message
    assert "per-group-unproven" not in rows


def test_of_the_gpu_backends_only_the_head_sizes_that_were_run_are_recommended() -> None:
    """gemma-4's global heads of 512 need FlashAttention 4, which has not been run."""
    triton = found(4, 8, GEMMA.with_changes(backend="TRITON_ATTN"))
    assert "per-group-unproven" not in triton
    assert "recommended" in triton["manager-on"].message
    flash = found(4, 8, GEMMA.with_changes(backend="FLASH_ATTN"))
    assert flash["per-group-unproven"].severity == "warning"
    assert "256 at most, this model has 512 and needs version 4" in flash["per-group-unproven"].message
    assert "recommended: the other is proven with TRITON_ATTN, not with FLASH_ATTN" in flash["manager-off"].message
    small = read_model(load_config(ROOT / "models" / "gemma4-recall-16x4" / "config.json"))
    shape = RoleShape(max_model_len=4096, block_size=64, backend="FLASH_ATTN", dtype="bfloat16", hybrid_manager=True)
    codes = {f.code for f in check_roles(small, shape.with_changes(tensor_parallel=4), shape.with_changes(tensor_parallel=8), BOTH)}
    assert "per-group-unproven" not in codes


def test_caches_of_eight_bits_are_errors_as_the_patch_refuses_them() -> None:
    rows = found(4, 8, GEMMA.with_changes(backend="TRITON_ATTN", kv_cache_dtype="fp8"))
    assert rows["page-layout"].severity == "error"
    assert "fp8" in rows["page-layout"].message
    assert "recommended" in rows["manager-off"].message


def test_unknown_page_layouts_are_errors() -> None:
    assert found(4, 8, GEMMA.with_changes(backend="FLASHINFER"))["page-layout"].severity == "error"
    assert "float32 only" in found(4, 8, GEMMA.with_changes(backend="CPU_ATTN", dtype="bfloat16"))["page-layout"].message


def test_decode_blocks_that_do_not_divide_prefill_blocks_are_errors() -> None:
    """4 sliding and 1 global heads: at TP4 the sliding layers get the larger blocks."""
    small = read_model(load_config(ROOT / "models" / "gemma4-recall-4x1" / "config.json"))
    shape = RoleShape(max_model_len=4096, block_size=64, backend="CPU_ATTN", dtype="float32", hybrid_manager=True)
    for decode, refused in ((2, False), (4, True)):
        rows = check_roles(small, shape.with_changes(tensor_parallel=1), shape.with_changes(tensor_parallel=decode), BOTH)
        found = [f for f in rows if f.code == "page-layout"]
        assert bool(found) == refused
    assert "reads larger blocks into smaller ones only; sliding layers have blocks of" in found[0].message


def test_pairs_that_scale_alike_and_decode_below_prefill() -> None:
    assert "manager-on" not in found(2, 4, patches=frozenset())
    rows = found(8, 4)
    assert "recommended: the other is refused" in rows["manager-off"].message
    assert "refused: hybrid manager on with prefill TP above decode TP" in rows["manager-on"].message


@pytest.mark.parametrize(("tokens", "reads"), [(12_500, 5_880), (32_000, 15_000)])
def test_reads_of_one_rank_are_the_descriptors_that_two_h200_posted(tokens: int, reads: int) -> None:
    """results/reference/gpu-matrix-2xh200-20261130/realsize-rounds.json: the most that a transfer of A2->C2 had."""
    config = load_config(ROOT / "benchmarks" / "gpu" / "shapes" / "gemma4-26b-a4b-half" / "config.json")
    shape = RoleShape(tensor_parallel=2, max_model_len=40_000, block_size=64, backend="TRITON_ATTN", hybrid_manager=False)
    assert transfer(plan_layout(read_model(config), shape), tokens).reads_per_rank == reads


def test_many_small_reads_are_said_and_larger_blocks_end_it() -> None:
    off = GEMMA.with_changes(hybrid_manager=False, backend="TRITON_ATTN")
    said = found(4, 8, off)["many-reads"]
    assert said.severity == "info"
    assert "30,720 reads of 128 KiB per decode rank" in said.message
    assert "many-reads" not in found(4, 8, off.with_changes(block_size=256))
    assert "many-reads" not in found(4, 8, off.with_changes(max_model_len=4096))
    assert "many-reads" not in found(4, 8, off.with_changes(hybrid_manager=True))
    assert "many-reads" not in found(8, 8, off)


@pytest.mark.parametrize("backend", ["TRITON_ATTN", "FLASH_ATTN", "FLASHINFER"])
@pytest.mark.parametrize("kv_dtype", ["auto", "fp8"])
def test_what_is_recommended_is_never_what_check_refuses(backend: str, kv_dtype: str) -> None:
    sizes = (1, 2, 4, 8, 16, 32)
    recommended = 0
    for p in sizes:
        for d in sizes:
            shape = GEMMA.with_changes(backend=backend, kv_cache_dtype=kv_dtype)
            rows = {
                f.code: f
                for f in check_roles(
                    model("gemma-4-31b-it"), shape.with_changes(tensor_parallel=p), shape.with_changes(tensor_parallel=d), BOTH
                )
            }
            for code, on in (("manager-on", True), ("manager-off", False)):
                if code in rows and "recommended" in rows[code].message:
                    recommended += 1
                    sides = [shape.with_changes(tensor_parallel=tp, hybrid_manager=on) for tp in (p, d)]
                    patches = needed_patches_of(*(plan_layout(model("gemma-4-31b-it"), side) for side in sides))
                    errors = [f.message for f in check_roles(model("gemma-4-31b-it"), *sides, patches) if f.severity == "error"]
                    assert errors == [], (p, d, code)
    assert recommended > 5


def test_a_fix_is_never_a_patch_that_refuses_the_pair_too() -> None:
    rows = found(4, 16, GEMMA.with_changes(backend="TRITON_ATTN"), patches=frozenset())
    assert "sliding layers have blocks of 64 tokens at prefill and 128 at decode" in rows["mixed-heads"].message
    assert PER_GROUP_PATCH not in rows["mixed-heads"].fix
    assert "hybrid_kv_cache_manager: false" in rows["mixed-heads"].fix


def test_stages_and_several_groups_are_refused_as_pull_mode_does() -> None:
    staged = GEMMA.with_changes(backend="TRITON_ATTN", pipeline_parallel=2)
    assert found(4, 8, staged)["pp-groups"].severity == "error"
    assert "pp-groups" not in found(4, 8, staged.with_changes(hybrid_manager=False))
    assert "refused: prefill: NixlConnector refuses pipeline_parallel" in found(4, 8, staged)["manager-on"].message


def test_levers_that_end_the_hand_over_say_so() -> None:
    shape = GEMMA.with_changes(backend="TRITON_ATTN")
    roles = {"prefill": shape.with_changes(tensor_parallel=4), "decode": shape.with_changes(tensor_parallel=8)}
    levers = {lever.change: lever for lever in plan_pair(model("gemma-4-31b-it"), roles, 32_768, BOTH).roles["decode"].levers}
    assert levers["kv_cache_dtype: fp8"].refused == "no hand-over (page-layout)"
    assert levers["tensor_parallel: 16 (weights and memory as now)"].refused == "no hand-over (page-layout)"
    assert not levers["hybrid_kv_cache_manager: false"].refused
    assert not levers["max_num_batched_tokens: 2048"].refused


def test_a_search_lists_the_pair_that_was_asked_about() -> None:
    shape = GEMMA.with_changes(backend="TRITON_ATTN", gpu_memory_gib=140.0)
    roles = {"prefill": shape.with_changes(tensor_parallel=4), "decode": shape.with_changes(tensor_parallel=8)}
    pairs = find(model("gemma-4-31b-it"), roles, 12, patches=BOTH).pairs
    (own,) = [p for p in pairs if (p.prefill.shape.tensor_parallel, p.decode.shape.tensor_parallel, p.gpus) == (4, 8, 12)]
    assert own.errors == ()
