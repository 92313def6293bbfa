"""Every definition against numbers worked by hand, and against AIPerf's own figures for the same requests."""

from __future__ import annotations

import json
import shutil
from datetime import datetime
from pathlib import Path

import pytest

from pdlaunch.aiperf_files import PhaseFiles, Record, read_phase
from pdlaunch.errors import ArchiveError
from pdlaunch.metrics_defs import DEFINITIONS, Denominators, compute, meets, output_per_user, reconcile, total_to_output, tpot_ms

REAL = Path(__file__).parent / "data" / "aiperf-0.13.0"
TWELVE = Denominators("GPU", prefill=4, decode=8, aggregated=0)


def record(ttft, latency, isl, osl, ok=True, itl=None):
    return Record(0, int(latency * 1e6), ok, ttft, itl, latency, isl, osl)


def phase(records, duration=2.0, **metrics):
    summary = {"benchmark_duration": {"unit": "sec", "avg": duration}, **metrics}
    return PhaseFiles(Path("load/c2/aiperf"), summary, tuple(records), ())


# Three requests, two users, two seconds. TPOT: (500-100)/(5-1)=100, (800-200)/(4-1)=200, (1000-400)/(3-1)=300 ms.
THREE = [
    record(100, 500, 10, 5, itl=100),
    record(200, 800, 20, 4, itl=200),
    record(400, 1000, 30, 3, itl=300),
    record(5, 9, 7, 1, ok=False),
]


def value(name, files=None, per=TWELVE, users=2, slos=None):
    return compute(files or phase(THREE), per, users, slos or {})[name].value


@pytest.mark.parametrize(("name", "expected"), [
    ("ttft_p50_ms", 200), ("ttft_p90_ms", 360), ("ttft_p99_ms", 396), ("itl_p50_ms", 200), ("tpot_p50_ms", 200), ("tpot_p90_ms", 280),
    ("latency_p50_ms", 800), ("latency_p90_ms", 960), ("requests_ok", 3), ("requests_failed", 1), ("request_rate", 1.5), ("duration_s", 2),
    ("input_tokens_per_s", 30), ("output_tokens_per_s", 6), ("total_tokens_per_s", 36), ("total_per_output", 6),
    ("total_tokens_per_s_per_gpu", 3), ("output_tokens_per_s_per_gpu", 0.5),
    ("input_tokens_per_s_per_prefill_gpu", 7.5), ("output_tokens_per_s_per_decode_gpu", 0.75),
    ("interactivity_median_tpot", 5), ("interactivity_mean_inverse_itl", (10 + 5 + 10 / 3) / 3), ("interactivity_output_per_user", 3),
    ("littles_law_residual_pct", (1.5 * (0.5 + 0.8 + 1.0) / 3 - 2) / 2 * 100),
])  # fmt: skip
def test_definitions_by_hand(name, expected):
    assert value(name) == pytest.approx(expected)


def test_goodput_counts_requests_that_meet_every_limit():
    limits = {"time_to_first_token": 250.0, "inter_token_latency": 150.0}
    assert value("goodput", slos=limits) == pytest.approx(0.5)
    assert compute(phase(THREE), TWELVE, 2, {})["goodput"].why == "the phase sets no SLO"
    assert not meets(record(None, 5, 1, 1), {"time_to_first_token": 10})
    with pytest.raises(ValueError, match="known"):
        meets(THREE[0], {"ttft": 1})


def test_energy_where_measured():
    measured = phase(THREE, nvidia_total_gpu_energy={"unit": "J", "avg": 60.0})
    assert value("energy_per_output_token_j", measured) == pytest.approx(60 / 12)
    assert "no GPU energy" in compute(phase(THREE), TWELVE, 2, {})["energy_per_output_token_j"].why


