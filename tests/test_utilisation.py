"""The public table gives the post's figures; the fits are worked by hand on small data; bad input names its line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pdlaunch.errors import ArchiveError
from pdlaunch.node.spec import LoadPhase
from pdlaunch.stats import Spread, percentile, t_quantile, welch_interval
from pdlaunch.utilisation import PUBLISHED_FIT, Period, analyse, table
from pdlaunch.utilisation_sources import read, read_csv
from tests.runfactory import Shape, write_run

TABLE = Path(__file__).parent.parent / "data" / "gemma4-prefill-utilisation.csv"


@pytest.fixture(scope="module")
def published():
    return analyse(read_csv(TABLE))


def test_published_means_and_peaks(published):
    eight, four = published.layouts
    assert (eight.gpus, eight.periods, round(eight.mean_pct, 1)) == (8, 128, 7.7)
    assert (eight.busy_periods, round(eight.busy_mean_pct, 1)) == (38, 22.5)
    assert (eight.peak.utilisation_pct, eight.peak.load_tokens_per_s) == (44.0, 22391)
    assert (four.gpus, four.periods) == (4, 25)
    assert (four.busy_periods, round(four.busy_mean_pct, 1), four.peak.utilisation_pct) == (9, 30.4, 48.9)


def test_published_rates_and_ratio(published):
    eight, four = published.layouts
    assert round(eight.fit(PUBLISHED_FIT).rate, 2) == 0.95
    assert round(four.fit(PUBLISHED_FIT).rate, 2) == 2.75
    (ratio,) = [r for r in published.ratios if r.fit == PUBLISHED_FIT]
    assert (round(ratio.ratio, 1), ratio.gpu_factor, round(ratio.unexplained, 2)) == (2.9, 2.0, 1.45)


def test_only_two_fits_give_the_published_pair(published):
    eight, four = published.layouts
    both = [f.name for f in eight.fits if round(f.rate, 2) == 0.95 and round(four.fit(f.name).rate, 2) == 2.75]
    assert both == ["through_origin_busy", "median_ratio_busy"]
    assert round(eight.fit("line_busy").rate, 2) == 0.60
    assert round(eight.fit("ratio_of_sums_all").rate, 2) == 1.16


def test_the_data_cannot_separate_layout_from_traffic(published):
    eight = published.layouts[0]
    by_day = {day: rate for day, _, rate in eight.by_day}
    assert max(by_day.values()) / min(by_day.values()) > 2
    assert max(by_day, key=by_day.get) == "2026-10-17"
    low, high = eight.fit(PUBLISHED_FIT).leave_one_day_out
    assert low < 0.95 < high
    text = table(published)
    assert "cannot separate layout from traffic" in text
    assert "<- the published 2.9" in text


def test_saturation_is_where_the_line_meets_100(published):
    four = published.layouts[1].fit(PUBLISHED_FIT)
    assert four.saturation_tokens_per_s == pytest.approx(100 / four.rate * 1000)


def period(load, used, day="2026-01-01", gpus=4):
    return Period("prefill", gpus, used, load, f"{day}T00:00Z", "x")


def test_fits_by_hand():
    # loads 1, 2, 3 thousand; utilisation 2, 5, 7. Origin: (2 + 10 + 21) / (1 + 4 + 9) = 33/14. Line: slope 2.5, intercept -1/3. Sums: 14/6.
    (layout,) = analyse([period(1000, 2.0), period(2000, 5.0), period(3000, 7.0)], busy_tokens_per_s=1000).layouts
    assert layout.fit("through_origin_busy").rate == pytest.approx(33 / 14)
    line = layout.fit("line_busy")
    assert (line.rate, line.intercept) == (pytest.approx(2.5), pytest.approx(-1 / 3))
    assert layout.fit("ratio_of_sums_busy").rate == pytest.approx(14 / 6)
    assert layout.fit("median_ratio_busy").rate == pytest.approx(7 / 3)
    assert layout.fit("theil_sen_busy").rate == pytest.approx(2.5)
    # HC3: residuals e = y - 33/14 x, leverage h = x^2/14
    e = [2 - 33 / 14, 5 - 66 / 14, 7 - 99 / 14]
    variance = sum((x * r / (1 - x * x / 14)) ** 2 for x, r in zip((1, 2, 3), e, strict=True)) / 14**2
    assert layout.fit("through_origin_busy").stderr == pytest.approx(variance**0.5)


def test_a_layout_without_busy_periods_has_no_rate():
    report = analyse([period(10, 0.5)])
    assert report.layouts[0].fit() is None
    assert "no busy period" in table(report)


def test_a_busy_day_without_utilisation_has_no_ratio():
    days = [period(6000, 0.0), period(6000, 9.0, day="2026-01-02"), period(6000, 0.0, day="2026-01-03", gpus=8)]
    days.append(period(6000, 5.0, day="2026-01-04", gpus=8))
    report = analyse(days)
    assert {d[2] for x in report.layouts for d in x.by_day} >= {0.0}
    assert "factor" not in " ".join(report.findings)
    assert "nearest days" not in " ".join(report.findings)


def test_statistics_by_hand():
    assert t_quantile(0.975, 1) == pytest.approx(12.7062, abs=1e-4)
    assert t_quantile(0.975, 4) == pytest.approx(2.77645, abs=1e-5)
    assert t_quantile(0.975, 37) == pytest.approx(2.02619, abs=1e-5)
    assert percentile([1, 2, 3, 4], 50) == 2.5
    spread = Spread.of([10.0, 12.0, 14.0, float("nan"), None])
    assert (spread.n, spread.mean, spread.sd) == (3, 12.0, 2.0)
    assert spread.high == pytest.approx(12 + 4.302653 * 2 / 3**0.5, abs=1e-5)
    assert welch_interval(spread, Spread.of([1.0])) is None
    low, high = welch_interval(spread, Spread.of([20.0, 22.0, 24.0]))
    assert (low + high) / 2 == pytest.approx(10.0)
    assert high - 10 == pytest.approx(2.776445 * (8 / 3) ** 0.5, abs=1e-4)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ("2026-01-01T01:00Z,8,1,234,5", "fields"),
        ("2026-01-01T01:00Z,8,44 %,5", "is not a number"),
        ("2026-01-01T01:00Z,8,nan,5", "out of range"),
        ("2026-01-01T01:00Z,8,101,5", "out of range"),
        ("2026-01-01T01:00Z,0,1,5", "GPUs"),
        ("2026-01-01T00:00Z,8,1,5", "appears twice"),
        ("2026-01-01T01:00Z,8,1", "fields"),
        ("2026-01-01T01:00Z,8,1,-5", "out of range"),
    ],
)
def test_bad_csv_rows_name_the_line(tmp_path, row, said):
    path = tmp_path / "u.csv"
    path.write_text(f"hour_ending,prefill_gpus,utilisation_pct,prompt_tokens_per_s\n2026-01-01T00:00Z,8,1,5\n{row}\n")
    with pytest.raises(ArchiveError, match=said) as e:
        read(path)
    assert f"{path}:3" in str(e.value)


def test_wrong_columns(tmp_path):
    path = tmp_path / "u.csv"
    path.write_text("a,b\n1,2\n")
    with pytest.raises(ArchiveError, match="columns"):
        read(path)


def range_query(path, *series):
    path.write_text(
        json.dumps(
            {
                "status": "success",
                "data": {
                    "resultType": "matrix",
                    "result": [{"metric": metric, "values": [[t, str(v)] for t, v in values]} for metric, values in series],
                },
            }
        )
    )
    return path


def test_prometheus_range_queries(tmp_path):
    used = range_query(
        tmp_path / "u.json",
        ({"gpu": "0"}, [(0, 10), (1800, 30)]),
        ({"gpu": "1"}, [(0, 20), (3600, 50)]),
        ({"gpu": "7", "role": "decode"}, [(0, 99)]),
    )
    load = range_query(tmp_path / "l.json", ({"pod": "a"}, [(0, 1000), (3600, 5000)]), ({"pod": "b"}, [(0, 3000), (3600, "NaN")]))
    periods = read(used, load=load)
    assert [(p.gpus, p.utilisation_pct, p.load_tokens_per_s) for p in periods] == [(2, 20.0, 4000.0)]
    late = range_query(tmp_path / "late.json", ({}, [(90000, 1)]))
    with pytest.raises(ArchiveError, match="share no period of 3600 s"):
        read(used, load=late)
    with pytest.raises(ArchiveError, match="needs the load"):
        read(used)
    (tmp_path / "bad.json").write_text('{"status": "error"}')
    with pytest.raises(ArchiveError, match="successful range query"):
        read(used, load=tmp_path / "bad.json")
    with pytest.raises(ArchiveError, match="is not a utilisation"):
        read(range_query(tmp_path / "v.json", ({}, [(0, 101)])), load=load)


@pytest.mark.parametrize(
    ("result", "said"),
    [
        ([5], "without labels"),
        ([{"metric": None, "values": []}], "without labels"),
        ([{"metric": {}, "values": [[1]]}], "a series without"),
        ([{"metric": {}, "values": {"a": 1}}], "a series without"),
        ([{"metric": {}}], "a series without"),
        ([{"metric": {}, "values": [[1e300, "5"]]}], "is no time"),
        ([{"metric": {}, "values": [["nan", "5"]]}], "is no time"),
    ],
)
def test_damaged_range_queries(tmp_path, result, said):
    good = range_query(tmp_path / "l.json", ({}, [(0, 1000)]))
    (tmp_path / "u.json").write_text(json.dumps({"status": "success", "data": {"resultType": "matrix", "result": result}}))
    with pytest.raises(ArchiveError, match=said):
        read(tmp_path / "u.json", load=good)


def test_files_that_are_no_text_and_a_load_that_is_not_read(tmp_path):
    for name in ("u.csv", "0.prom"):
        (tmp_path / name).write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ArchiveError, match="not UTF-8 text"):
        read(tmp_path / "u.csv")
    with pytest.raises(ArchiveError, match="not UTF-8 text"):
        read(tmp_path)
    for text in ("[" * 100_000, "\0"):
        (tmp_path / "u.json").write_text(text)
        with pytest.raises(ArchiveError, match="not JSON"):
            read(tmp_path / "u.json", load=TABLE)
    (tmp_path / "1e300.prom").touch()
    (tmp_path / "0.prom").unlink()
    with pytest.raises(ArchiveError, match="the name is not a time"):
        read(tmp_path)
    with pytest.raises(ArchiveError, match="has its load itself"):
        read(TABLE, load=tmp_path / "none.csv")


def test_dcgm_scrapes(tmp_path):
    for when, tokens, used in ((0, 0, 10), (60, 600, 30), (120, 1800, 50)):
        (tmp_path / f"{when}.prom").write_text(
            f'# TYPE DCGM_FI_DEV_GPU_UTIL gauge\nDCGM_FI_DEV_GPU_UTIL{{gpu="0",UUID="GPU-a",Hostname="n1"}} {used}\n'
            f'DCGM_FI_DEV_GPU_UTIL{{gpu="1",UUID="GPU-b",Hostname="n1"}} {used + 10}\nvllm:prompt_tokens_total{{engine="0"}} {tokens}\n'
        )
    (period,) = read(tmp_path)
    assert (period.gpus, period.utilisation_pct, period.load_tokens_per_s) == (2, 35.0, 15.0)
    (tmp_path / "60.prom").write_text('DCGM_FI_DEV_GPU_UTIL{gpu="0"} much\n')
    with pytest.raises(ArchiveError, match="is not a number"):
        read(tmp_path)


def test_a_role_that_the_source_does_not_have_is_refused(tmp_path):
    assert read(TABLE, role="prefill") == read(TABLE)
    with pytest.raises(ArchiveError, match="no role 'foo'") as caught:
        read(TABLE, role="foo")
    assert "roles of this source: prefill" in str(caught.value)
    run = write_run(tmp_path / "results", Shape(loads=(LoadPhase("c2", 64, 8, 6, concurrency=2),)))
    found = read(run, bin_s=7200.0)
    assert {p.role for p in found} == {"prefill", "decode"}
    assert {p.role for p in read(run, role="decode", bin_s=7200.0)} == {"decode"}
    with pytest.raises(ArchiveError, match="roles of this source: decode, prefill"):
        read(run, role="foo", bin_s=7200.0)


def test_json_form_is_json(published):
    body = json.loads(json.dumps(published.to_json(), allow_nan=False))
    assert body["layouts"][0]["fits"][0]["saturation_tokens_per_s"] > 100000
