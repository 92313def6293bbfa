"""Comparisons: typed differences, refusals, noise, and input that is broken in every way the archive can be."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pdlaunch.archive import verify
from pdlaunch.compare import compare, grouped, judge, why_incomparable
from pdlaunch.errors import ArchiveError
from pdlaunch.node.spec import LoadPhase
from pdlaunch.report.text import comparison
from pdlaunch.runread import read_run
from pdlaunch.settings import flags_of, hybrid_manager, speculation
from pdlaunch.stats import Spread
from tests.runfactory import Shape, seal, write_run

C16 = LoadPhase("c16", 8192, 1024, 32, concurrency=16)
ONE = Shape(loads=(C16,))
UNREAD = ("manifest.json", "spec.json")
"""Read before anything else: a change of them is its own error."""


@pytest.fixture
def make(tmp_path):
    count = iter(range(100))

    def one(**changes):
        changes.setdefault("job", f"20261019T12{next(count):02d}00Z-{1000 + next(count)}")
        return read_run(write_run(tmp_path / "results", ONE, **changes))

    return one


def line(found, metric, group="B"):
    return next(x for x in found.lines if x.metric == metric and x.other_group == group)


def test_layouts_side_by_side(make):
    slow, fast = make(recipe="gemma4-p8d8", prefill_tp=8), make(speed=1.25)
    found = compare([slow, fast])
    by_name = {d.name: d for d in found.differences}
    assert by_name["prefill tensor_parallel"].values == ("8", "4")
    assert by_name["prefill tensor_parallel"].kind == "engines"
    ttft = line(found, "ttft_p50_ms")
    assert ttft.finding == "better"
    assert "single runs" in ttft.why
    assert ttft.delta_pct == pytest.approx(-20, abs=1.5)
    per_gpu = line(found, "total_tokens_per_s_per_gpu")
    whole = line(found, "total_tokens_per_s")
    assert per_gpu.base.mean * 16 == pytest.approx(whole.base.mean)
    assert per_gpu.other.mean * 12 == pytest.approx(whole.other.mean)
    assert line(found, "total_per_output").finding == "within noise"
    json.dumps(found.to_json(), allow_nan=False)


def test_repetitions_are_grouped_and_give_the_noise(make):
    runs = [make(seed=i) for i in range(3)] + [make(seed=10 + i, hybrid=True) for i in range(3)]
    found = compare(runs)
    assert [len(g.runs) for g in found.groups] == [3, 3]
    latency = line(found, "latency_p50_ms")
    assert (latency.base.n, latency.other.n) == (3, 3)
    assert latency.finding == "within noise"
    assert "95 % interval" in latency.why
    names = {d.name for d in found.differences}
    assert names == {"prefill hybrid manager", "decode hybrid manager"}


def test_findings_by_hand():
    one, three = Spread.of([100.0]), Spread.of([100.0, 102.0, 98.0])
    assert judge("lower", one, Spread.of([104.0]))[0] == "within noise"
    assert judge("lower", one, Spread.of([106.0]))[0] == "worse"
    assert judge("higher", one, Spread.of([106.0]))[0] == "better"
    assert judge("", one, Spread.of([106.0]))[0] == "changed"
    # prediction interval of one more run: t(0.975, 2) * 2 * sqrt(1 + 1/3) = 4.3027 * 2.3094 = 9.94
    assert judge("lower", three, Spread.of([109.9]))[0] == "within noise"
    assert judge("lower", three, Spread.of([110.0]))[0] == "worse"
    assert judge("lower", three, Spread.of([90.0, 91.0, 92.0]))[0] == "better"
    assert judge("lower", Spread.of([]), one) == ("not comparable", "not measured on one side")


def test_invalid_runs_are_refused_unless_asked_for(make):
    good, other, bad = make(), make(hybrid=True), make(recipe="gemma4-stock", verdict="INVALID", recall=0, patches=())
    found = compare([good, other, bad])
    assert found.refused == ((bad.id, "is INVALID, not VALID: recall before load: 0 of 9"),)
    with pytest.raises(ArchiveError, match="1 of 2 runs can be compared") as e:
        compare([good, bad])
    assert "--include-invalid" in str(e.value)
    shown = compare([good, bad], include_invalid=True)
    assert shown.marked == (bad.id,)
    assert {d.name for d in shown.differences if d.kind == "patches"} == {"patch vllm-0.31.0-nixl-per-region-kv-heads"}


@pytest.mark.parametrize(("changes", "why"), [
    ({"model": "google/gemma-3-27b-it"}, "another model"),
    ({"loads": (replace(C16, input_tokens=1024),)}, "another workload: ISL 8192, OSL 1024, 16 users against ISL 1024, OSL 1024, 16 users"),
    ({"loads": (replace(C16, connection_reuse="pooled"),)}, "another connection reuse"),
    ({"loads": ()}, "no load phase"),
])  # fmt: skip
def test_not_comparable(make, changes, why):
    found = compare([make(), make(**changes)])
    assert found.lines == ()
    assert why in found.incomparable[0][1]


def test_a_simulator_is_not_compared_with_a_model(make):
    a, b = make(), make(hybrid=True)
    b.spec["proof"]["text_checked"] = False
    assert "never checked" in why_incomparable(*grouped([a, b]))


def test_cpu_ranks_are_not_gpus(make):
    found = compare([make(), make(gpu="")])
    assert line(found, "output_tokens_per_s_per_gpu").finding == "not comparable"
    assert line(found, "output_tokens_per_s").finding == "within noise"


def test_phases_that_only_one_ran_are_said(make):
    more = make(loads=(C16, replace(C16, name="c32", concurrency=32)), hybrid=True)
    assert compare([make(), more]).unmatched == ("ISL 8192, OSL 1024, 32 users, connections never: only in B",)


def test_two_runs_with_one_id(make, tmp_path):
    a, b = make(), make(hybrid=True)
    copy = read_run(shutil.copytree(a.path, tmp_path / "elsewhere" / a.path.parent.name / a.path.name))
    found = compare([a, b, copy])
    assert "same id" in found.refused[0][1]
    assert len(found.groups) == 2


def test_a_changed_byte_is_refused_even_with_include_invalid(make):
    a, b, c = make(), make(hybrid=True), make(prefill_tp=8)
    target = c.path / "load/c16/aiperf/profile_export.jsonl"
    data = bytearray(target.read_bytes())
    data[200] ^= 1
    target.write_bytes(bytes(data))
    found = compare([a, b, read_run(c.path)], include_invalid=True)
    assert found.refused == ((c.id, "changed since it was archived: load/c16/aiperf/profile_export.jsonl"),)


def test_a_difference_that_verify_finds_is_refused(make):
    """No number is read from most of these files; the verdict rests on them."""
    good, other, run = make(), make(hybrid=True), make(prefill_tp=8)
    names = sorted(p.relative_to(run.path).as_posix() for p in run.path.rglob("*") if p.is_file())
    assert {"recall/before.jsonl", "evidence.json", "gpu/decode-0.csv", "nodes/decode-0.json"} <= set(names)
    changes = {name: lambda path: path.write_bytes(path.read_bytes()[:-1] + b"?") for name in names if name not in UNREAD}
    changes |= {"gpu/prefill-0.csv": Path.unlink, "recall/more.jsonl": lambda path: path.write_text("{}")}
    for name, change in changes.items():
        path = run.path / name
        kept = path.read_bytes() if path.exists() else None
        change(path)
        again = read_run(run.path)
        assert not verify(run.path).intact
        assert (again.word, again.valid, again.verified) == ("CHANGED", False, False)
        (refusal,) = compare([good, other, again], include_invalid=True).refused
        assert refusal[1].startswith(f"changed since it was archived: {name}")
        path.unlink(missing_ok=True) if kept is None else path.write_bytes(kept)
    assert read_run(run.path).verified


def test_a_run_without_its_manifest_is_not_valid(make):
    good, other, run = make(), make(hybrid=True), make(prefill_tp=8)
    (run.path / "manifest.json").unlink()
    again = read_run(run.path)
    assert (again.word, again.verdict["verdict"]) == ("UNFINISHED", "VALID")
    found = compare([good, other, again])
    assert found.refused == ((run.id, "is UNFINISHED, not VALID: it has no manifest.json, which is written last"),)


def share(run, gpu, *, control=False):
    """The run with its decode engine, or a control engine, put on a GPU of node 0 that prefill uses."""
    spec = json.loads((run.path / "spec.json").read_text())
    _, decode = spec["engines"]
    if control:
        (part,) = decode["ranks"]
        spec["engines"].append({**decode, "name": "control-0", "role": "control", "ranks": [{**part, "gpus": [gpu]}]})
    else:
        decode["ranks"][0] |= {"node": 0, "gpus": list(range(gpu, gpu + 8))}
    (run.path / "spec.json").write_text(json.dumps(spec))
    seal(run.path)
    return read_run(run.path)


def test_a_gpu_that_engines_share_counts_once(make):
    apart, together = make(), share(make(), 3)
    assert (apart.denominators.total, apart.sharing.text) == (12, "")
    per = together.denominators
    assert (per.prefill, per.decode, per.shared, per.total) == (4, 8, 1, 11)
    assert together.sharing.pattern == "prefill+decode on 1 GPU"
    assert "prefill-0 and decode-0 on GPU 3 of node 0" in together.sharing.text
    phase = together.phases[0].metrics
    assert phase["output_tokens_per_s_per_gpu"].value * 11 == pytest.approx(phase["output_tokens_per_s"].value)
    assert phase["output_tokens_per_s_per_decode_gpu"].value * 8 == pytest.approx(phase["output_tokens_per_s"].value)


def test_gpus_of_equal_number_on_two_nodes_are_two(make):
    run = make()
    assert {e["ranks"][0]["node"]: e["ranks"][0]["gpus"][0] for e in run.spec["engines"]} == {0: 0, 1: 0}
    assert run.denominators.shared == 0


def test_a_cpu_run_shares_no_gpu(make):
    run = make(gpu="")
    assert (run.denominators.kind, run.denominators.total, run.denominators.shared, run.sharing.text) == ("rank", 12, 0, "")


@pytest.mark.parametrize(
    ("how", "pattern"), [({"gpu": 3}, "prefill+decode on 1 GPU"), ({"gpu": 2, "control": True}, "decode+control on 1 GPU")]
)
def test_where_engines_share_gpus_nothing_is_called_better(make, how, pattern):
    slow, fast = make(), make(speed=5, hybrid=True)
    assert line(compare([slow, fast]), "ttft_p50_ms").finding == "better"
    shared = share(slow, **how)
    found = compare([shared, fast])
    ((name, said),) = found.shared
    assert (name, shared.sharing.pattern) == ("A", pattern)
    assert "the latency and per-GPU figures are not those of separate GPUs" in said
    assert ("hardware", (pattern, "none")) in [(d.kind, d.values) for d in found.differences if d.name == "engines that share GPUs"]
    assert {x.finding for x in found.lines} <= {"changed", "within noise", "not comparable"}
    assert "engines share GPUs in another way" in line(found, "ttft_p50_ms").why
    assert line(found, "ttft_p50_ms").delta_pct == pytest.approx(-80, abs=1)
    assert "[shared GPUs]" in found.groups[0].label
    shown = comparison(found)
    assert f"SHARED GPUS  A: {said}" in shown
    assert "Better:" not in shown
    assert found.to_json()["shared_gpus"] == [["A", said]]


def test_runs_that_share_alike_are_compared_and_marked(make):
    found = compare([share(make(), 3), share(make(speed=5, hybrid=True), 3)])
    assert line(found, "ttft_p50_ms").finding == "better"
    assert [name for name, _ in found.shared] == ["A", "B"]


def test_broken_folders(make, tmp_path):
    run = make()
    foreign = tmp_path / "foreign"
    foreign.mkdir()
    for path, said in (
        (foreign, "is not an archived run"),
        (tmp_path / "none", "does not exist"),
        (run.path / "spec.json", "is no folder"),
    ):
        with pytest.raises(ArchiveError, match=said):
            read_run(path)
    spec = run.path / "spec.json"
    whole = spec.read_text()
    spec.write_text(whole.replace('"schema": 1', '"schema": 2', 1))
    seal(run.path)
    with pytest.raises(ArchiveError, match="schema 2") as e:
        read_run(run.path)
    assert "this version reads schema 1" in str(e.value)
    spec.write_text(whole[:500])
    seal(run.path)
    with pytest.raises(ArchiveError, match="not JSON"):
        read_run(run.path)
    spec.unlink()
    seal(run.path)
    with pytest.raises(ArchiveError, match="missing"):
        read_run(run.path)


def test_a_truncated_run_is_unfinished_and_the_rest_is_read(make):
    run = make()
    (run.path / "verdict.json").unlink()
    (run.path / "manifest.json").unlink()
    (run.path / "events.jsonl").write_text('{"stage": "submitted"}\n{"sta')
    again = read_run(run.path)
    assert (again.word, again.valid, again.verified) == ("UNFINISHED", False, False)
    said = "\n".join(again.problems)
    for part in ("no manifest.json", "verdict.json: missing", "events.jsonl:2: not JSON"):
        assert part in said
    assert again.phases[0].metrics["ttft_p50_ms"].value


def test_nan_and_a_zero_length_phase(make):
    run, other = make(), make(hybrid=True)
    folder = run.path / "load/c16/aiperf"
    summary = folder / "profile_export_aiperf.json"
    body = json.loads(summary.read_text())
    body["benchmark_duration"]["avg"] = 0.0
    summary.write_text(json.dumps(body))
    records = folder / "profile_export.jsonl"
    lines = records.read_text().splitlines()
    row = json.loads(lines[0])
    row["metrics"]["time_to_first_token"]["value"] = float("nan")
    records.write_text("\n".join([json.dumps(row), *lines[1:]]) + "\n")
    seal(run.path)
    found = compare([other, read_run(run.path)])
    said = "\n".join(found.problems)
    assert "zero length" in said
    assert "NaN" in said
    assert line(found, "request_rate").finding == "not comparable"
    assert line(found, "ttft_p50_ms").finding == "within noise"
    json.dumps(found.to_json(), allow_nan=False)


def test_nothing_is_written(make):
    runs = [make(), make(hybrid=True)]
    before = {p: p.stat().st_mtime_ns for r in runs for p in r.path.rglob("*")}
    compare(runs)
    assert {p: p.stat().st_mtime_ns for r in runs for p in r.path.rglob("*")} == before


def test_command_lines():
    argv = ["%{python}", "-m", "x", "--a", "1", "--b=2", "--switch", "--no-cache", "--many", "3", "4"]
    assert flags_of(argv) == {"--a": "1", "--b": "2", "--switch": "on", "--cache": "off", "--many": "3 4"}
    assert [hybrid_manager(a) for a in (["--disable-hybrid-kv-cache-manager"], ["--no-disable-hybrid-kv-cache-manager"], [])] == [
        "off",
        "on",
        "default",
    ]
    assert speculation(["--speculative-config", '{"method": "mtp", "num_speculative_tokens": 3}']) == "mtp x3"
    assert speculation(["--x"]) == ""


def test_secrets_are_no_settings(make):
    run = make()
    run.spec["engines"][0]["env"]["HF_TOKEN"] = "hf_secret"
    (group,) = grouped([run])
    assert "hf_secret" not in {s.value for s in group.settings.values()}
