"""Flags and variables: which are legal (the pinned parsers' own lists in data/), and which the launcher owns.

Existing launchers let a misspelt or owned flag through; one then serves TP8 where TP4 was asked for.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pdlaunch.errors import RecipeError, Where
from pdlaunch.nosecrets import is_secret_variable
from pdlaunch.yamlfile import nearest

DATA = Path(__file__).parent / "data"
_LAUNCHER = "the launcher sets it; leave it out"


def _engine_arg(name: str) -> str:
    return f"engine_args.{name}"


OWNED_FLAGS = {
    "--model": "model.id",
    "--model-path": "model.id",
    "--model-name": "model.served_name",
    "--served-model-name": "model.served_name",
    "--tensor-parallel-size": "engines.<role>.tensor_parallel",
    "--pipeline-parallel-size": "engines.<role>.pipeline_parallel",
    "--data-parallel-size": "engines.<role>.data_parallel",
    "--dtype": _engine_arg("dtype"),
    "--max-model-len": _engine_arg("max_model_len"),
    "--block-size": _engine_arg("block_size"),
    "--kv-cache-dtype": _engine_arg("kv_cache_dtype"),
    "--disable-hybrid-kv-cache-manager": _engine_arg("hybrid_kv_cache_manager"),
    "--enable-prefix-caching": _engine_arg("prefix_caching"),
    "--no-enable-prefix-caching": _engine_arg("prefix_caching"),
    "--enforce-eager": _engine_arg("enforce_eager"),
    "--async-scheduling": _engine_arg("async_scheduling"),
    "--gpu-memory-utilization": _engine_arg("gpu_memory_utilization"),
    "--kv-cache-memory-bytes": _engine_arg("kv_cache_memory_mib"),
    "--max-num-seqs": _engine_arg("max_num_seqs"),
    "--max-num-batched-tokens": _engine_arg("max_num_batched_tokens"),
    "--attention-backend": _engine_arg("attention_backend"),
    "--quantization": _engine_arg("quantization"),
    "--load-format": _engine_arg("load_format"),
    "--seed": _engine_arg("seed"),
    "--trust-remote-code": _engine_arg("trust_remote_code"),
    "--dyn-tool-call-parser": _engine_arg("tool_call_parser"),
    "--tool-call-parser": _engine_arg("tool_call_parser"),
    "--enable-auto-tool-choice": _engine_arg("tool_call_parser"),
    "--dyn-reasoning-parser": _engine_arg("reasoning_parser"),
    "--reasoning-parser": _engine_arg("reasoning_parser"),
    "--speedup-ratio": _engine_arg("mocker_speedup"),
    "--num-gpu-blocks-override": "engine_args.mocker_kv_blocks (mocker) or engine_args.kv_cache_memory_mib (vLLM)",
    "--kv-transfer-config": "kv_connector_extra_config",
}
"""Flag -> key of the recipe that sets it."""

LAUNCHER_FLAGS = frozenset(
    {
        "--disaggregation-mode",
        "--is-prefill-worker",
        "--is-decode-worker",
        "--namespace",
        "--endpoint",
        "--discovery-backend",
        "--request-plane",
        "--response-plane",
        "--event-plane",
        "--nnodes",
        "--node-rank",
        "--master-addr",
        "--master-port",
        "--headless",
        "--connector",
        "--host",
        "--port",
        "--uds",
        "--kv-events-config",
        "--data-parallel-size-local",
        "--data-parallel-rank",
        "--data-parallel-start-rank",
        "--data-parallel-address",
        "--data-parallel-rpc-port",
        "--data-parallel-backend",
        "--data-parallel-external-lb",
        "--data-parallel-hybrid-lb",
        "--data-parallel-multi-port-external-lb",
        "--distributed-executor-backend",
        "--router-mode",
        "--bootstrap-ports",
        "--num-workers",
        "--hf-token",
        "--help",
        "--version",
        "--benchmark-mode",
        "--ec-transfer-config",
        "--device-ids",
    }
)
"""Flags with no key: the launcher decides them from the placement, or they would change what is measured."""

FLAG_FILE = "--config"
"""vLLM's FlexibleArgumentParser replaces it by the flags of a file before it parses, so dynamo.vllm takes it without listing it."""

