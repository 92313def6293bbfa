"""Reading a run: real logs and metrics of CPU runs, and vLLM's GPU lines."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path

import pytest
from click.testing import CliRunner
from rich.console import Console

from pdlaunch import verb_plan
from pdlaunch.errors import ArchiveError, PlanError
from pdlaunch.node.spec import TransferGroup, TransferPrediction
from pdlaunch.planner import command
from pdlaunch.planner.config import load_config
from pdlaunch.planner.logs import EngineRecord, parse_argv, parse_cache_config, parse_log, read_records
from pdlaunch.planner.runplan import read_engine, read_run
from pdlaunch.planner.transfer import transfer
from tests.planner.models import CONFIGS, DATA, layout

SMALL = {
    **load_config(CONFIGS / "gemma-2-27b.json"),
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "dtype": "bfloat16",
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "sliding_window": 64,
    "max_position_embeddings": 16384,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "per_layer_config": {"5": {"num_key_value_heads": 1, "head_dim": 128}},
}

# The lines of one GB300 worker: the figures are the published ones of the TP8 row, the wording is vLLM 0.31.0's.
GPU_LOG = """\
(Worker_TP0 pid=7) INFO 09-21 10:00:00 [model_runner.py:408] Model loading took 169.28 GiB memory and 95.000000 seconds
(Worker_TP0 pid=7) INFO 09-21 10:00:01 [gpu_model_runner.py:6747] Estimated CUDA graph memory: 0.91 GiB total
(Worker_TP0 pid=7) INFO 09-21 10:00:02 [gpu_worker.py:692] Available KV cache memory: 83.00 GiB
(EngineCore pid=5) INFO 09-21 10:00:03 [interface.py:989] Setting attention block size to 1088 tokens to ensure that
(EngineCore pid=5) INFO 09-21 10:00:03 [kv_cache_utils.py:1559] Add 3 padding layers, may waste at most 4.35% KV cache memory
(EngineCore pid=5) INFO 09-21 10:00:04 [kv_cache_utils.py:2464] GPU KV cache size: 3,102,720 tokens, Maximum concurrency for 10,240 tokens per request: 303.00x
(Worker_TP0 pid=7) INFO 09-21 10:00:09 [gpu_worker.py:892] CUDA graph pool memory: 0.59 GiB (actual), 0.91 GiB (estimated), difference: -0.32 GiB (-54.2%).
(Worker_TP0 pid=7) INFO 09-21 10:00:09 [gpu_worker.py:959] Free memory on device (274.08/276.62 GiB) on startup. Desired GPU memory utilization is (0.92, 254.49 GiB). Actual usage is 170.0 GiB for consumed memory (weights + non-torch), 1.48 GiB for peak activation, and 0.59 GiB for CUDAGraph memory. Replace gpu_memory_utilization config with `--kv-cache-memory=1` (0.0 GiB) to fit.
"""  # noqa: E501


@pytest.mark.parametrize("name", ["tiny-p1d1", "tiny-p1d2"])
def test_real_cpu_runs_are_predicted_exactly(name: str) -> None:
    """Sizes that vLLM 0.31.0 printed and exported on the CPU stack, for prefill TP1 and decode TP1 or TP2."""
    engines = read_run(DATA / name, SMALL)
    assert {engine.record.role for engine in engines} == {"prefill", "decode"}
    for engine in engines:
        assert engine.problem == ""
        assert [row.name for row in engine.rows] == ["block_size", "num_blocks", "tokens", "concurrency"]
        assert engine.exact, [(row.name, row.predicted, row.measured) for row in engine.rows]
    blocks = {engine.record.role: engine.rows[1].measured for engine in engines}
    assert blocks == {"prefill": 186, "decode": 186 if name == "tiny-p1d1" else 341}


def test_a_single_log_is_enough_when_its_flags_are_defaults(tmp_path: Path) -> None:
    log = tmp_path / "worker.log"
    log.write_text(GPU_LOG)
    (engine,) = read_run(log, load_config(CONFIGS / "qwen3.8-2.4t.json"))
    assert engine.record.fact("kv_tokens") == 3_102_720
    assert engine.record.fact("padding_layers") == 3
    assert engine.record.facts["concurrency"].source == "worker.log:6"
    assert engine.shape.max_model_len == 10240


def test_measured_ledger_closes_without_the_context() -> None:
    engine = read_engine(engine_record(GPU_LOG), load_config(CONFIGS / "qwen3.8-2.4t.json"))
    rows = {row.name: row.gib for row in engine.ledger}
    assert rows["CUDA context and start-up"] == pytest.approx(2.54)
    assert rows["non-torch memory"] == pytest.approx(-0.72)
    assert rows["peak activation"] == pytest.approx(-0.57)
    assert abs(rows["residual"] or 0) <= 0.02
    assert engine.plan is not None
    assert engine.plan.graph is not None
    assert engine.plan.graph.error_gib == pytest.approx(0.32)


def relocated(tmp_path: Path) -> Path:
    """A run whose model folder is not on this machine."""
    run = tmp_path / "results" / "tiny-p1d1" / "20261130T010000Z-local-abcdef"
    shutil.copytree(DATA / "tiny-p1d1", run)
    spec = run / "spec.json"
    spec.write_text(spec.read_text().replace("models/gemma4-recall-4x1", "models/absent"))
    return run


def test_without_the_model_config_the_answer_is_unknown(tmp_path: Path) -> None:
    run = relocated(tmp_path)
    assert {engine.verdict for engine in read_run(run)} == {"unknown"}
    out = io.StringIO()
    command.render(command.measured(run), Console(file=out, width=150))
    assert out.getvalue().count("predicted against measured: unknown") == 2
    assert "differs" not in out.getvalue()
    (run / "model_config.json").write_text(json.dumps(SMALL))
    assert {engine.verdict for engine in read_run(run)} == {"exact"}
    assert {engine.verdict for engine in read_run(run, {**SMALL, "head_dim": 32})} == {"differs"}


@pytest.mark.parametrize("name", ["last", "tiny-p1d1/20261130T010000Z-local-abcdef", "20261130T010000Z-local-abcdef"])
def test_a_run_is_named_as_for_verify(tmp_path: Path, name: str) -> None:
    (relocated(tmp_path) / "model_config.json").write_text(json.dumps(SMALL))
    done = CliRunner().invoke(verb_plan.plan, ["--run", name, "--results", str(tmp_path / "results")])
    assert done.exit_code == 0, done.output
    assert done.output.count("predicted against measured: exact") == 2


def test_a_run_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    done = CliRunner().invoke(verb_plan.plan, ["--run", "nothing", "--results", str(tmp_path)])
    assert isinstance(done.exception, ArchiveError)


def engine_record(text: str) -> EngineRecord:
    argv = {
        "tensor_parallel": 8,
        "kv_cache_dtype": "fp8",
        "mamba_ssm_cache_dtype": "bfloat16",
        "prefix_caching": False,
        "speculative_tokens": 3,
        "backend": "FLASHINFER",
    }
    return EngineRecord("decode-0", "decode", parse_log(text), {}, argv)


def test_a_gpu_log_with_its_flags_is_predicted_to_what_its_rounding_leaves() -> None:
    """ "83.00 GiB" leaves one block of 12.75 MiB open, and no more."""
    config = load_config(CONFIGS / "qwen3.8-2.4t.json")
    engine = read_engine(engine_record(GPU_LOG), config)
    assert engine.exact, [(row.name, row.predicted, row.measured) for row in engine.rows]
    tokens = {row.name: row for row in engine.rows}["tokens"]
    assert tokens.measured == 3_102_720
    assert tokens.low is not None
    assert tokens.high is not None
    assert 0 < tokens.high - tokens.low < 1000
    other = read_engine(engine_record(GPU_LOG.replace("3,102,720", "3,101,720")), config)
    assert not other.exact


def test_a_wrong_prediction_is_not_called_exact(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tiny-p1d1", tmp_path / "run")
    metric = tmp_path / "run" / "metrics" / "decode-0.ready.prom"
    metric.write_text(metric.read_text().replace('num_gpu_blocks="186"', 'num_gpu_blocks="185"'))
    engines = {engine.record.role: engine for engine in read_run(tmp_path / "run", SMALL)}
    assert engines["prefill"].exact
    assert not engines["decode"].exact
    assert [row.residual for row in engines["decode"].rows if row.name == "num_blocks"] == [-1]


def test_a_run_without_the_model_config_says_so(tmp_path: Path) -> None:
    shutil.copytree(DATA / "tiny-p1d1", tmp_path / "run")
    spec = tmp_path / "run" / "spec.json"
    spec.write_text(spec.read_text().replace("models/gemma4-recall-4x1", "models/absent"))
    for engine in read_run(tmp_path / "run"):
        assert engine.plan is None
        assert "no such HF config" in engine.problem
        assert not engine.exact or all(row.predicted is None for row in engine.rows)


def test_bytes_handed_over_are_read_from_the_evidence(tmp_path: Path) -> None:
    """Windows with a prediction and one without; the figures are those of a real CPU run."""
    shutil.copytree(DATA / "tiny-p1d2", tmp_path / "run")
    moved = {
        "transfer.decode.recall.before.bytes": 92_798_976,
        "transfer.decode.recall.before.predicted_bytes": 92_798_976,
        "transfer.decode.load.bytes": 7,
        "transfer.prefill.load.bytes": 0,
    }
    values = {name: {"value": value, "unit": "bytes", "source": "metrics"} for name, value in moved.items()}
    (tmp_path / "run" / "evidence.json").write_text(json.dumps({"schema": 1, "values": values}))
    (tmp_path / "config.json").write_text(json.dumps(SMALL))
    run = command.measured(tmp_path, tmp_path / "config.json")
    assert [(row.name, row.residual) for row in run.transfers] == [("bytes, recall.before", 0), ("bytes, load", None)]
    out = io.StringIO()
    command.render(run, Console(width=160, file=out))
    assert "92,798,976" in out.getvalue()
    assert command.to_json(run)["transfers"][0]["predicted"] == 92_798_976


def test_the_launchers_prediction_is_the_planners_transfer() -> None:
    """The archive judges by node.spec.TransferPrediction; both must count the same blocks, window or not."""
    for hybrid in (True, False):
        found = layout("gemma-4-31b-it", tensor_parallel=8, block_size=64, hybrid_manager=hybrid)
        groups = tuple(
            TransferGroup(g.first.block_size, (g.first.window or 0) if g.first.kind == "sliding" else 0, (g.page_bytes,) * 8)
            for g in found.groups
        )
        for tokens in (1, 63, 64, 65, 1023, 1024, 1025, 1087, 1088, 1089, 8192, 12_503):
            assert TransferPrediction(groups, "").bytes_of_prompt(tokens) == transfer(found, tokens).total_bytes


def test_nothing_to_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="neither a log nor a run"):
        read_records(tmp_path)
    (tmp_path / "empty.log").write_text("nothing here\n")
    with pytest.raises(PlanError, match="says nothing of a KV cache"):
        read_run(tmp_path / "empty.log")


def test_argv_in_both_spellings() -> None:
    argv = ["python", "-m", "dynamo.vllm", "--tensor-parallel-size=4", "--block-size", "64", "--no-enable-prefix-caching"]
    argv += ["--disable-hybrid-kv-cache-manager", "--speculative-config", json.dumps({"method": "mtp", "num_speculative_tokens": 3})]
    assert parse_argv(argv) == {
        "tensor_parallel": 4,
        "block_size": 64,
        "prefix_caching": False,
        "hybrid_manager": False,
        "speculative_tokens": 3,
    }


def test_cache_config_of_several_data_parallel_engines() -> None:
    text = 'vllm:cache_config_info{engine="1",num_gpu_blocks="7"} 1.0\nvllm:cache_config_info{engine="0",num_gpu_blocks="9"} 1.0\n'
    assert [row["num_gpu_blocks"] for row in parse_cache_config(text)] == ["9", "7"]


def test_result_as_json_and_on_a_terminal() -> None:
    run = command.Run(DATA / "tiny-p1d1", read_run(DATA / "tiny-p1d1", SMALL))
    found = json.loads(json.dumps(command.to_json(run)))
    assert [engine["exact"] for engine in found["engines"]] == [True, True]
    out = io.StringIO()
    command.render(run, Console(width=160, file=out))
    assert "predicted against measured: exact" in out.getvalue()
