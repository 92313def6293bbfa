"""Snapshots of /metrics of the workers and the frontend, and the few values that the run itself needs from them."""

from __future__ import annotations

import re
import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from .http import HttpError, get

_SAMPLE = re.compile(r"^([A-Za-z_:][A-Za-z0-9_:]*)(?:\{[^}]*\})?\s+([^\s]+)")
IN_FLIGHT = ("dynamo_frontend_inflight_requests", "dynamo_frontend_active_requests", "dynamo_frontend_queued_requests",
             "vllm:num_requests_running", "vllm:num_requests_waiting")


def take(urls: Mapping[str, str], when: str, out: Path, timeout_s: float = 5.0) -> dict[str, str]:
    """Write out/<process>.<when>.prom for each process -> URL; returns process -> reason for those that did not answer with 200."""
    out.mkdir(parents=True, exist_ok=True)

    def one(item: tuple[str, str]) -> tuple[str, str]:
        process, url = item
        try:
            answer = get(url, timeout_s=timeout_s)
        except HttpError as e:
            return process, str(e)
        if answer.status != 200:
            return process, f"{url} answered {answer.status}"
        (out / f"{process}.{when}.prom").write_bytes(answer.body)
        return process, ""

    with ThreadPoolExecutor(max_workers=max(1, len(urls))) as pool:
        return {process: reason for process, reason in pool.map(one, urls.items()) if reason}


def sums(text: str, names: tuple[str, ...]) -> dict[str, float]:
    """Sum over all label sets of each named metric that is present in a Prometheus text."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        match = _SAMPLE.match(line)
        if match and match.group(1) in names:
            found[match.group(1)] = found.get(match.group(1), 0.0) + float(match.group(2))
    return found


def in_flight(urls: Mapping[str, str], stop: threading.Event | None = None) -> dict[str, float]:
    """Process -> requests that it still has; a process that does not answer is left out."""
    busy = {}
    for process, url in urls.items():
        try:
            text = get(url, timeout_s=2.0, stop=stop).text
        except HttpError:
            continue
        found = sums(text, IN_FLIGHT)
        if found:
            busy[process] = max(found.values())
    return busy