def test_every_definition_is_computed_or_says_why():
    for files in (phase(THREE), phase([]), phase(THREE, duration=0)):
        found = compute(files, TWELVE, None, {})
        assert set(found) == set(DEFINITIONS)
        assert all((m.value is None) == bool(m.why) for m in found.values())
    assert compute(phase(THREE, duration=0), TWELVE, 2, {})["output_tokens_per_s"].why == "the phase has zero length"


def test_the_second_seeds_conversion():
    # 5,000 total tokens/s/GPU at 8192/1024 is 5000 * 1024/9216 = 555.6 generated; on 48 GPUs for 2,560 users 555.6*48/2560 = 10.4 each
    generated = total_to_output(5000, 8192, 1024)
    assert (8192 + 1024) / 1024 == 9
    assert round(generated) == 556
    assert round(output_per_user(generated, 48, 2560), 1) == 10.4
    # the axis said about 13.5: 1000/median TPOT, while the request decodes; the ratio is the time not spent generating
    assert output_per_user(generated, 48, 2560) / 13.5 == pytest.approx(0.77, abs=0.01)


def test_gpus_given_to_engines_not_whole_nodes():
    # T26: prefill 4 + decode 8 on two nodes of 8: 36 tokens/s over 12, not over 16
    assert value("total_tokens_per_s_per_gpu") == pytest.approx(36 / 12)
    assert compute(phase(THREE), Denominators("rank", 1, 2, 0), 2, {})["total_tokens_per_s_per_gpu"].unit == "tokens/s/rank"
    assert value("total_tokens_per_s_per_gpu", per=Denominators("GPU", 0, 0, 0)) is None
    assert value("input_tokens_per_s_per_prefill_gpu", per=Denominators("GPU", 0, 0, 4)) is None


def test_reconciliation_is_exact():
    # median 5; pooled (4+3+2)/(0.4+0.6+0.6) = 5.625; whole 12/2.3; occupancy 2.3/(2*2); product = 12/(2*2) = 3
    found = reconcile(THREE, 2.0, 2)
    assert found.median == pytest.approx(5)
    assert found.mean_over_median == pytest.approx(1.125)
    assert found.generating_share == pytest.approx(12 / 2.3 / 5.625)
    assert found.occupancy == pytest.approx(0.575)
    assert found.median * found.mean_over_median * found.generating_share * found.occupancy == pytest.approx(found.output_per_user)
    assert found.output_per_user == pytest.approx(value("interactivity_output_per_user"))
    assert reconcile([], 2.0, 2) is None
    assert reconcile(THREE, 0.0, 2) is None


def test_one_output_token_has_no_tpot():
    assert tpot_ms(record(5, 9, 7, 1)) is None
    assert tpot_ms(record(None, 9, 7, 3)) is None


@pytest.mark.parametrize("name", ["c1", "c4", "c16"])
def test_our_numbers_are_aiperfs_on_real_files(name):
    files = read_phase(REAL / name)
    assert files.problems == ()
    found = compute(files, Denominators("rank", 1, 1, 0), int(name[1:]), {"time_to_first_token": 1000.0, "inter_token_latency": 50.0})
    for ours, theirs, stat in (
        ("ttft_p50_ms", "time_to_first_token", "p50"), ("ttft_p99_ms", "time_to_first_token", "p99"),
        ("itl_p90_ms", "inter_token_latency", "p90"), ("latency_p99_ms", "request_latency", "p99"),
        ("interactivity_mean_inverse_itl", "output_token_throughput_per_user", "avg"), ("duration_s", "benchmark_duration", "avg"),
    ):  # fmt: skip
        assert found[ours].value == pytest.approx(files.stat(theirs, stat), rel=1e-6), ours
    # AIPerf's rates divide by its window, start_time to end_time; ours by first start to last end
    window = datetime.fromisoformat(files.summary["end_time"]) - datetime.fromisoformat(files.summary["start_time"])
    longer = 1 + found["window_excess_pct"].value / 100
    assert window.total_seconds() / found["duration_s"].value == pytest.approx(longer, rel=1e-4)
    for ours, theirs in (
        ("output_tokens_per_s", "output_token_throughput"), ("total_tokens_per_s", "total_token_throughput"),
        ("input_tokens_per_s", "input_token_throughput"), ("request_rate", "request_throughput"), ("goodput", "goodput"),
    ):  # fmt: skip
        assert found[ours].value == pytest.approx(files.stat(theirs) * longer, rel=1e-6), ours
    assert -20 < found["littles_law_residual_pct"].value <= 0.5


