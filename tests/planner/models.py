"""Models that the planner's tests read: committed configs, each with its source inside."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from pdlaunch.planner.capacity import Capacity, Layout, capacity, plan_layout
from pdlaunch.planner.config import load_config
from pdlaunch.planner.families import read_model
from pdlaunch.planner.layers import Model
from pdlaunch.planner.shape import GIB, RoleShape

CONFIGS = Path(__file__).with_name("configs")
DATA = Path(__file__).with_name("data")
GEMMA4 = CONFIGS.parents[2] / "models" / "configs" / "gemma-4-31b-it.json"


@cache
def model(name: str) -> Model:
    path = GEMMA4 if name == "gemma-4-31b-it" else CONFIGS / f"{name}.json"
    return read_model(load_config(path), str(path))


def layout(name: str, **changes: object) -> Layout:
    return plan_layout(model(name), RoleShape().with_changes(**changes))


def cache_of(name: str, kv_gib: float, **changes: object) -> Capacity:
    return capacity(layout(name, **changes), int(kv_gib * GIB))


QWEN_POST = {
    "max_model_len": 10240,
    "kv_cache_dtype": "fp8",
    "mamba_ssm_cache_dtype": "bfloat16",
    "prefix_caching": False,
    "backend": "FLASHINFER",
}
"""Engine arguments of the published GB300 recipes that decide the cache."""
