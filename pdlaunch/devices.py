"""Which GPUs the engines of a run were given: what rates are divided by, and whether engines share a GPU."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any

from pdlaunch.metrics_defs import Denominators

SERVING = ("prefill", "decode", "agg")
_ROLES = (*SERVING, "control")


def owners(spec: dict[str, Any]) -> dict[tuple[int, int], list[dict[str, Any]]]:
    """(node, GPU id) -> the engines that run on it, in the order of spec.json."""
    found: dict[tuple[int, int], list[dict[str, Any]]] = {}
    for e in spec["engines"]:
        for rank in e["ranks"]:
            for gpu in rank["gpus"]:
                on = found.setdefault((rank["node"], gpu), [])
                if e not in on:
                    on.append(e)
    return found


def denominators(spec: dict[str, Any]) -> Denominators:
    """Distinct GPUs (node and id) per serving role; on a run without GPUs the ranks (TP x PP x DP) of the engines."""
    gpus: dict[str, set[tuple[int, int]]] = {role: set() for role in SERVING}
    for place, engines in owners(spec).items():
        for role in {e["role"] for e in engines} & set(SERVING):
            gpus[role].add(place)
    if any(gpus.values()):
        prefill, decode, agg = (len(gpus[role]) for role in SERVING)
        return Denominators("GPU", prefill, decode, agg, shared=prefill + decode + agg - len(set().union(*gpus.values())))
    ranks = dict.fromkeys(SERVING, 0)
    for e in spec["engines"]:
        if e["role"] in ranks:
            ranks[e["role"]] += e["tensor_parallel"] * e["pipeline_parallel"] * e["data_parallel"]
    return Denominators("rank", ranks["prefill"], ranks["decode"], ranks["agg"], "spec.json engines[].tensor_parallel (no GPU in this run)")


@dataclass(frozen=True)
class Sharing:
    """GPUs with more than one engine, a control engine included: it serves no load, but it takes memory and may run.

    pattern: by role, as in "prefill+decode on 1 GPU", equal for runs that share alike; empty when every engine has its own GPUs.
    where: by engine and GPU.
    """

    pattern: str = ""
    where: str = ""

    @property
    def text(self) -> str:
        said = f"engines share GPUs ({self.where}): the latency and per-GPU figures are not those of separate GPUs"
        return said if self.pattern else ""


def sharing(spec: dict[str, Any]) -> Sharing:
    shared = {place: engines for place, engines in sorted(owners(spec).items()) if len(engines) > 1}
    patterns = Counter("+".join(sorted((e["role"] for e in engines), key=_ROLES.index)) for engines in shared.values())
    by_engines: dict[tuple[str, int], list[str]] = {}
    for (node, gpu), engines in shared.items():
        by_engines.setdefault((" and ".join(e["name"] for e in engines), node), []).append(str(gpu))
    several = len(spec["nodes"]) > 1
    where = [f"{names} on GPU {', '.join(gpus)}" + (f" of node {node}" if several else "") for (names, node), gpus in by_engines.items()]
    return Sharing(", ".join(f"{who} on {n} GPU{'' if n == 1 else 's'}" for who, n in patterns.items()), "; ".join(where))
