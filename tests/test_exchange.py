"""Exchange formats: round trips, denominators, the llm-d report against its own package, AIPerf's real files, bad input."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from llmd_benchmark_report import BenchmarkReportV02, load_benchmark_report

from pdlaunch.aiperf_files import read_phase
from pdlaunch.errors import ArchiveError
from pdlaunch.exchange import aiperf, inferencex, llmd, points
from pdlaunch.exchange.command import convert, export, load
from pdlaunch.exchange.points import Role, points_of, statistics
from pdlaunch.metrics_defs import Denominators, compute
from pdlaunch.node.spec import LoadPhase
from pdlaunch.report import command
from pdlaunch.report.command import Choice
from pdlaunch.runread import read_run
from tests.runfactory import Shape, seal, write_run

ROOT = Path(__file__).parent.parent
REAL = Path(__file__).parent / "data" / "aiperf-0.13.0"
SMALL = Shape(loads=(LoadPhase("c2", 64, 8, 6, concurrency=2), LoadPhase("r3", 64, 8, 6, request_rate_per_s=3.0)))


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


@pytest.fixture
def both(results):
    return points_of(read_run(write_run(results, SMALL)))


def close(a, b):
    if isinstance(a, dict):
        return set(a) == set(b) and all(close(a[k], b[k]) for k in a)
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-12)
    return a == b


def test_points_are_the_definitions(both, results):
    closed = both[0]
    metrics = read_run(next(results.glob("*/*"))).phases[0].metrics
    assert closed.per_gpu()["total_per_gpu"] == pytest.approx(metrics["total_tokens_per_s_per_gpu"].value)
    assert closed.per_gpu()["output_per_decode_gpu"] == pytest.approx(metrics["output_tokens_per_s_per_decode_gpu"].value)
    assert closed.per_gpu()["input_per_prefill_gpu"] == pytest.approx(metrics["input_tokens_per_s_per_prefill_gpu"].value)
    assert closed.roles == {"prefill": Role(4, 1, 1, 1, 4), "decode": Role(8, 1, 1, 1, 8)}
    assert closed.stats["tpot_ms"]["p90"] == pytest.approx(metrics["tpot_p90_ms"].value)
    assert statistics([]) == {}
    assert statistics([1.0, 3.0])["sd"] == 1.0


@pytest.mark.parametrize("form", [aiperf, llmd, points])
def test_round_trip_loses_nothing(both, form):
    write, read = (form.write, form.read) if form is not points else (points.to_json, points.from_json)
    for point in both:
        assert read(json.loads(json.dumps(write(point), allow_nan=False))) == point


def test_inferencex_row_and_its_denominators(both):
    row = inferencex.write(both[0])
    point = both[0]
    assert row["tput_per_gpu"] == pytest.approx(point.rates["total"] / 12)
    assert row["output_tput_per_gpu"] == pytest.approx(point.rates["output"] / 8)
    assert row["input_tput_per_gpu"] == pytest.approx(point.rates["input"] / 4)
    assert row["median_intvty"] == pytest.approx(1000 / point.stats["tpot_ms"]["p50"])
    assert row["p99_ttft"] == pytest.approx(point.stats["ttft_ms"]["p99"] / 1000)
    assert (row["num_prefill_gpu"], row["num_decode_gpu"], row["prefill_tp"], row["decode_tp"]) == (4, 8, 4, 8)
    again = inferencex.read(json.loads(json.dumps(row)))
    assert close(again.rates, {k: v for k, v in point.rates.items() if k != "request"})
    assert again.roles == point.roles
    for name in ("ttft_ms", "tpot_ms", "itl_ms", "latency_ms"):
        assert close(again.stats[name], {k: v for k, v in point.stats[name].items() if k in ("mean", "p50", "p90", "p99", "sd")})
    second = inferencex.write(again)
    assert {k: v for k, v in second.items() if isinstance(v, str | int | bool)} == {
        k: v for k, v in row.items() if isinstance(v, str | int | bool)
    }
    assert all(math.isclose(second[k], v, rel_tol=1e-12) for k, v in row.items() if isinstance(v, float))


def test_a_row_of_somebody_else_keeps_what_we_do_not_know(both):
    row = inferencex.write(both[0]) | {"power_valid": True, "joules_per_output_token": 1.5, "router": {"name": "kv", "version": "1"}}
    again = inferencex.write(inferencex.read(row))
    assert (again["power_valid"], again["joules_per_output_token"], again["router"]) == (True, 1.5, {"name": "kv", "version": "1"})


def test_an_aggregated_row():
    row = {"hw": "h", "conc": 4, "model": "m", "framework": "vllm", "isl": 1, "osl": 2, "disagg": False, "tp": 4, "pp": 1, "dp": 2,
           "tput_per_gpu": 30.0, "output_tput_per_gpu": 20.0, "input_tput_per_gpu": 10.0, "mean_tpot": 0.01}  # fmt: skip
    point = inferencex.read(row)
    assert (point.gpus, point.rates) == (8, {"input": 80.0, "output": 160.0, "total": 240.0})
    again = inferencex.write(point)
    assert all(again[k] == pytest.approx(v) if isinstance(v, float) else again[k] == v for k, v in row.items())


def test_what_the_row_cannot_hold_is_refused(both, results):
    with pytest.raises(ArchiveError, match="no concurrency"):
        inferencex.write(both[1])
    with pytest.raises(ArchiveError, match="without GPUs"):
        inferencex.write(points_of(read_run(write_run(results, SMALL, gpu="", job="20260101T000000Z-2")))[0])


def test_llmd_report_is_valid_for_its_own_package(both, tmp_path):
    for point in both:
        body = llmd.write(point)
        report = BenchmarkReportV02.model_validate(body)
        latency = report.results.request_performance.aggregate.latency
        assert latency.time_to_first_token.p99 == pytest.approx(point.stats["ttft_ms"]["p99"] / 1000)
        assert report.scenario.load.standardized.concurrency == point.concurrency
        assert [c.standardized.role.value for c in report.scenario.stack] == ["prefill", "decode"]
        assert [c.standardized.accelerator.count for c in report.scenario.stack] == [4, 8]
        assert load_benchmark_report(body).version == "0.2.1"


def test_llmd_without_our_own_part_still_holds_the_standard_one(both):
    point = both[0]
    body = json.loads(BenchmarkReportV02.model_validate(llmd.write(point)).model_dump_json())
    body["scenario"]["load"]["native"]["config"] = None
    again = llmd.read(body)
    assert close(again.stats, point.stats)
    assert close(again.rates, point.rates)
    assert again.roles == point.roles
    assert (again.concurrency, again.isl, again.osl, again.requests, again.failures) == (2, 64, 8, 6, 0)


@pytest.mark.parametrize("name", ["c1", "c4", "c16"])
def test_aiperfs_own_files(name):
    body = json.loads((REAL / name / "profile_export_aiperf.json").read_text())
    point = aiperf.read(body)
    assert (point.concurrency, point.isl, point.osl, point.model) == (int(name[1:]), 256, 32, "mock")
    assert point.rates["output"] == body["output_token_throughput"]["avg"]
    again = aiperf.write(replace(point, extra={}))
    for metric in ("time_to_first_token", "inter_token_latency", "request_latency", "input_sequence_length", "output_sequence_length"):
        theirs = {k: v for k, v in body[metric].items() if k not in ("sum",)}
        assert {k: again[metric][k] for k in theirs} == pytest.approx(theirs)
    ours = compute(read_phase(REAL / name), Denominators("rank", 1, 1, 0), point.concurrency, {})
    ttft = statistics([r.ttft_ms for r in read_phase(REAL / name).records])
    assert ttft == pytest.approx(point.stats["ttft_ms"])
    assert point.stats["ttft_ms"]["p99"] == pytest.approx(ours["ttft_p99_ms"].value)
    BenchmarkReportV02.model_validate(llmd.write(replace(point, roles={"decode": Role(1, 1, 1, 1, 1)})))


def test_export_and_import_commands(results, tmp_path):
    run = write_run(results, SMALL)
    bad = write_run(results, SMALL, verdict="INVALID", job="20260101T000000Z-3")
    answer = export(Choice((str(run), str(bad))), results, "llmd", tmp_path / "out")
    assert answer.code == 1
    assert "is INVALID" in answer.text
    files = sorted((tmp_path / "out").iterdir())
    assert [f.name.rsplit(".", 2)[1] for f in files] == ["c2", "r3"]
    assert load(files[0], "llmd")[0].phase == "c2"
    with pytest.raises(ArchiveError, match="exists"):
        export(Choice((str(run),)), results, "llmd", tmp_path / "out")
    rows = export(Choice((str(run),)), results, "inferencex", tmp_path / "ix")
    assert rows.code == 1
    assert "no concurrency" in rows.text
    assert len(json.loads((tmp_path / "ix" / "agg_bmk.json").read_text())) == 1
    convert(tmp_path / "ix" / "agg_bmk.json", "inferencex", "llmd", tmp_path / "one.json")
    BenchmarkReportV02.model_validate(json.loads((tmp_path / "one.json").read_text()))
    with pytest.raises(ArchiveError, match="exists"):
        convert(tmp_path / "ix" / "agg_bmk.json", "inferencex", "llmd", tmp_path / "one.json")


@pytest.mark.parametrize(("source", "text", "said"), [
    ("inferencex", "[{}]", r"\[0\]: row without hw"), ("inferencex", "[1]", "int where an object"), ("inferencex", "{", "not JSON"),
    ("llmd", '{"version": "0.1"}', "version '0.1'"), ("llmd", '{"version": "0.2.1"}', "KeyError"), ("aiperf", "{}", "no aiperf_version"),
    ("aiperf", '{"aiperf_version": "1", "request_latency": {"unit": "s", "avg": 1}}', "unit 's'"), ("points", "{}", "KeyError"),
])  # fmt: skip
def test_bad_files_are_named(tmp_path, source, text, said):
    path = tmp_path / "in.json"
    path.write_text(text)
    with pytest.raises(ArchiveError, match=said) as e:
        load(path, source)
    assert str(path) in str(e.value)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("isl",), "x", "isl: expected int"),
        (("stats",), None, "stats: expected an object"),
        (("stats", "ttft_ms", "mean"), "x", "stats.ttft_ms.mean: expected float"),
        (("stats", "ttft_ms", "mean"), float("nan"), "stats.ttft_ms.mean: nan"),
        (("rates", "output"), 10**400, "too large"),
        (("roles", "decode"), {"tp": 1}, "TypeError"),
        (("roles", "decode", "tp"), None, "roles.decode.tp: expected int"),
        (("extra",), [], "extra: []"),
        (("model",), "\ud800", "text that a file can hold"),
        (("start",), "yesterday", "a time as in"),
    ],
)
def test_a_point_of_wrong_types_is_refused_where_it_is_read(both, tmp_path, path, value, said):
    body = points.to_json(both[0])
    place = body
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    (tmp_path / "p.json").write_text(json.dumps(body))
    for to in ("aiperf", "inferencex", "llmd", "points"):
        with pytest.raises(ArchiveError) as caught:
            convert(tmp_path / "p.json", "points", to, tmp_path / "out.json")
        assert said in str(caught.value)
        assert str(tmp_path / "p.json") in str(caught.value)
    assert not (tmp_path / "out.json").exists()


def test_aiperfs_own_file_has_no_gpus_to_divide_by(tmp_path):
    with pytest.raises(ArchiveError, match="not known how many GPUs"):
        convert(REAL / "c4" / "profile_export_aiperf.json", "aiperf", "inferencex", tmp_path / "row.json")


def test_unknown_formats(tmp_path, results):
    run = write_run(results, SMALL)
    for call in (lambda: load(tmp_path / "x", "csv"), lambda: convert(tmp_path / "x", "llmd", "csv", tmp_path / "y"),
                 lambda: export(Choice((str(run),)), results, "csv", tmp_path / "z")):  # fmt: skip
        with pytest.raises(ArchiveError, match="csv"):
            call()
    with pytest.raises(ArchiveError, match="does not exist"):
        load(tmp_path / "x", "llmd")


def _edited(run, change):
    """Every record of the run's phases changed, and the run sealed again."""
    for path in run.glob("load/*/aiperf/profile_export.jsonl"):
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        for row in rows:
            change(row["metrics"])
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    seal(run)


