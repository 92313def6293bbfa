"""A program for the tests that behaves badly in one named way. Usage: child.py BEHAVIOUR [ARGUMENT]. It says `up` when it is there."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import resource_tracker, shared_memory


def forever() -> None:
    while True:
        time.sleep(3600)


def main(behaviour: str, argument: str = "") -> int:
    if behaviour == "dies":
        print("\n".join(f"line {n}" for n in range(1, 61)), flush=True)
        return int(argument or 3)
    if behaviour == "signal":
        print("up", flush=True)
        os.kill(os.getpid(), getattr(signal, argument))
    if behaviour == "ignores_term":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if behaviour == "leaves_child":
        code = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('child', flush=True); time.sleep(3600)"
        child = subprocess.Popen([sys.executable, "-c", code], start_new_session=argument == "own_session", stdout=subprocess.PIPE)
        assert child.stdout is not None
        child.stdout.readline()
        print(f"child {child.pid}", flush=True)
    if behaviour == "leaves_shm":
        segment = shared_memory.SharedMemory(create=True, size=4096)
        resource_tracker.unregister(f"/{segment.name}", "shared_memory")  # it would remove the segment itself
        print(f"segment {segment.name}", flush=True)
        with open(argument, "w", encoding="utf-8") as f:  # noqa: PTH123 - as plain as can be
            f.write(segment.name)
        print("up", flush=True)
        forever()
    if behaviour == "shows":
        print(json.dumps({"argument": argument, "env": dict(os.environ), "cwd": os.getcwd()}), flush=True)  # noqa: PTH109
    if behaviour == "prints":
        sys.stdout.buffer.write(argument.encode().decode("unicode_escape").encode("latin-1"))
        sys.stdout.flush()
    print("up", flush=True)
    forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:3]))
