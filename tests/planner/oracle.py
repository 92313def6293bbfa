"""The planner's side of the oracle test: one long-lived vLLM process, asked over a pipe, and the comparison of its answers."""

from __future__ import annotations

import json
import os
import select
import subprocess
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

from pdlaunch.errors import PlanError
from pdlaunch.planner.capacity import capacity, plan_layout
from pdlaunch.planner.families import read_model
from pdlaunch.planner.shape import RoleShape
from tests.envs import engine_python

START_S = 180.0
ANSWER_S = 60.0

# What the planner says when it refuses, and what vLLM says then. A refusal for another reason is a disagreement.
REASONS = (
    ("attention heads", "attention heads"),
    ("hybrid KV cache manager off", "Failed to promote local KV cache specs"),
    ("usable", "KV cache is needed, which is larger than the available"),
    ("usable", "No available memory for the cache blocks"),
    ("speculative tokens", "Unsupported speculative method"),
    ("do not divide", "is not divisible by"),
    ("Mamba groups do not divide", "If tensor parallel world size does not divide num_groups, then num_groups must equal 1"),
    ("Mamba heads do not divide", "Tensor parallel world size must divide num heads"),
    ("float16", "does not support float16"),
    ("must be divisible by the model's", "must be divisible by n_predict"),
    ("does not copy KV heads", "ZeroDivisionError"),
    ("gated DeltaNet value heads do not divide", "AssertionError: "),
    ("reads the cache of layer", "Specified KV sharing target layer"),
    ("neither divide", ""),
)


class Oracle:
    """vLLM in a process of its own. PLANNER_ORACLE_PYTHON names another environment, to see what another version changes."""

    def __init__(self) -> None:
        python = os.environ.get("PLANNER_ORACLE_PYTHON") or str(engine_python([]))
        self._log: IO[str] = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [python, str(Path(__file__).with_name("oracle_server.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            bufsize=0,
        )
        self._pending = b""
        self.version = str(self._line(START_S)["vllm"])

    def _line(self, timeout_s: float) -> dict[str, Any]:
        output = self._process.stdout
        assert output is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._pending:
            ready, _, _ = select.select([output], [], [], max(0.0, deadline - time.monotonic()))
            chunk = os.read(output.fileno(), 1 << 16) if ready else b""
            if not chunk:
                self._log.seek(0)
                raise RuntimeError(f"vLLM gave no answer within {timeout_s} s:\n{self._log.read()[-4000:]}")
            self._pending += chunk
        line, _, self._pending = self._pending.partition(b"\n")
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, config: Mapping[str, Any], shape: RoleShape, available_bytes: tuple[int, ...]) -> dict[str, Any]:
        assert self._process.stdin is not None
        case = {"config": config, "shape": asdict(shape), "available_bytes": available_bytes}
        self._process.stdin.write((json.dumps(case) + "\n").encode())
        return self._line(ANSWER_S)

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(20)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._log.close()


def planned(config: Mapping[str, Any], shape: RoleShape, available_bytes: tuple[int, ...]) -> dict[str, Any]:
    """The planner's answer in the oracle's form."""
    try:
        layout = plan_layout(read_model(config), shape)
        cache = capacity(layout, available_bytes)
    except PlanError as error:
        return {"refused": str(error)}
    return {
        "block_size": layout.choice.block_size,
        "groups": [{"block_size": g.first.block_size, "layers": len(g.layers), "page_bytes": g.page_bytes} for g in layout.groups],
        "num_blocks": cache.num_blocks,
        "tokens": cache.tokens,
        "concurrency": cache.concurrency,
        "max_in_flight_tokens": shape.max_in_flight_tokens,
        "stage_block_bytes": list(layout.stage_block_bytes),
    }


def difference(mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> str:
    """Empty when both agree exactly, else what differs."""
    if "refused" in mine or "refused" in theirs:
        ours, vllms = mine.get("refused"), theirs.get("refused")
        if ours and vllms and any(a in ours and b in vllms for a, b in REASONS):
            return ""
        return f"planner: {ours or 'accepts'}\nvLLM: {vllms or 'accepts'}\n{theirs.get('trace', '')}"
    vllms_groups = [{key: group[key] for key in ("block_size", "layers", "page_bytes")} for group in theirs["groups"]]
    compared = {**theirs, "groups": vllms_groups}
    return "\n".join(f"{key}: planner {mine[key]}, vLLM {compared[key]}" for key in mine if mine[key] != compared[key])
