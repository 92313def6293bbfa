"""Print, as JSON, what the per-region patch costs: run by a patched engine environment, told where stock's package is.

Both versions of vLLM's nixl package live in this one process and are measured in turn, so that the ratio does not
depend on what else the machine does.
"""

from __future__ import annotations

import gc
import importlib.util
import json
import random
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

import conftest  # noqa: F401 - the environment of vLLM's import

PACKAGE = "vllm.distributed.kv_transfer.kv_connector.v1.nixl"
# A handshake takes 1 ms at decode TP of at least prefill's and 57 ms below it; 40 rounds of 1 ms differ by 5 % among themselves.
ROUNDS = {(4, 8): 400, (8, 8): 400, (8, 4): 40}
# A small serving pool: 4,096 blocks of 32 layers are 131,072 descriptors.
BLOCKS = 4096


def load_pair(name: str, folder: Path) -> ModuleType:
    """The harness over the nixl package in `folder`, with classes of its own."""
    for module in [m for m in sys.modules if m == PACKAGE or m.startswith(f"{PACKAGE}.")]:
        del sys.modules[module]
    spec = importlib.util.spec_from_file_location(PACKAGE, folder / "__init__.py", submodule_search_locations=[str(folder)])
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules[PACKAGE] = package
    spec.loader.exec_module(package)
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name("pair.py"))
    assert spec is not None and spec.loader is not None
    made = importlib.util.module_from_spec(spec)
    sys.modules[name] = made
    spec.loader.exec_module(made)
    return made


def uncheck(agent: Any) -> None:
    """Descriptor lists are taken unread: only vLLM's own work is measured."""
    ids = iter(range(1, 1 << 30))
    agent.get_xfer_descs = lambda descs, mem_type: descs
    agent.prep_xfer_dlist = lambda name, descs: next(ids)
    agent.release_dlist_handle = lambda handle: None


class Handshake:
    """One uniform pair: what a decode rank spends on taking a peer in, over ZeroMQ and up to NIXL's calls."""

    def __init__(self, module: ModuleType, p: int, d: int) -> None:
        geometry = module.Geometry(8, None, layers=32, head_dim=4)
        settings = module.Settings(block_size=32, num_blocks=BLOCKS)
        self.made = module.Pair(geometry, p, d, settings, settings)
        self.worker, self.source = self.made.decode.workers[0], self.made.prefill
        self.source.listen()
        uncheck(self.worker.nixl_wrapper)
        self.p = p

    def once(self) -> float:
        """CPU seconds of one handshake with every source rank: query, metadata, checks, descriptor lists."""
        started = time.process_time()
        self.worker._nixl_handshake("127.0.0.1", self.source.port, self.p, "prefill")
        spent = time.process_time() - started
        self.worker._remote_agents["prefill"] = {}
        self.worker._cleanup_remote_engine("prefill", log_eviction=False)
        self.worker.src_xfer_handles_by_tp_ratio.clear()
        return spent


def shuffled(subjects: Iterable[Any]) -> list[Any]:
    """In any order: with a fixed one, or one that turns round, some would always follow themselves and find a warm cache."""
    return random.sample(list(subjects), k=len(list(subjects)))


def spread(ours: list[float], theirs: list[float]) -> list[float]:
    """Of the ratios of neighbours: median, tenth and ninetieth percentile."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    tenths = statistics.quantiles(ratios, n=10)
    return [statistics.median(ratios), tenths[0], tenths[-1]]


def handshakes(stock: Path, patched: Path) -> list[dict[str, Any]]:
    # "again" is stock against itself: what the machine adds to a ratio.
    modules = {name: load_pair(f"pair_{name}", folder) for name, folder in (("stock", stock), ("again", stock), ("patched", patched))}
    rows = []
    gc.collect()
    gc.disable()
    for (p, d), rounds in ROUNDS.items():
        subjects = {name: Handshake(module, p, d) for name, module in modules.items()}
        times: dict[str, list[float]] = {name: [] for name in subjects}
        for _ in range(rounds):
            for name in shuffled(subjects):
                times[name].append(subjects[name].once())
        best = {name: min(values) for name, values in times.items()}
        rows.append(
            {
                "pair": f"P{p} -> D{d}",
                "stock_ms": 1000 * best["stock"],
                "patched_ms": 1000 * best["patched"],
                "ratio_of_best": best["patched"] / best["stock"],
                "ratio": spread(times["patched"], times["stock"]),
                "stock_to_itself": spread(times["again"], times["stock"]),
            }
        )
        for subject in subjects.values():
            subject.made.close()
    gc.enable()
    return rows


def transfers(patched: Path) -> list[dict[str, Any]]:
    module = load_pair("pair_patched", patched)
    rows = []
    for sliding, full in ((16, 4), (8, 2), (4, 1)):
        geometry = module.Geometry(sliding, full, layers=12)
        for p, d in ((1, 8), (4, 8), (8, 4), (8, 1)):
            with module.pair(geometry, p, d) as made:
                made.request(192)
                made.run()
                wrong = len(made.differences())
                reads = made.network.reads
            rows.append(
                {
                    "heads": f"{sliding}/{full}",
                    "pair": f"P{p} -> D{d}",
                    "bytes": sum(r.nbytes for r in reads),
                    "minimum_bytes": geometry.minimum_bytes(d, 192),
                    "descriptors_of_largest_read": max(r.descriptors for r in reads),
                    "regions_x_blocks": geometry.layers * 3,
                    "wrong_blocks": wrong,
                }
            )
    return rows


if __name__ == "__main__":
    stock_folder = Path(sys.argv[1])
    import vllm.distributed.kv_transfer.kv_connector.v1.nixl as installed

    installed_folder = Path(installed.__file__).parent
    json.dump({"handshakes": handshakes(stock_folder, installed_folder), "transfers": transfers(installed_folder)}, sys.stdout)
