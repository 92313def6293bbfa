"""Evidence from run folders: every value with its source, nothing from files that are missing or broken."""

from __future__ import annotations

import json
from pathlib import Path

from pdlaunch.node import logs
from pdlaunch.node.contracts import GPU_CSV_HEADER, Evidence
from pdlaunch.node.timeline import read_timeline
from tests.nodefactory import AGREEMENT, BYTES_PER_BLOCK, PROMPTS, SPLIT, TOKENS, Folder, blocks, engine, good_run


def test_bytes_are_predicted_in_each_window_from_the_tokens_of_its_requests(tmp_path: Path) -> None:
    found = good_run(tmp_path).evidence()
    gate, recall, load = (blocks(TOKENS[k]) * BYTES_PER_BLOCK for k in ("gate", "recall", "load"))
    expected = {
        "ready-before_load": gate + PROMPTS * recall,
        "before_load-after_load": PROMPTS * recall + 5 * load,
        "after_load-end": PROMPTS * recall,
        "total": gate + 3 * PROMPTS * recall + 5 * load,
    }
    for window, predicted in expected.items():
        assert found.get(f"transfer.decode.{window}.predicted_bytes") == found.get(f"transfer.decode.{window}.bytes") == predicted
    assert found.get("transfer.decode.total.requests_counted") == 1 + 3 * PROMPTS + 5
    assert found.get("decode-0.transfers") == 66
    assert found.get("transfer.prefill.total.tokens.local_compute") == found.get("transfer.decode.total.tokens.external_kv_transfer")


def test_control_and_refused_requests_are_not_counted(tmp_path: Path) -> None:
    engines = (engine("prefill", 1), engine("decode", 2), engine("control", 1, kind="vllm.serve"))
    run = good_run(tmp_path, agreement=AGREEMENT, engines=engines)
    pair = [run.row("agreement", target=t, prompt=0, equal=True, compared="tokens", why="") for t in ("deployment", "control")]
    run.rows("agreement.jsonl", pair)
    assert run.evidence().get("transfer.decode.ready-before_load.requests_counted") == 1 + PROMPTS + 1
    assert (
        run.evidence().get("transfer.decode.ready-before_load.predicted_bytes")
        == (blocks(100) + PROMPTS * blocks(810) + blocks(500)) * BYTES_PER_BLOCK
    )


