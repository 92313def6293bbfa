"""The page: what it says, that it is self-contained, and how it looks to a real browser without a network."""

from __future__ import annotations

import json
import math
import re
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from pdlaunch.errors import ArchiveError
from pdlaunch.geometry import LayerKind, hand_off
from pdlaunch.node.contracts import Check, Verdict
from pdlaunch.node.spec import LoadPhase
from pdlaunch.report import command
from pdlaunch.report import page as pages_of
from pdlaunch.report.command import Choice
from pdlaunch.report.detail import duration, figure
from pdlaunch.report.drawings import handoff_svg, handoff_text, milestones, placement, timeline
from pdlaunch.report.handoff import kinds_of, log_agrees, transfers
from pdlaunch.report.series import pareto_chart, turnovers
from pdlaunch.runread import read_run
from tests.chromium import chromium
from tests.runfactory import Shape, seal, write_run

ROOT = Path(__file__).parent.parent
C2 = LoadPhase("c2", 64, 8, 6, concurrency=2)
SMALL = Shape(loads=(C2,))
LADDER = tuple(LoadPhase(f"c{c}", 1, 1000, max(8, c), concurrency=c) for c in (1, 4, 16, 64))
SLIDING = LayerKind("sliding", tuple(range(50)), 16, 256, 256)
GLOBAL = LayerKind("full", tuple(range(50, 60)), 4, 512, 512)


