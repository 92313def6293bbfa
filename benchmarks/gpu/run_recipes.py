"""Run recipes on this machine's GPUs with `launch.py`, one after the other or all at once, and show their verdicts.

    python3 -m benchmarks.gpu.run_recipes --gpus 4 --out OUT --together gpu-tiny-p1d2-stock gpu-tiny-p1d2

OUT/runs/<recipe>/<utc>-<job>/ is the archived run. Exit code 0 when every run came to a verdict: an INVALID one is what a stock
recipe is for.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path

from pdlaunch.node.contracts import Verdict
from pdlaunch.node.process import Child, stop_together, tail


def start(recipe: str, args: argparse.Namespace) -> Child:
    settings = [f"cluster.nodes.gpus_per_node={args.gpus}", f"cluster.results_dir={(args.out / 'runs').resolve()}", *args.set]
    argv = [sys.executable, "-B", "launch.py", "--recipe", recipe, "--cluster", args.cluster, *(w for s in settings for w in ("--set", s))]
    return Child(recipe, argv, dict(os.environ), args.out / f"{recipe}.log", cwd=args.project, parent_death=signal.SIGTERM)


def report(child: Child, out: Path, began: float) -> bool:
    paths = sorted((out / "runs" / child.name).glob("*/verdict.json"))
    if not paths:
        print(f"{child.name}: no verdict\n{tail(child.log, 15)}")
        return False
    verdict = Verdict.read(paths[-1])
    print(f"{verdict.line}   ({time.monotonic() - began:.0f} s)")
    for reason in verdict.reasons[:6]:
        print(f"    {reason[:300]}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", default="local-gpu")
    parser.add_argument("--project", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--together", action="store_true", help="all at once: for checks, never for figures")
    parser.add_argument("--timeout-s", type=float, default=400.0, help="of each run; all together share one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    good = True
    for group in [args.recipes] if args.together else [[r] for r in args.recipes]:
        began = time.monotonic()
        children = [start(recipe, args) for recipe in group]
        try:
            for child in children:
                child.wait(max(1.0, began + args.timeout_s - time.monotonic()))
        finally:
            stop_together([c for c in children if c.poll() is None], 30.0)
        for child in children:
            child.kill_group()
            good &= report(child, args.out, began)
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