@pytest.fixture
def copied(tmp_path):
    return shutil.copytree(REAL / "c1", tmp_path / "aiperf")


def edit(folder, **changes):
    path = folder / "profile_export_aiperf.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def test_bad_summaries(copied):
    path = copied / "profile_export_aiperf.json"
    whole = path.read_text()
    for text, said in ((whole[: len(whole) // 2], "not JSON"), ("[]", "no aiperf_version"), ("{}", "no aiperf_version")):
        path.write_text(text)
        with pytest.raises(ArchiveError, match=said):
            read_phase(copied)
    path.write_text(whole)
    edit(copied, schema_version="2.0")
    with pytest.raises(ArchiveError, match="schema_version"):
        read_phase(copied)
    edit(copied, schema_version="1.4", benchmark_duration={"unit": "ms", "avg": 5.0})
    with pytest.raises(ArchiveError, match="unit 'ms'"):
        compute(read_phase(copied), TWELVE, 1, {})
    path.unlink()
    with pytest.raises(ArchiveError, match="missing"):
        read_phase(copied)


def test_bad_records_are_reported_and_the_rest_is_used(copied):
    path = copied / "profile_export.jsonl"
    lines = path.read_text().splitlines()
    row = json.loads(lines[-1])
    row["metrics"]["request_latency"]["value"] = float("nan")
    row2 = json.loads(lines[-2])
    row2["metrics"]["time_to_first_token"]["unit"] = "tokens"
    path.write_text("\n".join([*lines[:-2], json.dumps(row2), json.dumps(row), lines[0][:100]]) + "\n")
    files = read_phase(copied)
    said = "\n".join(files.problems)
    assert "NaN" in said
    assert "not a time" in said
    assert "JSONDecodeError" in said
    assert "counts 12 successful requests, profile_export.jsonl holds 10" in said
    edit(copied, benchmark_duration={"unit": "sec", "avg": float("nan")})
    assert compute(read_phase(copied), TWELVE, 1, {})["request_rate"].why == "benchmark_duration is missing"


# Four of five requests whose tokens after the first arrived with it: W = TTFT, so TPOT and ITL are 0.
BUFFERED = [record(100, 100, 10, 5, itl=0.0)] * 4 + [record(100, 500, 10, 5, itl=100)]


def test_tokens_that_arrive_together_have_no_reciprocal():
    found = compute(phase(BUFFERED), TWELVE, 2, {})
    assert found["tpot_p50_ms"].value == 0
    assert found["interactivity_median_tpot"].value is None
    assert found["interactivity_median_tpot"].why == "cannot be computed: median TPOT is 0"
    assert found["interactivity_mean_inverse_itl"].value == 10
    assert found["output_tokens_per_s"].value == pytest.approx(12.5)
    assert reconcile(BUFFERED, 2.0, 2) is None
    alone = compute(phase(BUFFERED[:4]), TWELVE, 2, {})
    assert alone["interactivity_mean_inverse_itl"].why == "cannot be computed: no ITL is above 0"


def test_no_division_by_what_is_zero():
    zero = record(0, 0, 0, 0, itl=0)
    for records in ([], [zero], [record(0, 0, 5, 5, itl=0)], BUFFERED[:4]):
        for duration in (0, 2.0, -1.0):
            files = phase(records, duration, request_throughput={"unit": "requests/sec", "avg": 0.0})
            found = compute(files, Denominators("GPU", 0, 0, 0), 2, {})
            assert all((m.value is None) == bool(m.why) for m in found.values())
            assert reconcile(records, duration, 2) is None