OWNED_ENV = {
    "NIXL_PTHR_DELAY_US": "nixl_progress_thread_delay_us",
    "VLLM_CPU_KVCACHE_SPACE": "engine_args.kv_cache_memory_mib",
    "VLLM_ATTENTION_BACKEND": "engine_args.attention_backend",
}
LAUNCHER_ENV = frozenset(
    {
        "ETCD_ENDPOINTS",
        "NATS_SERVER",
        "CUDA_VISIBLE_DEVICES",
        "VLLM_NIXL_SIDE_CHANNEL_HOST",
        "VLLM_NIXL_SIDE_CHANNEL_PORT",
        "VLLM_HOST_IP",
        "VLLM_PORT",
        "PROMETHEUS_MULTIPROC_DIR",
        "PYTHONPATH",
        "PYTHONHOME",
        "LD_PRELOAD",
        "TMPDIR",
        "HF_HUB_OFFLINE",
        "TRANSFORMERS_OFFLINE",
        "VLLM_NO_USAGE_STATS",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "WORLD_SIZE",
        "LOCAL_RANK",
    }
)
_FREE_DYN_ENV = frozenset({"DYN_LOG", "DYN_LOGGING_CONSOLE_FORMAT", "DYN_LOGGING_JSONL", "DYN_LOG_USE_LOCAL_TZ"})


@dataclass(frozen=True)
class FlagList:
    program: str
    versions: dict[str, str]
    by_name: dict[str, dict[str, Any]]
    """Every spelling -> {names, values, choices, env}."""

    def primary(self, name: str) -> str:
        return str(self.by_name[name]["names"][0])


@functools.cache
def flag_list(program: str) -> FlagList:
    """The committed list of dynamo.vllm, dynamo.mocker, dynamo.frontend or vllm.serve."""
    data = json.loads((DATA / f"{program}.json").read_text(encoding="utf-8"))
    return FlagList(program, data["versions"], {name: flag for flag in data["flags"] for name in flag["names"]})


def check_args(program: str, words: tuple[str, ...], where: list[Where]) -> None:
    """RecipeError on an unknown, misspelt, abbreviated, owned or malformed flag; where[i] is the place of words[i]."""
    flags, i = flag_list(program), 0
    while i < len(words):
        word = words[i]
        if not word.startswith("-") or word in ("-", "--"):
            raise RecipeError(
                f"{word!r} is no flag",
                where=where[i],
                rule=f"flags of {program}, each word its own item",
                hint="a value must follow its flag; a flag with spaces must be split into words",
            )
        name, attached = _resolve(flags, word, where[i])
        _refuse_owned(flags, name, word, where[i])
        i += 1 + _values_after(flags, name, attached, words[i + 1 :], where[i])


def given(program: str, words: tuple[str, ...], where: list[Where]) -> dict[str, str]:
    """First name of each flag -> its value, attached or the next word ('' without one), of words that check_args has passed."""
    flags, i, found = flag_list(program), 0, {}
    while i < len(words):
        name, attached = _resolve(flags, words[i], where[i])
        following = _values_after(flags, name, attached, words[i + 1 :], where[i])
        found[flags.primary(name)] = attached if attached is not None else words[i + 1] if following else ""
        i += 1 + following
    return found


def _resolve(flags: FlagList, word: str, where: Where) -> tuple[str, str | None]:
    """The flag that a word names and the value attached to it (--a=1, -tp4, --json.key)."""
    head, equals, value = word.partition("=")
    attached = value if equals else None
    if head == FLAG_FILE and "vllm" in flags.program:
        raise RecipeError(
            f"{word!r} is vLLM's option for a file of further flags",
            where=where,
            rule="every flag is written in the recipe, where it is checked and archived",
            hint="write the flags of that file as keys of engine_args and as extra_args",
        )
    base = head.partition(".")[0]
    for candidate in (head, base):
        spelled = candidate.replace("_", "-") if candidate.startswith("--") else candidate
        if spelled in flags.by_name:
            return spelled, attached
    if not word.startswith("--"):
        short = [n for n in flags.by_name if not n.startswith("--") and word.startswith(n)]
        if short:
            longest = max(short, key=len)
            return longest, word[len(longest) :].removeprefix("=")
        raise RecipeError(f"unknown flag {word!r} of {flags.program}", where=where, rule=_rule(flags), hint=nearest(word, flags.by_name))
    spelled = base.replace("_", "-")
    fits = sorted(n for n in flags.by_name if n.startswith(spelled))
    primaries = {flags.primary(n) for n in fits}
    if len(primaries) == 1:
        _refuse_owned(flags, fits[0], word, where)
        raise RecipeError(f"{word!r} abbreviates {fits[0]}", where=where, rule="flags are written in full", hint=f"write {fits[0]}")
    if primaries:
        raise RecipeError(f"{word!r} could be {', '.join(fits[:6])}", where=where, rule="flags are written in full")
    raise RecipeError(
        f"unknown flag {word!r} of {flags.program}",
        where=where,
        rule=_rule(flags),
        hint=nearest(spelled, flags.by_name) or f"pdlaunch/data/{flags.program}.json lists the legal ones",
    )


