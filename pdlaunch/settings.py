"""What one run was: its settings as typed, flat entries, and which of them make two runs incomparable."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from pdlaunch.node.spec import placeholders_in
from pdlaunch.runread import Run

Kind = Literal["model", "workload", "engines", "versions", "patches", "hardware", "code", "measurement"]
KINDS: tuple[Kind, ...] = ("model", "workload", "measurement", "engines", "versions", "patches", "hardware", "code")
"""Order on the page: what makes runs incomparable first. measurement: how AIPerf connected, and whether text was checked at all."""
_SITE_FLAGS = frozenset({
    "--model", "--model-path", "--model-name", "--served-model-name", "--endpoint", "--kv-events-config", "--master-addr", "--master-port",
    "--node-rank", "--tensor-parallel-size", "--pipeline-parallel-size", "--data-parallel-size", "--disable-hybrid-kv-cache-manager",
    "--speculative-config", "--spec-method", "--spec-model", "--spec-tokens", "--disaggregation-mode",
})  # fmt: skip
"""Flags whose values are paths, addresses or the placement; model, ranks, hybrid manager and speculation have their own
entries."""


@dataclass(frozen=True)
class Setting:
    kind: Kind
    value: str
    source: str


@functools.lru_cache(maxsize=4096)
def _flags(argv: tuple[str, ...]) -> dict[str, str]:
    found: dict[str, str] = {}
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            off = flag.startswith("--no-")
            flag = "--" + flag.removeprefix("--no-") if off else flag
            found[flag] = value or ("off" if off else "on")
        elif flag:
            found[flag] = word if found[flag] == "on" else f"{found[flag]} {word}"
    return found


def flags_of(argv: Iterable[str]) -> dict[str, str]:
    """{flag: value} of a command line; a switch is "on", its --no- form "off"."""
    return _flags(tuple(argv))


def hybrid_manager(argv: Iterable[str]) -> str:
    """off or on as the flag says, default where vLLM decides."""
    words = set(argv)
    if "--disable-hybrid-kv-cache-manager" in words:
        return "off"
    return "on" if "--no-disable-hybrid-kv-cache-manager" in words else "default"


def speculation(argv: Iterable[str]) -> str:
    """Empty without speculative decoding, else method and draft tokens, as mtp x3."""
    found = flags_of(argv)
    text = found.get("--speculative-config")
    if text is None:
        method, tokens = found.get("--spec-method"), found.get("--spec-tokens")
        return f"{method or 'on'} x{tokens or '?'}" if method or tokens else ""
    try:
        config = json.loads(text)
    except json.JSONDecodeError:
        return text
    return f"{config.get('method', 'on')} x{config.get('num_speculative_tokens', '?')}" if isinstance(config, dict) else text


def phase_text(phase: dict[str, Any]) -> str:
    """The workload of one phase in words, without what only changes noise (seed, requests, warm-up)."""
    users, rate = phase.get("concurrency"), phase.get("request_rate_per_s")
    load = f"{users} user{'' if users == 1 else 's'}" if users else f"{rate:g} requests/s"
    return f"ISL {phase['input_tokens']}, OSL {phase['output_tokens']}, {load}{'' if phase.get('streaming', True) else ', not streaming'}"


def _engines(run: Run, into: dict[str, Setting]) -> None:
    for role in ("prefill", "decode", "agg", "control"):
        engines = run.engines(role)
        if not engines:
            continue
        first = engines[0]
        shape = {"replicas": len(engines), **{k: first[k] for k in ("tensor_parallel", "pipeline_parallel", "data_parallel", "kind")}}
        for name, value in shape.items():
            into[f"{role} {name}"] = Setting("engines", str(value), "spec.json engines")
        argv = first["ranks"][0]["argv"]
        into[f"{role} hybrid manager"] = Setting("engines", hybrid_manager(argv), f"spec.json engines {first['name']} argv")
        into[f"{role} speculation"] = Setting("engines", speculation(argv) or "off", f"spec.json engines {first['name']} argv")
        for flag, value in flags_of(argv).items():
            if flag in _SITE_FLAGS or placeholders_in(value):
                continue
            into[f"{role} {flag}"] = Setting("engines", value, f"spec.json engines {first['name']} argv")
        hidden = [k.upper() for k in run.spec.get("redact_keys", [])]
        for name, value in first["env"].items():
            if not placeholders_in(value) and not any(h in name.upper() for h in hidden):
                into[f"{role} env {name}"] = Setting("engines", value, f"spec.json engines {first['name']} env")
        gpus = sorted({g.get("name", "?") for e in engines for g in run.nodes.get(e["name"], {}).get("gpus") or []})
        into[f"{role} device"] = Setting("hardware", ", ".join(gpus) or run.spec["run"]["device"], f"nodes/{first['name']}.json gpus")


def _software(run: Run, into: dict[str, Setting]) -> None:
    asked: dict[str, str] = run.spec["proof"]["versions"]
    for name, version in asked.items():
        into[f"version {name}"] = Setting("versions", version, "spec.json proof.versions")
    seen: dict[str, set[str]] = {}
    for facts in run.nodes.values():
        for name, version in (facts.get("versions") or {}).items():
            seen.setdefault(name, set()).add(str(version))
    for name, versions in seen.items():
        into[f"version {name}"] = Setting("versions", " and ".join(sorted(versions)), "nodes/*.json versions")
    for patch in run.spec["proof"]["patches"]:
        into[f"patch {patch}"] = Setting("patches", "applied", "spec.json proof.patches")
    for name, digest in run.spec["proof"]["file_sha256"].items():
        into[f"file {name}"] = Setting("patches", digest[:12], "spec.json proof.file_sha256")


def settings(run: Run) -> dict[str, Setting]:
    """Name -> setting. Secrets are left out by the run's own redact_keys; ports, paths and addresses do not make runs different."""
    spec = run.spec
    into = {
        "model": Setting("model", spec["model"]["id"], "spec.json model.id"),
        "text checked": Setting("measurement", str(bool(spec["proof"]["text_checked"])), "spec.json proof.text_checked"),
        "KV load failure policy": Setting("measurement", spec["proof"]["kv_load_failure_policy"], "spec.json proof.kv_load_failure_policy"),
        "cluster": Setting("hardware", spec["run"]["cluster"], "spec.json run.cluster"),
        "nodes": Setting("hardware", str(len(spec["nodes"])), "spec.json nodes"),
        "engines that share GPUs": Setting("hardware", run.sharing.pattern or "none", "spec.json engines[].ranks[].gpus"),
        "launcher commit": Setting("code", spec["run"]["git_commit"][:12], "spec.json run.git_commit"),
        "launcher changes": Setting("code", spec["run"]["git_dirty_sha256"][:12] or "none", "spec.json run.git_dirty_sha256"),
    }
    for phase in (spec.get("load") or {}).get("phases", []):
        name = f"load {phase['name']}"
        into[name] = Setting("workload", phase_text(phase), "spec.json load.phases")
        into[f"{name} connections"] = Setting("measurement", phase.get("connection_reuse", "never"), "spec.json load.phases")
        into[f"{name} requests"] = Setting(
            "measurement", f"{phase['requests']} (+{phase.get('warmup_requests', 0)} warm-up)", "spec.json load.phases"
        )
    _engines(run, into)
    _software(run, into)
    for key, value in spec["run"].get("overrides", {}).items():
        into[f"--set {key}"] = Setting("code", str(value), "spec.json run.overrides")
    return into


def fingerprint(found: dict[str, Setting]) -> str:
    """Equal for repetitions: everything but the launcher's own commit, which must not split repetitions of one configuration."""
    body = sorted((k, s.value) for k, s in found.items() if s.kind != "code")
    return hashlib.sha256(json.dumps(body).encode()).hexdigest()[:16]
