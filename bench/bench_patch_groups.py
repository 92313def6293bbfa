"""What the patches cost one decode rank at the size of gemma-4-31B (60 layers, prompts of 32,768 tokens): a handshake, and the
descriptors of one request. Goal for pairs that stock handles: requests within 2 % of stock, and handshakes with the per-region
patch; with both patches a handshake's extra is shown only. Where the patches are needed, the first line is stock with as many
layers whose heads scale alike, manager off.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from bench.bench_patch import GOAL, NIXL, run  # noqa: E402
from tests.envs import PER_GROUP, PER_REGION, engine_python  # noqa: E402

SETS = {"stock": [], "per-region": [PER_REGION], "both": [PER_REGION, PER_GROUP]}
NAMES = {"stock": "stock", "again": "stock to itself", "per-region": "per-region patch", "both": "both patches"}


def package(python: Path) -> str:
    (site,) = (python.parent.parent / "lib").glob("python3*/site-packages")
    return str(site / NIXL)


def main() -> int:
    pythons = {name: engine_python(patches) for name, patches in SETS.items()}
    found = json.loads(run(pythons["both"], "measure_groups.py", package(pythons["stock"]), package(pythons["per-region"])))
    kept, row = True, ""
    for entry in found:
        if entry["row"] != row:
            row = entry["row"]
            print(f"{row}; ratios of neighbours: median (tenth to ninetieth percentile)")
        sliding, full, *_, on = entry["pair"]
        said = f"  {NAMES[entry['kind']]}, {sliding}/{full} heads, manager {'on' if on else 'off'}:"
        for what in ("handshake", "request"):
            ratio, low, high = entry[f"{what}_ratio"]
            said += f" {what} {entry[f'{what}_ms']:.2f} ms, {ratio:.3f} ({low:.2f} to {high:.2f});"
        goals = {"per-region": ("handshake", "request"), "both": ("request",)}.get(entry["kind"], ()) if "manager" in row else ()
        if goals:
            met = all(entry[f"{what}_ratio"][0] <= GOAL for what in goals)
            kept &= met
            said += f" goal {GOAL} ({', '.join(goals)}): {'met' if met else 'MISSED'};"
        print(f"{said} {entry['descriptors']:,} descriptors")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