def _rule(flags: FlagList) -> str:
    return "flags of " + ", ".join(f"{k} {v}" for k, v in flags.versions.items()) + f" ({flags.program})"


def _refuse_owned(flags: FlagList, name: str, word: str, where: Where) -> None:
    spellings = set(flags.by_name[name]["names"])
    key = next((OWNED_FLAGS[s] for s in flags.by_name[name]["names"] if s in OWNED_FLAGS), None)
    if key is not None:
        raise RecipeError(
            f"{word!r} sets {flags.primary(name)}, which the launcher owns",
            where=where,
            rule="owned flags have a key",
            hint=f"use the key {key}",
        )
    if spellings & LAUNCHER_FLAGS:
        raise RecipeError(
            f"{word!r} sets {flags.primary(name)}, which the launcher owns",
            where=where,
            rule="addresses, ports, roles and ranks come from the placement",
            hint=_LAUNCHER,
        )


def _values_after(flags: FlagList, name: str, attached: str | None, rest: tuple[str, ...], where: Where) -> int:
    """How many of the following words are values of the flag."""
    flag = flags.by_name[name]
    values, choices = flag["values"], flag["choices"]
    following = 0
    while following < len(rest) and not _looks_like_flag(flags, rest[following]):
        following += 1
    if values == "0":
        if attached is not None:
            raise RecipeError(f"{name} takes no value, found {attached!r}", where=where, rule=f"{name} alone switches it on")
        return 0
    given = [attached] if attached is not None else list(rest[:following])
    if (values == "1" and attached is None) or (values == "?" and attached is None):
        given = given[:1]
    if values in ("1", "+") and not given:
        raise RecipeError(f"{name} needs a value", where=where, rule=f"{name} VALUE, as two items or as {name}=VALUE")
    for value in given:
        if choices and value not in choices:
            raise RecipeError(f"{name} {value!r}", where=where, rule=f"one of {', '.join(choices)}", hint=nearest(value, choices))
    return 0 if attached is not None else len(given)


def _looks_like_flag(flags: FlagList, word: str) -> bool:
    if not word.startswith("-") or word == "-":
        return False
    return not word[1:].replace(".", "", 1).isdigit()


def check_env(programs: tuple[str, ...], env: dict[str, str], where: dict[str, Where]) -> None:
    """RecipeError on a variable that the launcher owns, that sets an owned flag, or whose name says that it holds a secret."""
    by_env = {flag["env"]: flag for program in programs for flag in flag_list(program).by_name.values() if flag["env"]}
    for name in env:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise RecipeError(f"{name!r} is no name of a variable", where=where[name], rule="letters, digits and _, no digit first")
        key = OWNED_ENV.get(name)
        if key is None and name in by_env:
            spellings = by_env[name]["names"]
            key = next((OWNED_FLAGS[s] for s in spellings if s in OWNED_FLAGS), None)
            if key is None and set(spellings) & LAUNCHER_FLAGS:
                key = ""
            elif key is None:
                raise RecipeError(
                    f"the variable {name} sets {spellings[0]}",
                    where=where[name],
                    rule="engine flags are written as flags",
                    hint=f"use extra_args: [{spellings[0]}, ...]",
                )
        if key is None and (name in LAUNCHER_ENV or (name.startswith("DYN_") and name not in _FREE_DYN_ENV)):
            key = ""
        if key is not None:
            raise RecipeError(
                f"the variable {name} is owned by the launcher",
                where=where[name],
                rule="owned variables have a key" if key else "addresses, ports and planes come from the launcher",
                hint=f"use the key {key}" if key else _LAUNCHER,
            )
        if is_secret_variable(name):
            raise RecipeError(
                f"the variable {name} looks like a secret",
                where=where[name],
                rule="recipes and cluster files are archived: no secrets",
                hint="put it into the site's own environment",
            )
