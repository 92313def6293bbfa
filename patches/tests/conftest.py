"""Run by the engine environment's own Python; self-contained, nothing of the launcher is imported."""

from __future__ import annotations

import os
import sys
from pathlib import Path

# Set before vLLM is imported: no network, no thread pinning, loopback only.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_CPU_OMP_THREADS_BIND", "nobind")
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("VLLM_HOST_IP", "127.0.0.1")
os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")

sys.path.insert(0, str(Path(__file__).parent))
