"""What the GPUs of this node hold and how busy they are: nvidia-smi, or a DCGM exporter. A node without GPUs is said to have none."""

from __future__ import annotations

import csv
import re
import subprocess
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .contracts import GPU_CSV_HEADER, utc_now
from .http import HttpError, get

SMI_TIMEOUT_S = 20.0
LEFTOVER_MIB = 2048
"""A GPU with more than this in use belongs to somebody: a driver with persistence and MPS idle well below 1 GiB."""
SAMPLE_EVERY_S = 2.0
_DCGM = re.compile(r'^(DCGM_FI_DEV_GPU_UTIL|DCGM_FI_DEV_FB_USED)\{([^}]*)\}\s+([0-9.eE+-]+)')
_LABEL = re.compile(r'(\w+)="([^"]*)"')

Run = Callable[[Sequence[str]], str]


class NoGpu(Exception):
    """There is no GPU to look at, or no way to look; the message says which."""


@dataclass(frozen=True)
class GpuSample:
    gpu: str
    """Index on this node."""
    uuid: str
    utilisation_pct: float
    memory_used_mib: float


def run_smi(argv: Sequence[str]) -> str:
    """Standard output of nvidia-smi; NoGpu when it is absent, fails or does not answer in 20 s."""
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=SMI_TIMEOUT_S, check=False, stdin=subprocess.DEVNULL)
    except FileNotFoundError:
        raise NoGpu("no nvidia-smi: no GPU on this node") from None
    except (OSError, subprocess.TimeoutExpired) as e:
        raise NoGpu(f"nvidia-smi cannot be used: {e}") from e
    if done.returncode != 0:
        raise NoGpu(f"nvidia-smi ended with {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout


def _rows(run: Run, query: str, fields: str) -> list[list[str]]:
    text = run(["nvidia-smi", f"--query-{query}={fields}", "--format=csv,noheader,nounits"])
    return [[cell.strip() for cell in row] for row in csv.reader(text.splitlines()) if row]


def _number(cell: str) -> float:
    try:
        return float(cell)
    except ValueError:  # "[N/A]" and "[Not Supported]"
        return 0.0


def inventory(run: Run = run_smi) -> tuple[list[dict[str, Any]], list[dict[str, Any]], str]:
    """(GPUs, compute processes, "") of this node, or ([], [], reason)."""
    try:
        gpus = [{"index": int(_number(r[0])), "name": r[1], "uuid": r[2], "memory_used_mib": _number(r[3]),
                 "memory_total_mib": _number(r[4])} for r in _rows(run, "gpu", "index,name,uuid,memory.used,memory.total") if len(r) == 5]
        processes = [{"gpu_uuid": r[0], "pid": int(_number(r[1])), "memory_used_mib": _number(r[2])}
                     for r in _rows(run, "compute-apps", "gpu_uuid,pid,used_memory") if len(r) == 3]
    except NoGpu as e:
        return [], [], str(e)
    return gpus, processes, "" if gpus else "nvidia-smi lists no GPU"


def assigned(gpus: Sequence[dict[str, Any]], visible: str | None) -> list[dict[str, Any]]:
    """Those that CUDA_VISIBLE_DEVICES names by index or UUID (or its beginning); all when it is unset."""
    if visible is None:
        return list(gpus)
    wanted = [w.strip() for w in visible.split(",") if w.strip()]
    return [g for g in gpus if any(w == str(g["index"]) or (w.startswith("GPU-") and g["uuid"].startswith(w)) for w in wanted)]


def leftovers(gpus: Sequence[dict[str, Any]], processes: Sequence[dict[str, Any]], limit_mib: float = LEFTOVER_MIB) -> list[str]:
    """One line for each GPU that is not free: it has a compute process, or more memory in use than limit_mib."""
    found = []
    for gpu in gpus:
        pids = [p["pid"] for p in processes if p["gpu_uuid"] == gpu["uuid"]]
        if pids or gpu["memory_used_mib"] > limit_mib:
            used = f"{gpu['memory_used_mib']:.0f} MiB in use, processes: {pids or 'none visible'}"
            found.append(f"GPU {gpu['index']} ({gpu['uuid']}) has {used}")
    return found


def sample_smi(run: Run = run_smi) -> list[GpuSample]:
    rows = _rows(run, "gpu", "index,uuid,utilization.gpu,memory.used")
    return [GpuSample(r[0], r[1], _number(r[2]), _number(r[3])) for r in rows if len(r) == 4]


def sample_dcgm(url: str) -> list[GpuSample]:
    """From a DCGM exporter; utilisation is DCGM_FI_DEV_GPU_UTIL, memory DCGM_FI_DEV_FB_USED (MiB)."""
    try:
        answer = get(url, timeout_s=5.0)
    except HttpError as e:
        raise NoGpu(f"no DCGM exporter: {e}") from e
    if answer.status != 200:
        raise NoGpu(f"{url} answered {answer.status}")
    return parse_dcgm(answer.text)


def parse_dcgm(text: str) -> list[GpuSample]:
    values: dict[tuple[str, str], dict[str, float]] = {}
    for line in text.splitlines():
        match = _DCGM.match(line)
        if match:
            labels = dict(_LABEL.findall(match.group(2)))
            key = str(labels.get("gpu", "")), str(labels.get("UUID") or labels.get("uuid") or "")
            values.setdefault(key, {})[match.group(1)] = float(match.group(3))
    return [GpuSample(gpu, uuid, v.get("DCGM_FI_DEV_GPU_UTIL", 0.0), v.get("DCGM_FI_DEV_FB_USED", 0.0))
            for (gpu, uuid), v in sorted(values.items())]


class Sampler:
    """Writes samples of the assigned GPUs to a CSV file until it is stopped; a node without GPUs leaves no file.

    uuids: of the GPUs to write; indices: used when an exporter gives no UUID. reason is set when sampling ended early.
    """

    def __init__(
        self, path: Path, take: Callable[[], list[GpuSample]], gpus: Sequence[Mapping[str, Any]], every_s: float = SAMPLE_EVERY_S
    ) -> None:
        self._path, self._take, self._every_s = path, take, every_s
        self._uuids, self._indices = {g["uuid"] for g in gpus}, {str(g["index"]) for g in gpus}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="gpu-sampler", daemon=True)
        self.reason = ""

    def start(self) -> None:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        self._path.write_text(GPU_CSV_HEADER + "\n", encoding="utf-8")
        self._thread.start()

    def once(self) -> None:
        """Take one sample and append it."""
        utc, rows = utc_now(), []
        for s in self._take():
            if s.uuid in self._uuids or (not s.uuid and s.gpu in self._indices):
                rows.append(f"{utc},{s.gpu},{s.utilisation_pct:g},{s.memory_used_mib:g}\n")
        with self._path.open("a", encoding="utf-8") as f:
            f.writelines(rows)

    def _loop(self) -> None:
        failures = 0
        while not self._stop.wait(self._every_s):
            try:
                self.once()
                failures = 0
            except (NoGpu, OSError) as e:
                failures += 1
                self.reason = str(e)
                if failures >= 10:
                    return

    def stop(self) -> None:
        self._stop.set()
        self._thread.join(timeout=2.0)
