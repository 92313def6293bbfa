"""Render recipes for this machine and run their bundles through the project's own runtime, one after the other or all at once.

    python3 -m benchmarks.gpu.run_recipes --gpus 4 --out OUT --together gpu-tiny-p1d2-stock gpu-tiny-p1d2

Prints one line per recipe, its verdict; OUT/runs/<recipe>/ is the archived run. The cluster is clusters/local-gpu.yaml with the
number of GPUs given here. Exit code 0 when every run came to a verdict: an INVALID one is what a stock recipe is for.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

from pdlaunch.node.contracts import Verdict
from pdlaunch.node.process import Child, stop_together, tail


def cluster_file(project: Path, cluster: Path, gpus: int, out: Path) -> Path:
    """A copy of the cluster file, of the same name, with this machine's number of GPUs."""
    text, found = re.subn(r"gpus_per_node: \d+", f"gpus_per_node: {gpus}", (project / cluster).read_text(encoding="utf-8"))
    if found != 1:
        raise SystemExit(f"{cluster}: {found} lines with gpus_per_node, expected one")
    copy = out / cluster.name
    copy.write_text(text, encoding="utf-8")
    return copy


def start(recipe: str, cluster: Path, args: argparse.Namespace) -> Child:
    bundle, run = (args.out / "bundles" / recipe).resolve(), (args.out / "runs" / recipe).resolve()
    run.parent.mkdir(parents=True, exist_ok=True)
    render = [sys.executable, "launch.py", "render", "--recipe", recipe, "--cluster", str(cluster), "--out", str(bundle)]
    bundle.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run([*render, *(word for s in args.set for word in ("--set", s))], cwd=args.project, check=True, stdout=subprocess.DEVNULL)
    argv = [sys.executable, "-m", "node", "run", "--spec", "spec.json", "--run-dir", str(run)]
    return Child(recipe, argv, dict(os.environ), args.out / f"{recipe}.log", cwd=bundle, parent_death=signal.SIGTERM)


def report(child: Child, out: Path, began: float) -> bool:
    path = out / "runs" / child.name / "verdict.json"
    if not path.exists():
        print(f"{child.name}: no verdict\n{tail(child.log, 15)}")
        return False
    verdict = Verdict.read(path)
    print(f"{verdict.line}   ({time.monotonic() - began:.0f} s)")
    for reason in verdict.reasons[:6]:
        print(f"    {reason[:300]}")
    return True


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("recipes", nargs="+")
    parser.add_argument("--gpus", type=int, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--cluster", type=Path, default=Path("clusters/local-gpu.yaml"), help="relative to the project")
    parser.add_argument("--project", type=Path, default=Path(__file__).resolve().parents[2])
    parser.add_argument("--together", action="store_true", help="all at once: for checks, never for figures")
    parser.add_argument("--timeout-s", type=float, default=400.0, help="of each run; all together share one")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    cluster = cluster_file(args.project, args.cluster, args.gpus, args.out.resolve())
    good = True
    for group in [args.recipes] if args.together else [[r] for r in args.recipes]:
        began = time.monotonic()
        children = [start(recipe, cluster, args) for recipe in group]
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
