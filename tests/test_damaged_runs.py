"""Archived runs with a file that is broken, though its hash fits: every verb says so in words, or shows what is left."""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.calls import call
from tests.golden_cases import ROOT

REFERENCE = ROOT / "results" / "reference"
DEEP = b"[" * 100_000


def verbs(run: Path, other: Path, scratch: Path) -> Iterator[list[str]]:
    results = ["--results", str(run.parent.parent)]
    yield ["runs", *results]
    yield ["runs", *results, "--matrix"]
    yield ["compare", str(run), str(other), "--include-invalid"]
    yield ["report", str(run), "--include-invalid", "--out", str(scratch / "page.html"), "--force"]
    yield ["export", str(run), "--to", "points", "--out", str(scratch / "points"), "--include-invalid"]
    yield ["utilisation", str(run)]
    yield ["plan", "--run", str(run)]
    yield ["verify", str(run)]
    yield ["status", str(run)]


def damages(data: bytes) -> Iterator[bytes]:
    yield from (b"\xff\x00junk", b"", b"[]\n", b"null\n", b"{}\n", b'{"schema": 1}\n', DEEP, data[: len(data) // 2])
    first = json.loads(data.splitlines()[0] if data.count(b"\n{") else data)
    for key in list(first)[:20]:
        for value in (None, "x", [[]]):
            yield json.dumps({**first, key: value}).encode() + b"\n"


def first(recipe: str) -> Path:
    return min(spec.parent for spec in (REFERENCE / recipe).glob("*/spec.json"))


@pytest.mark.parametrize(
    "pattern",
    ["manifest.json", "spec.json", "verdict.json", "evidence.json", "events.jsonl", "gate.json", "gate.jsonl", "nodes/decode-0.json",
     "recall/before.jsonl", "load/*/aiperf/profile_export_aiperf.json", "load/*/phase.json"],
)  # fmt: skip
def test_a_damaged_file_is_never_a_trace(pattern: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, other = first("gpu-tiny-p1d2"), first("gpu-tiny-p1d2-stock")
    run = tmp_path / "results" / "gpu-tiny-p1d2" / whole.name
    shutil.copytree(whole, run)
    name = min(run.glob(pattern)).relative_to(run).as_posix()
    data, manifest = (run / name).read_bytes(), json.loads((run / "manifest.json").read_bytes())
    for damaged in damages(data):
        (run / name).write_bytes(damaged)
        if name != "manifest.json":
            manifest["files"][name] = hashlib.sha256(damaged).hexdigest()
            (run / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
        for words in verbs(run, other, tmp_path):
            shutil.rmtree(tmp_path / "points", ignore_errors=True)
            code, said = call(words, monkeypatch)
            assert code in (0, 1, 2), (words[0], damaged[:120], said[-600:])
            assert said.strip(), words
