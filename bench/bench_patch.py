"""The patches' own cost: handshake and descriptors against stock for uniform models, bytes and descriptors for mixed heads,
and the cores of an idle NIXL agent. Goals: handshake within 2 % of stock; bytes equal to the minimum that decode must hold;
a read has no more descriptors than regions x blocks.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.envs import PER_REGION, engine_python  # noqa: E402

NIXL = "vllm/distributed/kv_transfer/kv_connector/v1/nixl"
TESTS = ROOT / "patches" / "tests"
GOAL = 1.02


def run(python: Path, *arguments: str, **variables: str) -> str:
    environment = {**os.environ, **variables}
    done = subprocess.run([str(python), *arguments], cwd=TESTS, env=environment, capture_output=True, text=True, timeout=900, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(arguments)} failed:\n{done.stderr[-3000:]}")
    return done.stdout


def main() -> int:
    stock, patched = engine_python([]), engine_python([PER_REGION])
    (site,) = (stock.parent.parent / "lib").glob("python3*/site-packages")
    found = json.loads(run(patched, "measure_patch.py", str(site / NIXL)))
    kept = True
    print("handshake and descriptors, uniform model (32 layers x 8 KV heads, 4096 blocks), CPU time of one decode rank without NIXL's own")
    for row in found["handshakes"]:
        (ratio, low, high), (itself, *_) = row["ratio"], row["stock_to_itself"]
        met = ratio <= GOAL
        kept &= met
        print(
            f"  {row['pair']}: stock {row['stock_ms']:.2f} ms, patched {row['patched_ms']:.2f} ms; ratio of neighbours, median "
            f"{ratio:.3f} ({low:.2f} to {high:.2f}), stock to itself {itself:.3f}, goal {GOAL}: {'met' if met else 'MISSED'}"
        )
    print("mixed heads, 3 blocks of 64 tokens, 12 layers")
    for row in found["transfers"]:
        exact = row["bytes"] == row["minimum_bytes"] and row["wrong_blocks"] == 0
        few = row["descriptors_of_largest_read"] <= row["regions_x_blocks"]
        kept &= exact and few
        print(
            f"  {row['heads']} {row['pair']}: {row['bytes']:,} bytes, minimum {row['minimum_bytes']:,}; largest read "
            f"{row['descriptors_of_largest_read']} descriptors of {row['regions_x_blocks']}: {'met' if exact and few else 'MISSED'}"
        )
    cpu = {"UCX_TLS": "tcp,self,sm,cma", "UCX_NET_DEVICES": "lo"}
    busy = {us: float(run(stock, "measure_progress_thread.py", NIXL_PTHR_DELAY_US=us, **cpu).split()[-1]) for us in ("0", "10000")}
    print(f"idle NIXL agent: {busy['0']:.2f} cores at NIXL_PTHR_DELAY_US=0 (stock), {busy['10000']:.3f} at 10000")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
