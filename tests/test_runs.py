"""The index, its filters, the choice of runs from what a person types, and the table of attempts."""

from __future__ import annotations

import json

import pytest

from pdlaunch.errors import ArchiveError
from pdlaunch.node.spec import LoadPhase
from pdlaunch.report import command
from pdlaunch.report.text import STORED
from pdlaunch.runs import attempt, index, matrix, read_all, select
from tests.runfactory import PATCH, Shape, seal, write_run

SMALL = Shape(loads=(LoadPhase("c2", 64, 8, 4, concurrency=2),))


@pytest.fixture
def results(tmp_path):
    root = tmp_path / "results"
    write_run(root, SMALL, job="20261012T080000Z-1", recipe="gemma4-p8d8", prefill_tp=8, hybrid=True, patches=())
    write_run(root, SMALL, job="20261013T080000Z-2", recipe="gemma4-p8d4", prefill_tp=8, decode_tp=4, vllm="0.28.0", patches=(),
              verdict="INVALID", recall=0, failed_transfers=40)  # fmt: skip
    write_run(root, SMALL, job="20261018T080000Z-3", speculative_tokens=3)
    write_run(root, SMALL, job="20261019T080000Z-4")
    (root / "notes").mkdir()
    (root / "notes" / "todo.txt").write_text("x")
    (root / ".tmp").mkdir()
    return root


def names(rows):
    return [r.run.split("-")[-1] for r in rows]


def test_rows(results):
    rows = index(results)
    assert names(rows) == ["1", "2", "3", "4"]
    assert (rows[0].layout, rows[0].hybrid, rows[0].patches, rows[0].gpus) == ("P TP8 x1 > D TP8 x1", "on", "stock", 16)
    assert (rows[2].speculation, rows[3].speculation, rows[3].patches, rows[3].gpus) == ("mtp x3", "off", PATCH, 12)


@pytest.mark.parametrize(("where", "expected"), [
    (["verdict=VALID"], ["1", "3", "4"]), (["verdict!=VALID"], ["2"]), (["run~P8D8"], ["1"]), (["recipe=gemma4-p8*"], ["1", "2"]),
    (["vllm=0.31.*", "hybrid=off"], ["3", "4"]),
    (["gpus=12"], ["2", "3", "4"]), (["verdict=NONE"], []),
])  # fmt: skip
def test_filters(results, where, expected):
    assert names(index(results, where)) == expected


def test_sorting_and_last(results):
    assert names(index(results, sort="-created")) == ["4", "3", "2", "1"]
    assert names(index(results, sort="gpus"))[-1] == "1"
    assert names(index(results, last=2)) == ["3", "4"]
    assert index(results, last=0) == []
    for bad in ({"where": ["colour=red"]}, {"where": ["verdict"]}, {"sort": "colour"}):
        with pytest.raises(ArchiveError, match="created"):
            index(results, **bad)


def test_a_list_that_cannot_be_is_an_error(results, tmp_path):
    with pytest.raises(ArchiveError, match="no such folder"):
        command.list_runs(tmp_path / "nope")
    for last in (-1, 0):
        with pytest.raises(ArchiveError, match=f"--last {last}"):
            command.list_runs(results, last=last)


def test_broken_runs_are_listed_with_the_reason(results):
    good = write_run(results, SMALL, job="20261020T080000Z-5")
    (good / "verdict.json").write_text("{")
    seal(good)
    cut = write_run(results, SMALL, job="20261020T080000Z-6")
    (cut / "spec.json").write_text(json.dumps({"schema": 9}))
    seal(cut)
    bare = results / "x" / "20261020T080000Z-7"
    bare.mkdir(parents=True)
    (bare / "events.jsonl").write_text("")
    odd = write_run(results, SMALL, job="20261020T080000Z-8")
    (odd / "spec.json").write_text('{"schema": 1}')
    seal(odd)
    rows = {r.run.split("-")[-1]: r for r in index(results)}
    assert rows["5"].verdict == "?"
    assert "not JSON" in rows["5"].problem
    assert "schema 9" in rows["6"].problem
    assert rows["7"].verdict == "UNFINISHED"
    assert "engines" in rows["8"].problem
    assert {a.run.split("-")[-1]: a.verdict for a in matrix(read_all([results / r.path for r in rows.values()])[0])}["5"] == "?"
    assert rows["4"].problem == ""
    runs, refused = read_all([results / r.path for r in rows.values()])
    assert {r.id.split("-")[-1] for r in runs} == {"1", "2", "3", "4", "5"}
    assert len(refused) == 3