def buffered(metrics):
    metrics["request_latency"]["value"] = metrics["time_to_first_token"]["value"]
    metrics["inter_token_latency"]["value"] = 0.0


def test_a_run_of_buffered_tokens_is_reported_compared_and_exported(results, tmp_path):
    zero, other = write_run(results, SMALL), write_run(results, SMALL, job="20261019T130000Z-1002")
    _edited(zero, buffered)
    phase = read_run(zero).phases[0]
    assert phase.metrics["interactivity_median_tpot"].why == "cannot be computed: median TPOT is 0"
    choice = Choice((str(zero), str(other)))
    page = command.report(choice, results, ROOT, out=tmp_path / "both.html")
    assert page.code == 0
    assert "cannot be computed: median TPOT is 0" in (tmp_path / "both.html").read_text()
    assert command.compare_runs(choice, results).code == 0
    assert command.write_page_of_run(zero, ROOT).exists()
    for form in ("aiperf", "llmd", "points", "inferencex"):
        export(choice, results, form, tmp_path / form)
    rows = json.loads((tmp_path / "inferencex" / "agg_bmk.json").read_text())
    assert [("median_intvty" in row, row["median_tpot"] > 0) for row in rows] == [(False, False), (True, True)]


def test_a_phase_without_length_has_no_inferencex_row(both):
    with pytest.raises(ArchiveError, match="no rates"):
        inferencex.write(replace(both[0], rates={}))
    assert replace(both[0], rates={}).per_gpu() == {}


