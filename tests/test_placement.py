"""Engines on nodes: exactly their GPUs, unequal counts as components, several engines on a node, engines over several nodes."""

from __future__ import annotations

import dataclasses

import pytest

from pdlaunch import cluster, recipe
from pdlaunch.errors import PlacementError
from pdlaunch.placement import Placement, place
from tests.golden_cases import ROOT


def placed(engines: str, *settings: str, nodes: int = 4, site: str = "example", per_node: int = 8) -> Placement:
    found = recipe.load(ROOT / "recipes" / "gemma4-p4d8.yaml", (f"engines={engines}", *settings))
    where = cluster.load(ROOT / "clusters" / f"{site}.yaml", (f"nodes.max={nodes}", f"nodes.gpus_per_node={per_node}"))
    return place(found, where)


def ranks(placement: Placement) -> dict[str, list[tuple[int, tuple[int, ...]]]]:
    return {e.name: [(r.node, r.gpus) for r in e.ranks] for e in placement.engines}


def nodes(placement: Placement) -> list[tuple[int, int, int]]:
    return [dataclasses.astuple(n) for n in placement.nodes]


def test_unequal_counts_are_components_and_leave_the_rest_free() -> None:
    found = placed("{prefill: {tensor_parallel: 4}, decode: {tensor_parallel: 8}}")
    assert nodes(found) == [(0, 0, 4), (1, 0, 8)]
    assert ranks(found) == {"prefill-0": [(0, (0, 1, 2, 3))], "decode-0": [(1, tuple(range(8)))]}
    assert found.gpus == 12


def test_equal_counts_are_one_component() -> None:
    found = placed("{prefill: {tensor_parallel: 8}, decode: {tensor_parallel: 8}}")
    assert nodes(found) == [(0, 0, 8), (0, 1, 8)]
    assert len(found.components) == 1


def test_replicas_share_the_nodes_of_their_role() -> None:
    found = placed("{prefill: {tensor_parallel: 2, replicas: 5}, decode: {tensor_parallel: 8}}")
    assert [r[0] for r in ranks(found).values()] == [
        (0, (0, 1)),
        (0, (2, 3)),
        (0, (4, 5)),
        (0, (6, 7)),
        (2, (0, 1)),
        (1, tuple(range(8))),
    ]
    assert nodes(found) == [(0, 0, 8), (0, 1, 8), (1, 0, 2)]


def test_pack_puts_roles_on_one_node() -> None:
    found = placed("{prefill: {tensor_parallel: 2}, decode: {tensor_parallel: 4, replicas: 1}}", "placement=pack")
    assert nodes(found) == [(0, 0, 6)]
    assert ranks(found) == {"prefill-0": [(0, (0, 1))], "decode-0": [(0, (2, 3, 4, 5))]}


def test_an_engine_over_two_nodes_takes_whole_shares() -> None:
    found = placed("{prefill: {tensor_parallel: 4}, decode: {tensor_parallel: 16}}")
    assert ranks(found)["decode-0"] == [(1, tuple(range(8))), (2, tuple(range(8)))]
    assert nodes(found) == [(0, 0, 4), (1, 0, 8), (1, 1, 8)]


def test_pipeline_parallel_over_nodes_divides_evenly() -> None:
    found = placed("{prefill: {tensor_parallel: 4, pipeline_parallel: 3}, decode: {tensor_parallel: 8}}")
    assert [len(gpus) for _, gpus in ranks(found)["prefill-0"]] == [6, 6]


@pytest.mark.parametrize(
    ("engines", "message"),
    [
        ("{prefill: {tensor_parallel: 8, replicas: 4}, decode: {tensor_parallel: 8}}", "need 5 nodes of 8 GPUs"),
        ("{prefill: {tensor_parallel: 4}, decode: {tensor_parallel: 64}}", "one decode engine needs 64 GPUs"),
        ("{prefill: {tensor_parallel: 4}, decode: {tensor_parallel: 4, data_parallel: 4}}", "data_parallel 4 must fit one node"),
        ("{prefill: {tensor_parallel: 4}, decode: {tensor_parallel: 8, pipeline_parallel: 5}}", "one decode engine needs 40 GPUs"),
    ],
)
def test_too_many(engines: str, message: str) -> None:
    with pytest.raises(PlacementError, match="rule:") as e:
        placed(engines)
    assert message in str(e.value)


def test_this_machine_deals_gpus_in_order_and_shares_only_when_told() -> None:
    both = "{prefill: {tensor_parallel: 1}, decode: {tensor_parallel: 2}}"
    assert ranks(placed(both, site="local-gpu", nodes=1, per_node=4)) == {"prefill-0": [(0, (0,))], "decode-0": [(0, (1, 2))]}
    assert ranks(placed(both, site="local-gpu", nodes=1, per_node=2)) == {"prefill-0": [(0, (0,))], "decode-0": [(0, (0, 1))]}
    found = recipe.load(ROOT / "recipes" / "gemma4-p4d8.yaml", (f"engines={both}",))
    alone = cluster.load(ROOT / "clusters" / "local-gpu.yaml", ("nodes.gpus_per_node=2", "engines_share_gpus=false"))
    with pytest.raises(PlacementError, match="engines_share_gpus: true"):
        place(found, alone)
    with pytest.raises(PlacementError, match="one decode engine needs 2 GPUs"):
        placed(both, site="local-gpu", nodes=1, per_node=1)


def test_every_gpu_is_given_once() -> None:
    found = placed("{prefill: {tensor_parallel: 2, replicas: 3}, decode: {tensor_parallel: 4, replicas: 3}}", "placement=pack")
    given = [(r.node, g) for e in found.engines for r in e.ranks for g in r.gpus]
    assert len(given) == len(set(given)) == 18
    assert found.gpus == 18