def words(results):
    """The verdict of every run in the list and in the table of attempts."""
    listed = {r.run: r.verdict for r in index(results)}
    return listed, {a.run: a.verdict for a in matrix(read_all([results / name for name in listed])[0])}


def test_the_list_and_the_table_of_attempts_use_one_word(results):
    running = write_run(results, SMALL, job="20261020T080000Z-5")
    for name in ("verdict.json", "manifest.json", "evidence.json"):
        (running / name).unlink()
    unsealed = write_run(results, SMALL, job="20261020T080000Z-6")
    (unsealed / "manifest.json").unlink()
    changed = write_run(results, SMALL, job="20261020T080000Z-7", verdict="INVALID")
    path = changed / "verdict.json"
    path.write_text(path.read_text().replace("INVALID", "VALID"))
    listed, table = words(results)
    assert listed == table
    assert [listed[f"gemma4-p4d8/{r.name}"] for r in (running, unsealed, changed)] == ["UNFINISHED", "UNFINISHED", "CHANGED"]
    assert sorted(listed.values()).count("VALID") == 3


def test_the_list_says_what_it_did_not_compare(results):
    """A file that the list does not read: the table of attempts, which hashes every file, has the other word and exits with 1."""
    path = results / "gemma4-p4d8" / "20261019T080000Z-4" / "recall" / "before.jsonl"
    path.write_text(path.read_text().replace("K7Q1", "K7Q9"))
    listed, table = words(results)
    assert (listed["gemma4-p4d8/20261019T080000Z-4"], table["gemma4-p4d8/20261019T080000Z-4"]) == ("VALID", "CHANGED")
    assert command.list_runs(results).text.splitlines()[-1] == STORED
    answer = command.list_runs(results, as_matrix=True)
    assert answer.code == 1
    assert "changed  gemma4-p4d8/20261019T080000Z-4: recall/before.jsonl" in answer.text


def test_select(results, monkeypatch):
    def picked(*args, **kwargs):
        return [p.name.split("-")[-1] for p in select(*args, **kwargs)]

    assert picked(["gemma4-p4d8/20261019T080000Z-4"], results) == ["4"]
    assert picked([str(results / "gemma4-p8d8" / "20261012T080000Z-1")], results) == ["1"]
    assert picked(["20261013T080000Z-2"], results) == ["2"]
    assert picked(["gemma4-p8*"], results) == ["2", "1"]
    assert picked(["gemma4-p4d8/*", "20261019T080000Z-4"], results) == ["3", "4"]
    assert picked([], results, recipe="gemma4-p4d8", last=1) == ["4"]
    monkeypatch.chdir(results.parent)
    assert picked(["results/gemma4-p4d8/*"], results) == ["3", "4"]
    with pytest.raises(ArchiveError, match="no run fits 'nothing'"):
        select(["nothing"], results)
    with pytest.raises(ArchiveError, match="no run of recipe"):
        select([], results, recipe="other")
    assert index(results / "absent") == []


def test_the_seeds_table_of_attempts(results):
    rows = matrix(read_all([results / p for p in select(["*"], results)])[0])
    stock = next(a for a in rows if a.vllm == "0.28.0")
    assert (stock.layout, stock.statuses, stock.recall, stock.failed_transfers, stock.verdict) == (
        "P TP8 x1 > D TP4 x1", "27 x 200", "0 of 27", "40", "INVALID")  # fmt: skip
    assert (stock.patches, stock.hybrid, stock.gpu) == ("stock", "off", "NVIDIA B300 SXM6 AC")
    assert [a.layout for a in rows] == sorted(a.layout for a in rows)


def test_what_was_not_looked_at_is_a_dash(tmp_path):
    run = write_run(tmp_path, SMALL, gpu="")
    for path in [*run.glob("recall/*"), *run.glob("metrics/*")]:
        path.unlink()
    (found,), _ = read_all([run])
    line = attempt(found)
    assert (line.statuses, line.recall, line.failed_transfers, line.gpu) == ("-", "-", "-", "CPU")
