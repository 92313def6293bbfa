"""The GPU benchmark scripts as far as they go without a GPU: packing, shapes, predictions, the two-step client and its counters."""

from __future__ import annotations

import json
import random
import threading
import zipfile
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from benchmarks.gpu import correctness, geometry, pack, realsize, two_step, unpack
from benchmarks.gpu.servers import Server, command
from tests.envs import ROOT

TINY = ROOT / "models" / "gemma4-recall-4x1"
METRICS = """# HELP vllm:nixl_bytes_transferred Histogram
vllm:nixl_bytes_transferred_bucket{engine="0",le="2048.0",model_name="m"} 1.0
vllm:nixl_bytes_transferred_count{engine="0",model_name="m"} 2.0
vllm:nixl_bytes_transferred_sum{engine="0",model_name="m"} 4.718592e+06
vllm:nixl_num_failed_transfers_total{engine="0",model_name="m"} 3.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 800.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 5.0
"""


def wheel(folder: Path, name: str, files: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as z:
        for member, content in files.items():
            z.writestr(member, content)
    return path


def packed(tmp_path: Path, limit: int) -> tuple[Path, list[Path]]:
    """Pieces of one wheel whose archive is larger than the limit, and one that is smaller."""
    noise = random.Random(1).randbytes(60000)
    files = {
        "vllm/a.bin": noise,
        "vllm/_qutlass_C.so": b"x",
        "vllm-1.0.data/purelib/extra.py": b"e = 1\n",
        "vllm-1.0.data/scripts/vllm": b"#!",
    }
    units = [
        pack.Unit("vllm", "site", (wheel(tmp_path, "vllm", files),)),
        pack.Unit("small", "site", (wheel(tmp_path, "tiny", {"tiny/__init__.py": b"t = 1\n"}),)),
    ]
    store = tmp_path / "store"
    store.mkdir()
    pack.lay([(u, pack.compressed(u, store)) for u in units], tmp_path / "out", limit)
    return tmp_path / "root", sorted((tmp_path / "out").iterdir())


def test_pieces_stay_below_the_limit_and_unpack_to_the_same_files(tmp_path: Path) -> None:
    root, pieces = packed(tmp_path, 5000)
    assert len(pieces) > 2
    assert all(sum(f.stat().st_size for f in p.iterdir() if f.name != "index.json") <= 5000 for p in pieces)
    done = [name for piece in reversed(pieces) for name in unpack.add(piece, root)]
    assert sorted(done) == ["small", "vllm"]
    assert (root / "site" / "vllm" / "a.bin").stat().st_size == 60000
    assert (root / "site" / "extra.py").read_text() == "e = 1\n"
    assert (root / "site" / "tiny" / "__init__.py").exists()
    assert not (root / "site" / "vllm" / "_qutlass_C.so").exists()
    assert not (root / "site" / "vllm-1.0.data").exists()
    assert unpack.add(pieces[0], root) == []


def test_a_damaged_piece_is_refused_by_its_hash(tmp_path: Path) -> None:
    root, pieces = packed(tmp_path, 10**6)
    part = next(f for f in pieces[0].iterdir() if f.name.startswith("vllm"))
    part.write_bytes(part.read_bytes()[:-8] + b"12345678")
    with pytest.raises(SystemExit, match=r"vllm: sha256 .*, index\.json says"):
        unpack.add(pieces[0], root)


def test_every_pin_of_the_wheel_lists_is_exact() -> None:
    for name in ("engine-wheels.txt", "aiperf-wheels.txt"):
        lines = [line for line in (ROOT / "benchmarks" / "gpu" / name).read_text().splitlines() if line and not line.startswith("#")]
        assert all(line.count("==") == 1 for line in lines)
        assert len({line.split("==")[0] for line in lines}) == len(lines)


@pytest.mark.parametrize("name", geometry.NAMES)
def test_committed_shapes_are_what_geometry_writes_and_share_the_tokenizer(name: str, tmp_path: Path) -> None:
    folder = ROOT / "benchmarks" / "gpu" / "shapes" / name
    assert json.loads((folder / "config.json").read_text()) == geometry.config(name)
    tokenizer = (folder / "tokenizer.json").read_text()
    assert tokenizer == geometry.plain_tokenizer((TINY / "tokenizer.json").read_text())
    assert '"special": true' not in tokenizer
    written = geometry.write(name, tmp_path / "m", TINY, layers=12)
    config = json.loads((written / "config.json").read_text())
    assert config["num_hidden_layers"] == len(config["layer_types"]) == 12
    assert set(config["per_layer_config"]) == {"5", "11"}
    with pytest.raises(ValueError, match="the pattern has six"):
        geometry.config(name, layers=7)


def server(tp: int, model: Path = TINY, **more: Any) -> Server:
    return Server(name="s", env="gpu-stock", model=model, tp=tp, **more)


def test_predicted_bytes_of_the_published_two_gpu_run() -> None:
    """Nine prompts of 118 blocks moved 46,399,488 bytes in bfloat16 to TP2: 2 ranks x 118 blocks x 6 layers x 32,768 bytes."""
    lengths = [13 * 64] * 8 + [14 * 64]
    assert correctness.predicted(TINY, server(2), lengths, "TRITON_ATTN") == 46_399_488


def test_predicted_bytes_of_the_public_failure_and_of_fp8() -> None:
    """26B-A4B at TP4: 25 layers of 2 heads x 256 and 5 of one head x 512, keys and values, two bytes, on each of four ranks."""
    shape = ROOT / "benchmarks" / "gpu" / "shapes" / "gemma4-26b-a4b"
    per_token = 4 * (25 * 2 * 256 + 5 * 1 * 512) * 2 * 2
    assert correctness.predicted(shape, server(4, shape), [6400], "TRITON_ATTN") == 6400 * per_token
    assert correctness.predicted(shape, server(4, shape, kv_dtype="fp8"), [6400], "TRITON_ATTN") == 6400 * per_token // 2


def test_on_four_gpus_no_decode_rank_of_the_real_size_pairs_reads_from_its_own() -> None:
    for shape in ("gemma4-26b-a4b", "gemma4-31b"):
        for _, producer, consumer in realsize.PAIRS[shape]:
            (p_tp, p_gpus), (d_tp, d_gpus) = realsize.PLACES[producer], realsize.PLACES[consumer]
            for rank in range(d_tp):
                sources = range(rank * p_tp // d_tp, max(rank * p_tp // d_tp + 1, (rank + 1) * p_tp // d_tp))
                assert d_gpus[rank] not in {p_gpus[s] for s in sources}


@pytest.mark.parametrize(("half", "whole"), [("gemma4-26b-a4b-half", "gemma4-26b-a4b"), ("gemma4-31b-half", "gemma4-31b")])
def test_a_halved_shape_moves_per_rank_what_the_published_one_moves_at_twice_the_ranks(half: str, whole: str) -> None:
    shapes = ROOT / "benchmarks" / "gpu" / "shapes"
    one, two = (correctness.predicted(shapes / n, server(tp, shapes / n), [12500], "TRITON_ATTN") for n, tp in ((half, 2), (whole, 4)))
    assert one // 2 == two // 4


def test_command_of_a_gpu_server_names_backend_dtype_and_manager() -> None:
    argv = command(server(2, kv_dtype="fp8", dummy=True), Path("python"), 21000, "cuda")
    assert argv[argv.index("--attention-backend") + 1] == "TRITON_ATTN"
    assert argv[argv.index("--kv-cache-dtype") + 1] == "fp8"
    assert "--disable-hybrid-kv-cache-manager" in argv
    assert argv[argv.index("--load-format") + 1] == "dummy"
    assert "--disable-hybrid-kv-cache-manager" not in command(server(2, hybrid_manager=True), Path("python"), 21000, "cpu")
    assert json.loads(argv[argv.index("--kv-transfer-config") + 1])["kv_load_failure_policy"] == "fail"


class Pair(BaseHTTPRequestHandler):
    """A producer and a consumer in one: hands out transfer parameters, and streams only to who brings them back."""

    def do_GET(self) -> None:
        self._send(200, METRICS.encode(), "text/plain")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        given = body.get("kv_transfer_params") or {}
        if given.get("do_remote_decode"):
            answer = {"choices": [{"text": "A"}], "kv_transfer_params": {"remote_engine_id": "e", "n": len(body["prompt"])}}
            self._send(200, json.dumps(answer).encode(), "application/json")
        elif body["prompt"] == [9]:
            self._send(500, b'{"error": "load failure"}', "application/json")
        else:
            reason = "error" if body["prompt"] == [8] else "stop"
            chunks = [{"choices": [{"text": "7", "token_ids": [given.get("n", 0)]}]}, {"choices": [{"text": "", "finish_reason": reason}]}]
            stream = "".join(f"data: {json.dumps(c)}\n\n" for c in chunks) + "data: [DONE]\n\n"
            self._send(200, stream.encode(), "text/event-stream")

    def _send(self, status: int, content: bytes, kind: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def url() -> Iterator[str]:
    listener = ThreadingHTTPServer(("127.0.0.1", 0), Pair)
    thread = threading.Thread(target=listener.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{listener.server_address[1]}"
    listener.shutdown()
    thread.join(5)
    listener.server_close()


def test_two_step_carries_the_transfer_parameters_and_reports_failures(url: str) -> None:
    both = two_step.ask(url, [5, 6, 7], 4, producer=url)
    assert (both.ok, both.tokens, both.text, both.finish_reason) == (True, [3], "7", "stop")
    assert both.prefill_s > 0
    assert both.first_token_s > 0
    alone = two_step.ask(url, [5, 6, 7], 4)
    assert (alone.tokens, alone.prefill_s) == ([0], 0.0)
    assert "HTTP 500" in two_step.ask(url, [9], 4).error
    assert "finish_reason error" in two_step.ask(url, [8], 4).error
    assert not two_step.ask("http://127.0.0.1:9", [1], 4, timeout_s=2.0).ok


def test_counters_take_sums_labels_and_missing_ones_as_zero(url: str) -> None:
    found = two_step.counters(url)
    assert (found["bytes"], found["transfers"], found["failed"], found["external_tokens"]) == (4718592.0, 2.0, 3.0, 800.0)
    assert found["expired"] == found["descriptors"] == 0.0
    moved = two_step.settled(url, dict.fromkeys(found, 0.0), 2)
    assert moved["bytes"] == 4718592.0


def test_tables_show_what_was_not_run() -> None:
    record = {
        "pairs": [{"variant": "stock.triton.auto", "pair": "1->2", "state": "not run", "why": "a server did not start"}],
        "servers": {"stock.triton.auto.tp2": {"ready_s": None, "error": "ended with exit code 1\nlast line"}},
    }
    text = "\n".join(correctness.tables(record))
    assert "not run" in text
    assert "last line" in text
    missing = {"shape": "gemma4-31b", "env": "stock", "pair": "A2->B4", "state": "not run", "why": "few GPUs"}
    empty = "\n".join(realsize.tables({"pairs": [missing]}))
    assert "few GPUs" in empty


def test_the_mixed_rate_is_compared_within_a_round_and_only_with_equal_tp_of_the_same_bytes() -> None:
    common = {"shape": "x", "env": "per-region", "prompt_tokens": 1024, "bytes": 100}
    mixed = common | {"pair": "A1->B2", "rounds": [0, 1, 2], "xfer_ms": [10.0, 20.0, 10.0]}
    other = common | {"pair": "A2->B2", "rounds": [0, 1], "xfer_ms": [8.0, 30.0]}
    own = common | {"pair": "A2->C2", "rounds": [0, 1, 2], "xfer_ms": [12.0, 30.0, 10.0]}
    fewer_bytes = common | {"pair": "B2->A1", "bytes": 90, "rounds": [0, 1, 2], "xfer_ms": [1.0, 1.0, 1.0]}
    (found,) = realsize.against_equal_tp([mixed, other, own, fewer_bytes])
    assert found["equal_pairs"] == ["A2->B2", "A2->C2"]
    assert found["ratios"] == [1.0, 1.5]  # round 2 lacks one of the equal pairs
    assert found["low"] <= found["median"] <= found["high"]
    assert not realsize.against_equal_tp([mixed, fewer_bytes])
    assert "1.25" in "\n".join(realsize.tables({"rates_against_equal_tp": [found]}))


def test_fewer_experts_change_nothing_that_the_cache_depends_on() -> None:
    few, all_of_them = geometry.config("gemma4-26b-a4b-half", experts=32), geometry.config("gemma4-26b-a4b-half")
    assert {key for key in few if few[key] != all_of_them[key]} == {"num_experts"}
