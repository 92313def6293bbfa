"""Frontier and turnover: the second seed's figures, and hostile input."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdlaunch.pareto import Candidate, LoadPoint, average, pareto, turnover


def labels(points):
    return [p.label for p in points]


def test_frontier_by_hand():
    found = pareto(
        [Candidate("a", 10, 100), Candidate("b", 20, 90), Candidate("c", 15, 80), Candidate("d", 30, 90), Candidate("e", 5, 100)]
    )
    assert labels(found.frontier) == ["a", "d"]
    assert {p.label: by for p, by in found.dominated} == {"b": "d", "c": "d", "e": "a"}


def test_nan_infinite_missing_and_invalid_points_take_no_part():
    found = pareto([Candidate("a", 1, 1), Candidate("nan", math.nan, 99), Candidate("inf", math.inf, math.inf), Candidate("none", None, 5),
                    Candidate("bad", 100, 100, valid=False)])  # fmt: skip
    assert labels(found.frontier) == ["a"]
    assert {p.label for p, _ in found.left_out} == {"nan", "inf", "none", "bad"}
    assert pareto([]).frontier == ()


def test_equal_points_are_both_kept():
    assert labels(pareto([Candidate("a", 1, 2), Candidate("b", 1, 2), Candidate("c", 1, 1)]).frontier) == ["b", "a"]


numbers = st.one_of(st.none(), st.floats(allow_nan=True, allow_infinity=True), st.integers(-3, 3).map(float))


@given(st.lists(st.tuples(numbers, numbers, st.booleans()), max_size=30))
def test_frontier_properties(raw):
    points = [Candidate(str(i), x, y, ok) for i, (x, y, ok) in enumerate(raw)]
    found = pareto(points)
    every = [*found.frontier, *(p for p, _ in found.dominated), *(p for p, _ in found.left_out)]
    assert sorted(labels(every)) == sorted(labels(points))
    usable = [*found.frontier, *(p for p, _ in found.dominated)]

    def beaten(p):
        return any(q.x >= p.x and q.y >= p.y and (q.x > p.x or q.y > p.y) for q in usable)

    assert all(not beaten(p) for p in found.frontier)
    assert all(beaten(p) for p, _ in found.dominated)
    assert [p.x for p in found.frontier] == sorted(p.x for p in found.frontier)


ON = [LoadPoint(256, 1205), LoadPoint(512, 685), LoadPoint(1024, 625)]


def test_second_seeds_turnover():
    # Without speculation the post's text gives 1,665 at 1,024 and "1.6 to 1.8 times" at 256: 1205/1.7 = 709.
    found = turnover(ON, [LoadPoint(256, 709), LoadPoint(1024, 1665)])
    assert (found.status, found.low, found.high) == ("crosses", 256, 1024)
    assert found.loss_at_highest == pytest.approx(0.62, abs=0.005)
    # log(1205/709) = 0.5304, log(625/1665) = -0.9798: share 0.3512 of two doublings, 256 * 4^0.3512 = 416.6: the post's reader said "~400"
    assert found.crossing == pytest.approx(416.6, abs=0.5)
    assert found.high_if_monotone == 512
    assert found.peak == 256
    assert (found.crossing_low, found.crossing_high) == (256, 1024)
    assert found.cause == "not known"


def test_one_common_point_is_not_a_crossing():
    found = turnover(ON, [LoadPoint(1024, 1665)])
    assert found.status == "no data"
    assert "1 concurrencies in common" in found.why


def test_uncertainty_from_repetitions():
    on = average([LoadPoint(1, 110), LoadPoint(1, 130), LoadPoint(4, 80), LoadPoint(4, 80)])
    off = average([LoadPoint(1, 100), LoadPoint(1, 104), LoadPoint(4, 100), LoadPoint(4, 101)])
    assert (on[0].throughput, on[0].sd) == (120, pytest.approx(math.sqrt(200)))
    found = turnover(on, off)
    assert found.low <= found.crossing_low < found.crossing < found.crossing_high < found.high
    wide = turnover([LoadPoint(1, 120, 200), LoadPoint(4, 80, 200)], off)
    assert (wide.crossing_low, wide.crossing_high) == (1, 4)
    # one of the four points without repetitions: the bracket is all that is known
    single = turnover(on, average([LoadPoint(1, 100), LoadPoint(4, 100), LoadPoint(4, 101)]))
    assert (single.crossing_low, single.crossing_high) == (1, 4)


def test_causes():
    off = [LoadPoint(1, 50, itl_ms=5), LoadPoint(4, 100, itl_ms=10)]
    kv = turnover([LoadPoint(1, 100), LoadPoint(4, 60, kv_usage=0.99, waiting=3, itl_ms=11)], off)
    assert kv.cause == "KV ran out"
    assert "3 waiting" in kv.cause_evidence
    assert turnover([LoadPoint(1, 100), LoadPoint(4, 60, kv_usage=0.4, itl_ms=20)], off).cause == "step cost"
    assert turnover([LoadPoint(1, 100), LoadPoint(4, 60, kv_usage=1.0, preemptions=2, itl_ms=20)], off).cause == "both"
    assert turnover([LoadPoint(1, 100), LoadPoint(4, 60, kv_usage=0.4, itl_ms=11)], off).cause == "not known"
    assert turnover([LoadPoint(1, 100), LoadPoint(4, 60, kv_usage=1.0, itl_ms=11)], off).cause == "not known"


def test_no_crossing_and_hostile_input():
    assert turnover([LoadPoint(1, 2), LoadPoint(2, 4)], [LoadPoint(1, 1), LoadPoint(2, 3)]).status == "pays throughout"
    assert turnover([LoadPoint(1, 1), LoadPoint(2, 2)], [LoadPoint(1, 2), LoadPoint(2, 3)]).status == "never pays"
    assert turnover([], []).status == "no data"
    broken = [LoadPoint(1, math.nan), LoadPoint(2, -5), LoadPoint(0, 5), LoadPoint(math.inf, 5), LoadPoint(3, None)]
    assert turnover(broken, broken).status == "no data"
    with pytest.raises(ValueError, match="average repetitions"):
        turnover([LoadPoint(1, 1), LoadPoint(1, 2)], [])
    waves = turnover([LoadPoint(c, v) for c, v in ((1, 2), (2, 0.5), (4, 2), (8, 0.5))], [LoadPoint(c, 1) for c in (1, 2, 4, 8)])
    assert (waves.low, waves.high, waves.crossings) == (1, 2, 3)


@given(st.lists(st.tuples(st.floats(0.01, 1e6), st.floats(0.01, 1e9), st.floats(0.01, 1e9)), max_size=12, unique_by=lambda t: t[0]))
def test_the_crossing_lies_in_its_bracket(rows):
    found = turnover([LoadPoint(c, a) for c, a, _ in rows], [LoadPoint(c, b) for c, _, b in rows])
    if found.status == "crosses":
        assert found.low <= found.crossing * (1 + 1e-9)
        assert found.crossing <= found.high * (1 + 1e-9)