def test_the_seeds_hand_off():
    """Prefill GPU n is read by decode GPUs 2n and 2n + 1: sliding layers in halves, global layers whole."""
    for kind, whole in ((SLIDING, False), (GLOBAL, True)):
        found = hand_off([kind], 4, 8)
        assert [(r.decode_rank, r.prefill_rank, r.whole) for r in found] == [(d, d // 2, whole) for d in range(8)]


def test_hand_off_in_words_and_as_drawing():
    assert handoff_text(SLIDING, 4, 8) == [
        "4 per prefill rank, 2 per decode rank",
        "every decode rank reads 0.5 of its prefill rank's block",
    ]
    assert "each head is copied onto 2 decode ranks" in handoff_text(GLOBAL, 4, 8)
    svg = handoff_svg(GLOBAL, 4, 8)
    assert svg.count("<path") == 8
    assert svg.count("<rect") == 12
    assert handoff_svg(SLIDING, 4, 8).count("<path") == 16


def test_geometry_of_gemma_from_the_repository(tmp_path):
    run = read_run(write_run(tmp_path, SMALL))
    kinds, source = kinds_of(run, ROOT)
    assert {(len(k.layers), k.kv_heads, k.head_size_k) for k in kinds} == {(50, 16, 256), (10, 4, 512)}
    assert source == "models/configs/gemma-4-31b-it.json (outside the archive)"
    assert kinds_of(read_run(write_run(tmp_path, SMALL, model="x/unknown", job="20260101T000000Z-9")), ROOT)[0] == []


def test_a_pair_that_cannot_be_drawn_is_said(results, tmp_path):
    run = write_run(results, SMALL, prefill_tp=3)
    assert "The heads cannot be drawn: 16 KV heads over TP 3" in report(results, run.name)[0].read_text()


def test_a_run_with_files_that_aiperf_wrote(results):
    loads = tuple(LoadPhase(f"c{c}", 256, 32, 6 * c + 6, concurrency=c, warmup_requests=2) for c in (1, 4, 16))
    run = write_run(results, Shape(loads=loads, gpu=""))
    for load in loads:
        shutil.rmtree(run / "load" / load.name / "aiperf")
        shutil.copytree(ROOT / "tests/data/aiperf-0.13.0" / load.name, run / "load" / load.name / "aiperf")
    seal(run)
    found = read_run(run)
    assert found.problems == ()
    assert [p.metrics["requests_ok"].value for p in found.phases] == [12, 30, 102]
    assert [sum(n for _, n in p.prompt_tokens) for p in found.phases] == [14, 32, 104]
    text = report(results, run.name)[0].read_text()
    assert "172.4" in text  # 1000 / median TPOT of c4: 5.80 ms
    assert "tokens/s/rank" in text


def test_the_log_confirms_or_contradicts_the_geometry(tmp_path):
    path = write_run(tmp_path, SMALL)
    (path / "logs").mkdir()
    line = "INFO NIXL per-region KV heads active: rank=0/8 regions=60 heads={}\n"
    (path / "logs" / "decode-0.log").write_text("start\n" + line.format("2x50,1x10"))
    (path / "logs" / "prefill-0.log").write_text(line.format("4x60"))
    seal(path)
    run = read_run(path)
    assert log_agrees(run, "decode", [SLIDING, GLOBAL], 8).startswith("decode: the log agrees: 50 regions of 2, 10 regions of 1")
    assert "logs/decode-0.log:2" in log_agrees(run, "decode", [SLIDING, GLOBAL], 8)
    assert "DIFFERS" in log_agrees(run, "prefill", [SLIDING, GLOBAL], 4)


def test_transfers_by_hand(tmp_path):
    run = read_run(write_run(tmp_path, SMALL))
    # TP8: sliding 2 heads of 256, global 1 head of 512; K and V, bf16, 64 tokens: (50*512 + 10*512) * 2 * 2 * 64 bytes per block and rank
    block = (50 * 512 + 10 * 512) * 256
    before, during, after = transfers(run)
    assert before.predicted == before.moved == 9 * 196 * block * 8  # ceil(12500 / 64) = 196
    assert during.predicted == during.moved == (9 * 196 + 6 * 1) * block * 8
    assert (before.prompts, during.prompts, after.prompts) == (9, 15, 9)


def test_transfers_that_the_run_judged_itself(tmp_path):
    path = write_run(tmp_path, SMALL)
    body = json.loads((path / "evidence.json").read_text())
    source = {"unit": "bytes", "source": "metrics/decode-0.{ready,before_load}.prom"}
    prefix = "transfer.decode.ready-before_load"
    body["values"] |= {f"{prefix}.bytes": {"value": 100, **source}, f"{prefix}.predicted_bytes": {"value": 90, **source},
                       f"{prefix}.requests_counted": {"value": 3, **source},
                       "transfer.decode.before_load-after_load.bytes": {"value": 5, **source},
                       "transfer.decode.before_load-after_load.not_exact": {"value": "preemptions is 2", **source}}  # fmt: skip
    (path / "evidence.json").write_text(json.dumps(body))
    seal(path)
    before, during = transfers(read_run(path))
    assert (before.name, before.prompts, before.predicted, before.moved, before.why) == ("before load", 3, 90, 100.0, "")
    assert "evidence.json transfer.decode.ready-before_load.bytes" in before.source
    assert (during.name, during.predicted, during.why) == ("during load", None, "preemptions is 2")


def test_an_answer_without_token_count_has_no_prediction(tmp_path):
    path = write_run(tmp_path, SMALL)
    rows = [json.loads(x) for x in (path / "recall/before.jsonl").read_text().splitlines()]
    rows[0]["prompt_tokens"] = None
    (path / "recall/before.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    seal(path)
    assert transfers(read_run(path))[0].why == "1 answers without a token count"
    (path / "metrics/decode-0.ready.prom").unlink()
    assert "no ready or before_load snapshot" in transfers(read_run(path))[0].why


def test_stages(tmp_path):
    path = write_run(tmp_path, SMALL)
    bars, problems = timeline(read_run(path))
    assert problems == []
    ready = next(b for b in bars if b.stage == "engines_ready")
    assert (ready.begin_s, ready.end_s) == (55, 395)
    assert ready.source == "events.jsonl:7 and 8"
    assert ("job start to engines ready", 353, "events.jsonl:2, events.jsonl:7 and 8") in milestones(bars)
    text = (path / "events.jsonl").read_text().splitlines()
    (path / "events.jsonl").write_text(
        "\n".join([*text[:7], '{"stage": "x"}', json.dumps({**json.loads(text[8]), "state": "failed"})]) + "\n"
    )
    seal(path)
    bars, problems = timeline(read_run(path))
    assert next(b for b in bars if b.stage == "engines_ready").state == "open"
    assert "events.jsonl:8" in problems[0]
    assert "first_token failed" in problems[1]


def test_placement_shows_free_gpus(tmp_path):
    first, second = placement(read_run(write_run(tmp_path, SMALL)))
    assert [d.role for d in first.devices] == ["prefill"] * 4 + ["free"] * 4
    assert {d.engine for d in second.devices} == {"decode-0"}
    assert first.services == ("etcd", "frontend")
    cpu = placement(read_run(write_run(tmp_path, SMALL, gpu="", job="20260101T000000Z-8")))
    assert [d.role for d in cpu[0].devices] == ["prefill"] * 4


def test_frontier_and_turnover_of_runs(tmp_path):
    on = write_run(tmp_path, Shape(loads=LADDER), speculative_tokens=3, job="20260101T000000Z-1", recipe="mtp")
    off = write_run(tmp_path, Shape(loads=LADDER), job="20260101T000000Z-2")
    runs = [read_run(on), read_run(off)]
    from pdlaunch.compare import compare

    groups = compare(runs).groups
    ((a, b, shape, found),) = turnovers(groups)
    assert (a.name, b.name, shape) == ("A", "B", "ISL 1 / OSL 1000")
    assert found.status == "pays throughout"
    chart = pareto_chart(groups, "GPU")
    assert [v.name for v in chart.variants] == ["ISL 1 / OSL 1000, output tokens", "ISL 1 / OSL 1000, total tokens"]
    labels = {s.label: len(s.points) for s in chart.variants[0].series}
    assert labels["frontier"] + labels["dominated"] == 8


def test_numbers_as_people_read_them():
    assert [figure(v) for v in (None, float("nan"), 0.0, 0.12345, 12.345, 1234.5, 1e7)] == [
        "-",
        "-",
        "0",
        "0.1235",
        "12.35",
        "1,234",
        "10,000,000",
    ]
    assert [duration(v) for v in (0.25, 92.44, 340, 4321)] == ["0.25 s", "92.4 s", "5 min 40 s", "1 h 12 min"]


@pytest.fixture
def results(tmp_path):
    return tmp_path / "results"


def report(results, *names, **options):
    answer = command.report(Choice(names), results, ROOT, **options)
    return Path(answer.text.splitlines()[-1]), answer


def test_the_page_of_one_run_lies_beside_it_and_can_be_made_again(results):
    run = write_run(results, SMALL)
    before = sorted(p.name for p in run.rglob("*"))
    out, answer = report(results, run.name)
    assert (out, answer.code) == (run.parent / f"{run.name}.html", 0)
    assert sorted(p.name for p in run.rglob("*")) == before
    assert report(results, run.name)[0] == out
    assert command.write_page_of_run(run, ROOT) == out


def test_nothing_is_overwritten(results, tmp_path):
    run = write_run(results, SMALL)
    page, other = tmp_path / "page.html", tmp_path / "notes.txt"
    report(results, run.name, out=page)
    other.write_text("mine")
    for out, force, said in ((page, False, "exists"), (other, True, "is no page"), (run / "page.html", True, "inside an archived run")):
        with pytest.raises(ArchiveError, match=said):
            report(results, run.name, out=out, force=force)
    assert other.read_text() == "mine"
    report(results, run.name, out=page, force=True)
    with pytest.raises(ArchiveError, match="no --out"):
        report(results, "*", run.name, str(write_run(results, SMALL, job="20260101T000000Z-3")))
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []


def test_hostile_text_stays_text(results):
    run = write_run(results, SMALL)
    evil = '</script><script>alert(1)</script><img src="https://example.org/x">'
    Verdict("INVALID", evil, (evil,), (Check(evil, False, evil, "9", evil),), True).write(run / "verdict.json")
    seal(run)
    text = report(results, run.name)[0].read_text()
    assert "<script>alert" not in text
    assert "<img" not in text
    data = re.search(r'id="data">(.*?)</script>', text, re.DOTALL).group(1)
    assert "<" not in data
    json.loads(data)


def test_one_file_without_a_link_to_anything(results):
    run = write_run(results, SMALL)
    out = report(results, run.name)[0]
    text = out.read_text()
    assert out.stat().st_size < 500_000
    assert "default-src 'none'" in text
    assert not re.search(r"<(script|link|img|iframe)[^>]+(src|href)=", text)
    assert "sourceMappingURL" not in text
    assert "@import" not in text


def test_invalid_and_broken_runs_are_marked_and_the_rest_is_shown(results, tmp_path):
    good, other = write_run(results, SMALL, job="20260101T000000Z-1"), write_run(results, SMALL, job="20260101T000000Z-2", prefill_tp=8)
    bad = write_run(results, SMALL, job="20260101T000000Z-3", verdict="INVALID", recall=0, recipe="stock")
    broken = write_run(results, SMALL, job="20260101T000000Z-4")
    (broken / "spec.json").write_text("{")
    changed = write_run(results, SMALL, job="20260101T000000Z-5", hybrid=True)
    (changed / "load/c2/aiperf/profile_export.jsonl").write_text("{}\n")
    out, answer = report(results, *(str(p) for p in (good, other, bad, broken, changed)), out=tmp_path / "p.html")
    text = out.read_text()
    assert answer.code == 1
    assert "spec.json: changed since the run was archived" in answer.text
    assert "is INVALID, so it is not compared" in text or "is INVALID, not VALID" in text
    assert "verdict CHANGED" in text
    assert "Findings" in text
    shown = report(results, str(good), str(bad), out=tmp_path / "q.html", include_invalid=True)[0].read_text()
    assert "stock [INVALID]" in shown
    assert "Do not quote their figures" in shown
    with pytest.raises(ArchiveError, match="no run can be shown"):
        report(results, str(broken), out=tmp_path / "r.html")


@pytest.mark.parametrize("name", ["recall/before.jsonl", "evidence.json", "gpu/decode-0.csv", "nodes/decode-0.json", "events.jsonl"])
def test_a_changed_byte_of_any_file_is_marked_and_the_code_is_1(results, name):
    run = write_run(results, SMALL)
    assert report(results, run.name)[1].code == 0
    path = run / name
    path.write_bytes(path.read_bytes().replace(b"1", b"2", 1))
    out, answer = report(results, run.name, include_invalid=True)
    assert answer.code == 1
    said = f"changed since it was archived: {name}"
    assert answer.text.splitlines()[0] == f"not proven  {run.parent.name}/{run.name}: {said}"
    text = out.read_text()
    assert '<span class="word">CHANGED</span>' in text
    assert f"<li>{said}</li>" in text
    assert "as stored, not proven: VALID" in text
    assert '<span class="word">VALID</span>' not in text


def test_a_changed_run_beside_a_good_one_is_left_out_of_the_comparison(results, tmp_path):
    good, bad = write_run(results, SMALL, job="20260101T000000Z-1"), write_run(results, SMALL, job="20260101T000000Z-2", hybrid=True)
    (bad / "recall/after.jsonl").write_text("")
    out, answer = report(results, str(good), str(bad), out=tmp_path / "p.html", include_invalid=True)
    assert answer.code == 1
    text = out.read_text()
    assert "is CHANGED, so it is not compared" in text
    assert "Findings" not in text


def test_a_page_without_manifest_is_marked(results):
    run = write_run(results, SMALL)
    (run / "manifest.json").unlink()
    out, answer = report(results, run.name)
    assert answer.code == 1
    assert '<span class="word">UNFINISHED</span>' in out.read_text()


def test_shared_gpus_are_counted_once_drawn_and_said(results, tmp_path):
    run, other = write_run(results, SMALL), write_run(results, SMALL, job="20260101T000000Z-2")
    spec = json.loads((run / "spec.json").read_text())
    spec["engines"][1]["ranks"][0] |= {"node": 0, "gpus": list(range(3, 11))}
    (run / "spec.json").write_text(json.dumps(spec))
    seal(run)
    device = placement(read_run(run))[0].devices[3]
    assert (device.engine, device.role, device.with_role) == ("prefill-0, decode-0", "prefill", "decode")
    out, answer = report(results, run.name)
    text = out.read_text()
    assert answer.code == 0
    assert "11 (prefill 4, decode 8, 1 of them in two roles)" in text
    assert "engines share GPUs (prefill-0 and decode-0 on GPU 3 of node 0): the latency and per-GPU figures are not those" in text
    assert "engines share GPUs" not in report(results, other.name)[0].read_text()
    both = report(results, run.name, other.name, out=tmp_path / "both.html")[0].read_text()
    assert "<b>A:</b> engines share GPUs" in both
    said = command.utilisation(run, bin_s=60, busy_tokens_per_s=1).text
    assert said.startswith("engines share GPUs")
    (run / "gpu" / "decode-0.csv").write_text("utc,gpu,utilisation_pct,memory_used_mib\n")
    with pytest.raises(ArchiveError, match=r"changed since it was archived: gpu/decode-0\.csv"):
        command.utilisation(run, bin_s=60, busy_tokens_per_s=1)


def test_two_hundred_runs_stay_one_small_page(results, tmp_path):
    first = write_run(results, SMALL)
    for i in range(199):
        copy = shutil.copytree(first, first.parent / f"20260101T{i:06d}Z-{i}")
        spec = copy / "spec.json"
        spec.write_text(spec.read_text().replace('"--block-size",\n      "64"', f'"--block-size",\n      "{64 + i}"'))
        seal(copy)
    text = report(results, "*", out=tmp_path / "p.html")[0].read_text()
    assert len(text) < 1_500_000
    assert "In full: the first 12 of 200 runs" in text


def test_text_of_the_commands(results):
    a, b = write_run(results, SMALL, job="20260101T000000Z-1", prefill_tp=8), write_run(results, SMALL, job="20260101T000000Z-2")
    answer = command.compare_runs(Choice((str(a), str(b))), results)
    for part in ("What differs", "prefill tensor_parallel", "ISL 64, OSL 8, 2 users", "single runs: noise not known"):
        assert part in answer.text
    assert json.loads(command.compare_runs(Choice(("*",)), results, form="json").text)["lines"]
    assert "P TP4 x1 > D TP8 x1" in command.list_runs(results).text
    assert "27 x 200" in command.list_runs(results, as_matrix=True).text
    assert len(json.loads(command.list_runs(results, as_matrix=True, form="json").text)["attempts"]) == 2
    assert command.list_runs(results, where=["verdict=NONE"]).text == "no run fits"
    assert "0.948" in command.utilisation(ROOT / "data/gemma4-prefill-utilisation.csv").text
    assert "decode on 8 GPUs" in command.utilisation(a, bin_s=60, busy_tokens_per_s=1).text
    for call, said in (
        (lambda: Choice().paths(results), "no run is named"),
        (lambda: Choice(("*",), last=2).paths(results), "without --recipe"),
        (lambda: Choice(recipe="gemma4-p4d8", last=0).paths(results), "at least 1"),
        (lambda: command.compare_runs(Choice(("*",)), results, noise_pct=-1), "0 to 100"),
        *((lambda value=value: command.utilisation(a, bin_s=value), "1 to 31,622,400 s") for value in (0, 1e-9, 1e308, math.nan)),
        *((lambda value=value: command.utilisation(a, busy_tokens_per_s=value), "positive") for value in (0, math.inf, math.nan)),
        (lambda: command.utilisation(a, bin_s=1), "share no period"),
    ):
        with pytest.raises(ArchiveError, match=said):
            call()


BLANK = """[...document.querySelectorAll('figure[data-chart]')].filter(f => {
  const c = f.querySelector('canvas'), d = c.getContext('2d').getImageData(0, 0, c.width, c.height).data;
  const seen = new Set(); for (let i = 0; i < d.length; i += 4) if (d[i + 3]) seen.add(d[i] << 16 | d[i + 1] << 8 | d[i + 2]);
  return f.dataset.drawn !== 'true' || seen.size < 3; }).map(f => f.dataset.chart)"""
OPEN_ALL = """document.querySelectorAll('details').forEach(d => { d.open = true; }); dispatchEvent(new Event('beforeprint'))"""
SCROLL_TO = """(async () => { document.querySelector('figure[data-chart=distributions]').scrollIntoView();
  await new Promise(r => setTimeout(r, 300)); })()"""


@pytest.fixture
def pages(results, tmp_path):
    one = write_run(results, Shape(), job="20260101T000000Z-1")
    two = write_run(results, Shape(loads=LADDER, speculative_tokens=3), job="20260101T000000Z-2", recipe="mtp", speed=0.5)
    three = write_run(results, Shape(loads=LADDER), job="20260101T000000Z-3")
    bad = write_run(results, replace(SMALL, verdict="INVALID", recall=0, gpu=""), job="20260101T000000Z-4", recipe="stock")
    names = (str(two), str(three), str(one), str(bad))
    many = report(results, *names, out=tmp_path / "many.html", include_invalid=True)[0]
    return [report(results, str(one))[0], many, report(results, str(bad))[0]]


@pytest.mark.parametrize(("width", "phone", "dark"), [(1280, False, False), (390, True, False), (1280, False, True)])
def test_in_a_browser(pages, tmp_path, width, phone, dark):
    with chromium(tmp_path / "profile") as browser:
        for page in pages:
            browser.view(width, 844 if phone else 900, dark=dark, phone=phone)
            browser.open(page)
            browser.evaluate(OPEN_ALL)
            assert browser.evaluate("document.querySelectorAll('figure[data-chart]').length") >= 3
            assert browser.evaluate(BLANK) == []
            assert browser.evaluate("document.documentElement.scrollWidth <= innerWidth"), "the page scrolls sideways"
            assert browser.picture(tmp_path / f"{page.stem}.png").stat().st_size > 10_000
        assert browser.console == []
        assert {r for r in browser.requests if not r.startswith("file:")} == set()
        assert len(browser.requests) == len(pages)


def test_a_reader_can_ask_where_a_number_comes_from(pages, tmp_path):
    with chromium(tmp_path / "profile") as browser:
        browser.view(390, 844, phone=True)
        browser.open(pages[0])
        browser.evaluate("[...document.querySelectorAll('#load .v')][0].click()")
        tip = browser.evaluate("document.getElementById('tip').hidden ? '' : document.getElementById('tip').textContent")
        assert tip == "gemma4-p4d8/20260101T000000Z-1/load/c16/aiperf/profile_export.jsonl"
        assert browser.evaluate("document.querySelector('figure[data-chart=distributions]').dataset.drawn === undefined")
        browser.evaluate(SCROLL_TO)
        browser.evaluate("document.querySelectorAll('figure[data-chart=distributions] button[data-variant]')[3].click()")
        assert browser.evaluate("document.querySelector('figure[data-chart=distributions]').dataset.variant") == "3"
        browser.evaluate("document.getElementById('theme').click()")
        assert browser.evaluate("document.documentElement.dataset.theme") == "dark"
        browser.evaluate(OPEN_ALL)
        assert browser.evaluate(BLANK) == []
        assert browser.console == []


def test_a_page_that_cannot_be_written_leaves_nothing(tmp_path, monkeypatch):
    written = pages_of.write("<!doctype html>half of \ud83d", tmp_path / "a.html")
    assert written.read_text(encoding="utf-8") == "<!doctype html>half of ?"

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match="No space left"):
        pages_of.write("<!doctype html>", tmp_path / "b.html")
    assert [p.name for p in tmp_path.iterdir()] == ["a.html"]
