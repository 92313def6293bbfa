"""Print the cores that one idle NIXL agent keeps busy, over two seconds of wall time; NIXL_PTHR_DELAY_US as set."""

from __future__ import annotations

import threading
import time

from nixl._api import nixl_agent, nixl_agent_config

SECONDS = 2.0

agent = nixl_agent("idle", nixl_agent_config(backends=["UCX"]))
threading.Event().wait(0.5)
cpu, wall = time.process_time(), time.monotonic()
threading.Event().wait(SECONDS)
print((time.process_time() - cpu) / (time.monotonic() - wall))