def test_an_export_that_holds_nothing_says_so_once(results, tmp_path):
    run = write_run(results, replace(SMALL, gpu="", loads=SMALL.loads[:1]))
    with pytest.raises(ArchiveError) as caught:
        export(Choice((run.name,)), results, "inferencex", tmp_path / "out")
    said = str(caught.value)
    assert said.count("rule:") == 1
    assert said.count(run.name) == 1
    assert "a run without GPUs" in said
    assert "InferenceX rows divide by GPUs" in said


def test_engines_on_one_gpu_are_never_exported_as_if_apart(results, tmp_path):
    """Prefill and decode on GPU 3 of node 0: 11 GPUs, not 12."""
    run = write_run(results, replace(SMALL, loads=SMALL.loads[:1]))
    spec = json.loads((run / "spec.json").read_text())
    spec["engines"][1]["ranks"][0] |= {"node": 0, "gpus": list(range(3, 11))}
    (run / "spec.json").write_text(json.dumps(spec))
    seal(run)
    (point,) = points_of(read_run(run))
    assert (point.gpus, point.roles["prefill"].gpus, point.roles["decode"].gpus) == (11, 4, 8)
    assert point.per_gpu()["output_per_gpu"] == pytest.approx(point.rates["output"] / 11)
    choice = Choice((str(run),))
    with pytest.raises(ArchiveError, match="engines share GPUs") as caught:
        export(choice, results, "inferencex", tmp_path / "ix")
    assert "no place to say so" in str(caught.value)
    for to in ("aiperf", "llmd", "points"):
        answer = export(choice, results, to, tmp_path / to)
        assert f"note  {read_run(run).id}: engines share GPUs (prefill-0 and decode-0 on GPU 3" in answer.text
        assert load(Path(answer.text.splitlines()[-1]), to) == [point]
    body = llmd.write(point)
    assert "engines share GPUs" in body["run"]["description"]
    BenchmarkReportV02.model_validate(body)
    (tmp_path / "points.json").write_text(json.dumps(points.to_json(point)))
    with pytest.raises(ArchiveError, match="engines share GPUs"):
        convert(tmp_path / "points.json", "points", "inferencex", tmp_path / "row.json")


@pytest.mark.parametrize("name", ["recall/before.jsonl", "evidence.json", "gpu/decode-0.csv", "nodes/decode-0.json", "events.jsonl"])
def test_a_changed_byte_of_any_file_is_not_exported(results, tmp_path, name):
    run = write_run(results, SMALL)
    path = run / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    with pytest.raises(ArchiveError, match=f"changed since it was archived: {name}"):
        export(Choice((str(run),)), results, "points", tmp_path / "out", include_invalid=True)
    assert not (tmp_path / "out").exists()