def test_one_unknown_token_count_makes_the_window_inexact_and_says_why(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.rows("recall/before.jsonl", [run.recall_row(i, prompt_tokens=None if i == 3 else 810) for i in range(PROMPTS)])
    found = run.evidence()
    assert found.get("transfer.decode.ready-before_load.predicted_bytes") is None
    assert found.get("transfer.decode.ready-before_load.not_exact") == "1 requests of recall.before have no token count"
    assert found.get("transfer.decode.after_load-end.predicted_bytes") is not None


def test_a_load_phase_whose_records_are_missing_is_inexact(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "load" / "c2" / "aiperf" / "profile_export.jsonl").unlink()
    assert "5 requests of load" in run.evidence().get("transfer.decode.before_load-after_load.not_exact")


def test_a_run_that_ended_early_is_exact_for_what_was_sent(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for when in ("before_load", "after_load"):
        for process in ("prefill-0", "decode-0"):
            (tmp_path / "metrics" / f"{process}.{when}.prom").unlink()
    events = (tmp_path / "events.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "events.jsonl").write_text("".join(e for e in events if "load" not in e and "recall_during" not in e and "_after" not in e))
    for name in ("recall/during.jsonl", "recall/after.jsonl", "load/c2/command.json"):
        (tmp_path / name).unlink()
    assert run.evidence().get("transfer.decode.ready-end.predicted_bytes") == (blocks(100) + PROMPTS * blocks(810)) * BYTES_PER_BLOCK
    (tmp_path / "recall" / "before.jsonl").unlink()
    assert run.evidence().get("transfer.decode.ready-end.not_exact") == "recall.before left no record"


def test_cache_hits_and_preemptions_make_a_window_inexact(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.counters(local_cache_hit=64, preemptions=1)
    assert run.evidence().get("transfer.decode.after_load-end.not_exact") == "tokens.local_cache_hit is 64; preemptions is 1"


def test_absent_is_never_zero(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "metrics" / "decode-0.end.prom").write_text("<html>")
    (tmp_path / "recall" / "after.jsonl").unlink()
    found = run.evidence()
    assert found.get("transfer.decode.total.bytes") is None
    assert found.get("recall.after.correct") is None
    assert found.get("transfer.decode.ready-before_load.bytes") == (blocks(100) + PROMPTS * blocks(810)) * BYTES_PER_BLOCK


def test_an_empty_folder_gives_no_evidence_and_no_error(tmp_path: Path) -> None:
    run = Folder(tmp_path, good_run(tmp_path / "x").spec)
    assert [k for k in run.evidence().values if not k.endswith("kv_load_failure_policy")] == []


def test_files_that_were_cut_off_are_read_as_far_as_they_go(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for name in ("events.jsonl", "recall/before.jsonl", "gate.json", "nodes/decode-0.json", "load/c2/phase.json"):
        path = tmp_path / name
        path.write_bytes(path.read_bytes()[:-20])
    found = run.evidence()
    assert found.get("recall.before.asked") == PROMPTS - 1
    assert found.get("gate.found") is None
    assert found.get("build.processes") == ["prefill-0"]


def test_a_row_that_claims_to_be_right_must_hold_its_code(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    run.rows("recall/before.jsonl", [run.recall_row(i, content="something else" if i else f"CODE{i:04d}") for i in range(PROMPTS)])
    assert run.evidence().get("recall.before.correct") == 1


def test_every_value_has_a_source_and_survives_a_file(tmp_path: Path) -> None:
    found = good_run(tmp_path).evidence()
    assert all(value.source for value in found.values.values())
    found.write(tmp_path / "evidence.json")
    assert Evidence.read(tmp_path / "evidence.json").values == found.values


def test_evidence_of_a_judged_run_is_that_of_the_run(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    before = run.evidence().values
    with (tmp_path / "events.jsonl").open("a") as file:
        for stage in ("judged", "archived"):
            file.write(json.dumps({"utc": "2026-11-30T01:07:00.000000Z", "monotonic_s": 300.0, "stage": stage, "state": "end"}) + "\n")
    assert run.evidence().values == before


def test_stage_times_and_queue(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "receipt.json").write_text(json.dumps({"utc": "2026-11-30T01:04:30.000000Z"}))
    found = run.evidence()
    assert found.get("stage.queue.duration_s") == 30.0
    assert found.get("stage.engines_ready.duration_s") == 40.0
    assert found.get("stage.first_token.at_s") == 42.4
    assert found.get("stage.load.c2.duration_s") == 30.0
    assert found.values["stage.control_plane.duration_s"].source == "events.jsonl:3"
    assert read_timeline(tmp_path).end_of("recall_before") is not None


def test_gpu_use_per_role_and_phase(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    (tmp_path / "gpu").mkdir()
    rows = [
        "2026-11-30T01:05:20.000000Z,0,10,500",
        "2026-11-30T01:06:10.000000Z,0,80,900",
        "2026-11-30T01:06:10.000000Z,1,40,800",
        "cut,of",
    ]
    (tmp_path / "gpu" / "decode-0.csv").write_text("\n".join([GPU_CSV_HEADER, *rows]))
    found = run.evidence()
    assert found.get("gpu.decode.load.c2.utilisation_mean_pct") == 60.0
    assert found.get("gpu.decode.run.utilisation_max_pct") == 80.0
    assert found.get("gpu.decode.run.samples") == 3
    assert found.get("prefill-0.gpu") == "no GPU: no nvidia-smi: no GPU on this node"
    assert found.get("decode-0.gpu") is None


def test_fabric_counters_are_counted_once_per_host(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    for process in ("prefill-0", "decode-0"):
        run.node(
            process,
            fabric_before={"mlx5_0/1/port_rcv_data": 100, "mlx5_0/1/symbol_error": 1},
            fabric_after={"mlx5_0/1/port_rcv_data": 350, "mlx5_0/1/symbol_error": 1},
            fabric_error="",
        )
    found = run.evidence()
    assert found.get("fabric.vm.rcv_bytes") == 1000
    assert found.get("fabric.vm.mlx5_0/1/port_rcv_data") == 250
    assert found.get("fabric.vm.mlx5_0/1/symbol_error") is None


def test_cache_geometry_and_build_facts_are_kept(tmp_path: Path) -> None:
    found = good_run(tmp_path).evidence()
    assert found.get("decode-0.cache.num_gpu_blocks") == "186"
    assert found.get("decode-0.version.vllm") == "0.31.0+cpu"
    assert found.get("decode-0.sha256.vllm/a.py") == "ab"
    assert found.get("decode-0.kv_load_failure_policy") == "fail"


def test_a_log_line_is_quoted_with_file_and_line_and_colours_removed(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    line = run.log("decode-0", [f"\x1b[31m{SPLIT}\x1b[0m", SPLIT]) - 1
    found = run.evidence().values["log.decode-0.split_region.count"]
    assert (found.value, found.source) == (2, f"logs/decode-0.log:{line}")
    assert run.evidence().get("log.decode-0.split_region.line") == SPLIT


def test_lines_of_the_stop_do_not_count(tmp_path: Path) -> None:
    run = good_run(tmp_path)
    size = (tmp_path / "logs" / "decode-0.log").stat().st_size
    run.log("decode-0", ["EngineDeadError: the engine was told to stop", "AssertionError"])
    run.events({"decode-0": size, "prefill-0": 10**6})
    assert not [k for k in run.evidence().values if k.startswith("log.decode-0.engine") or k.startswith("log.decode-0.assertion")]
    run.events({"decode-0": size + 10, "prefill-0": 10**6})
    assert run.evidence().get("log.decode-0.engine_dead.count") == 1


def test_a_killed_supervisor_leaves_dead_engines_out(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("EngineDeadError\nNIXL_ERR_BACKEND\n")
    assert [f.pattern.name for f in logs.scan(tmp_path / "a.log", "logs/a.log", None)] == ["nixl_error"]


def test_plan_lines_of_different_ranks_are_told_from_repeated_ones(tmp_path: Path) -> None:
    (tmp_path / "a.log").write_text("plan engine=e1 rank=0/2\nplan engine=e1 rank=0/2\nplan engine=e2 rank=0/2\n")
    assert logs.count(tmp_path / "a.log", r"plan engine=(?P<engine>\w+) rank=(?P<rank>\d+)") == (3, 2, 1)
    assert logs.count(tmp_path / "a.log", r"plan engine") == (3, 3, 1)
    assert logs.count(tmp_path / "none.log", r"plan engine") == (0, 0, 0)
