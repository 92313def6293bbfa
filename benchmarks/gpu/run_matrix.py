"""Correctness and transfer rates on the GPUs of one machine, written for any number of them.

    python3 -m benchmarks.gpu.run_matrix --gpus 4 --out OUT correctness realsize

Steps (each with its own deadline; a step that does not fit is reported as not run, never as passed):
  correctness  a small trained model at TP 1, 2, 4 as far as there are GPUs, stock and patched, per attention backend and KV dtype: every
               ordered pair of TP sizes answers recall prompts; tokens against the aggregated answer of TP 1, bytes against the planner's.
  realsize     gemma-4-26B-A4B and gemma-4-31B shapes with random weights: TP 2 -> TP 4 against TP 4 -> TP 4 and TP 2 -> TP 2, transfer
               time and rate, TTFT in its parts, and the link's limit measured beside them.

Every engine is a plain `vllm serve` that is producer and consumer at once, and two_step.py is the client: no Dynamo, no router. The recipes
gpu-*.yaml run the same pairs through the project's own runtime and Dynamo (runtime.sh).
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from pdlaunch.node.gpus import NoGpu, run_smi
from pdlaunch.node.http import HttpError
from pdlaunch.node.process import StageFailed

from . import correctness, realsize
from .servers import Fleet

STEPS: dict[str, Callable[[Fleet, argparse.Namespace, dict[str, Any]], None]] = {
    "correctness": correctness.step,
    "realsize": realsize.step,
}


def machine() -> dict[str, Any]:
    """What the figures were measured on, in words that mean something to a reader elsewhere."""
    facts: dict[str, Any] = {"date": datetime.now(UTC).strftime("%Y-%m-%d"), "cores": os.cpu_count()}
    try:
        facts["gpus"] = run_smi(["nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader"]).splitlines()
        facts["topology"] = run_smi(["nvidia-smi", "topo", "-m"]).splitlines()[:12]
    except NoGpu as e:
        facts["gpus"] = [str(e)]
    return facts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("steps", nargs="+", choices=list(STEPS))
    parser.add_argument("--gpus", type=int, required=True, help="GPUs to use; on CPU the largest TP size")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--out", type=Path, required=True, help="results.json, tables.txt and logs/ (must not hold results yet)")
    parser.add_argument("--project", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--envs", type=Path, help="folder of the environments; default: PROJECT/.envs")
    parser.add_argument("--model", type=Path, default=Path("models/gemma4-recall-4x1"), help="small trained model, relative to the project")
    parser.add_argument(
        "--variants",
        nargs="+",
        default=["stock/TRITON_ATTN/auto", "per-region/TRITON_ATTN/auto"],
        help="ENVIRONMENT/BACKEND/KV_DTYPE[/hybrid] of the correctness step",
    )
    parser.add_argument("--env-prefix", default="gpu", help="environments are .envs/PREFIX-stock and .envs/PREFIX-per-region")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument(
        "--pairs", nargs="*", default=[], metavar="P:D", help="pairs of TP sizes; none: every ordered pair of the sizes that fit"
    )
    parser.add_argument("--prompts", type=int, default=9)
    parser.add_argument("--prompt-tokens", type=int, nargs="+", default=[800])
    parser.add_argument("--sizes", nargs="*", default=[], help="shapes of the realsize step; none: those that fit the number of GPUs")
    parser.add_argument("--settings", nargs="*", default=[], help="settings of the realsize step, such as per-region-b256; none: all")
    parser.add_argument(
        "--measure-s", type=float, default=900.0, help="time for the samples of the realsize step; what is left out is counted"
    )
    parser.add_argument("--layers", type=int, default=0, help="layers of the real shapes; 0: as published")
    parser.add_argument("--lengths", type=int, nargs="+", default=[1024, 12500, 32000], help="prompt tokens of the realsize step")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--start-s", type=float, default=240.0, help="deadline for all servers of a step to be ready")
    parser.add_argument("--no-copy-limit", action="store_true")
    args = parser.parse_args()
    args.project = args.project.resolve()
    args.out.mkdir(parents=True, exist_ok=True)
    if (args.out / "results.json").exists():
        parser.error(f"{args.out} holds results already")
    results: dict[str, Any] = {
        "machine": machine(),
        "command": "python3 -m benchmarks.gpu.run_matrix " + " ".join(sys.argv[1:]),
        "steps": {},
    }
    failed = 0
    with Fleet(args.envs or args.project / ".envs", args.out, args.device) as fleet:
        for name in args.steps:
            began = time.monotonic()
            record: dict[str, Any] = {"state": "not run"}
            results["steps"][name] = record
            try:
                STEPS[name](fleet, args, record)
                record["state"] = "ran"
            except (StageFailed, HttpError, OSError, ValueError, KeyError, RuntimeError) as e:
                record["state"], record["error"] = "stopped", "".join(traceback.format_exception(e))[-3000:]
                failed += 1
            finally:
                fleet.stop()
                record["wall_s"] = round(time.monotonic() - began, 1)
                (args.out / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    text = "\n\n".join(
        table for name in args.steps for table in {"correctness": correctness, "realsize": realsize}[name].tables(results["steps"][name])
    )
    (args.out / "tables.txt").write_text(text + "\n", encoding="utf-8")
    print(text)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
