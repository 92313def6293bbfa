"""Whether what serves is what the recipe names: versions and file hashes of an engine environment against spec.proof."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from .spec import Proof


@dataclass(frozen=True)
class BuildFacts:
    """nodes: content of nodes/<process>.json by process name. proof: what must serve."""

    nodes: dict[str, dict[str, Any]]
    proof: Proof


def build_faults(facts: BuildFacts) -> list[str]:
    """Versions and file hashes of every engine process against spec.proof; a fact that is absent is a fault, and so is having no engine."""
    engines = {name: node for name, node in facts.nodes.items() if node.get("role") in ("prefill", "decode", "agg", "control")}
    if not engines:
        return ["no facts of any engine process"]
    faults = []
    for name, node in sorted(engines.items()):
        for distribution, required in sorted(facts.proof.versions.items()):
            found = (node.get("versions") or {}).get(distribution)
            if found is None or found.partition("+")[0] != required.partition("+")[0]:
                faults.append(f"{name}: {distribution} {found or 'not found'} instead of {required}")
        faults += file_faults(name, node.get("file_sha256") or {}, facts.proof.file_sha256)
    return faults


def file_faults(name: str, found: dict[str, str | None], required: dict[str, str]) -> list[str]:
    """required: a sha256, `absent`, or both joined by ` or ` for files of which one is enough (one NIXL build for each CUDA version)."""
    faults = []
    enough: dict[str, bool] = {}
    for path, wanted in sorted(required.items()):
        options = wanted.split(" or ")
        observed = found.get(path) or "absent"
        if observed not in options:
            faults.append(f"{name}: {path} has sha256 {observed[:12]}, required {' or '.join(o[:12] for o in options)}")
        if len(options) > 1:
            enough[wanted] = enough.get(wanted, False) or observed != "absent"
    faults += [f"{name}: no file with sha256 {wanted[:12]}, of which one is needed" for wanted, some in enough.items() if not some]
    return faults
