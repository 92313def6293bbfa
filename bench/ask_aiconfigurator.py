"""Runs in an environment with aiconfigurator 0.12: its bytes per sequence on one GPU, for a model folder, TP sizes and a length."""

from __future__ import annotations

import json
import logging
import sys
import time

start = time.perf_counter()
logging.disable(logging.WARNING)

from aiconfigurator_core.sdk.common import KVCacheQuantMode  # noqa: E402
from aiconfigurator_core.sdk.config import ModelConfig  # noqa: E402
from aiconfigurator_core.sdk.models import get_model  # noqa: E402

imported = time.perf_counter()
folder, tokens = sys.argv[1], int(sys.argv[2])
found = {}
for tp in map(int, sys.argv[3:]):
    before = time.perf_counter()
    shape = ModelConfig(tp_size=tp, moe_tp_size=tp, moe_ep_size=1, kvcache_quant_mode=KVCacheQuantMode.bfloat16)
    model = get_model(folder, shape, "vllm")
    found[tp] = {"mib": model.get_kvcache_bytes_per_sequence(tokens) / (1 << 20), "build_s": time.perf_counter() - before}
print(json.dumps({"import_s": imported - start, "tp": found}))
