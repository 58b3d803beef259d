"""Curves over runs, against sums done by hand."""

import numpy as np
import pytest

from raffia.report.panel import (
    Curve,
    bootstrap_band,
    interquartile_mean,
    over_runs,
    thinned,
)


def test_interquartile_mean_by_hand():
    # of 8 values two are cut from either end: (3 + 4 + 5 + 6) / 4; of 5 one: (2 + 3 + 4) / 3
    assert interquartile_mean(np.array([8.0, 1, 6, 3, 4, 5, 2, -70])) == pytest.approx(3.5)
    assert interquartile_mean(np.array([100.0, 2, 3, 4, -50])) == pytest.approx(3.0)
    assert interquartile_mean(np.array([1.0, 2, 9])) == pytest.approx(4.0)
    columns = interquartile_mean(np.array([[1.0, 10], [2, 20], [3, 30], [400, -4000]]))
    assert columns.tolist() == [2.5, 15.0]


def test_band_of_two_runs_spans_them():
    # draws of two runs: (a, a), (a, b), (b, a), (b, b), a quarter each
    low, high = bootstrap_band(np.array([[1.0, 5.0], [3.0, 4.0]]))
    assert low.tolist() == [1.0, 4.0] and high.tolist() == [3.0, 5.0]


def test_band_ends_where_a_fortieth_lies_beyond():
    # means of three draws of 0, 0, 1: all three are 1 in 1 of 27 draws, which is more than 2.5 %
    low, high = bootstrap_band(np.array([0.0, 0.0, 1.0]))
    assert (low, high) == (0.0, 1.0)
    low, high = bootstrap_band(np.array([0.0, 1.0, 1.0]))
    assert (low, high) == (0.0, 1.0)


def test_band_narrows_with_runs_and_repeats():
    draw = np.random.default_rng(1)
    widths = []
    for num in (5, 20, 80):
        values = draw.normal(size=(num, 1))
        low, high = bootstrap_band(values)
        widths.append(float((high - low)[0]))
        assert low[0] < interquartile_mean(values)[0] < high[0]
        assert bootstrap_band(values) == (low, high)
    assert widths[0] > widths[1] > widths[2]


def test_the_bootstrap_draws_complete_runs():
    """Points of a curve stay together: two runs that cross give no band where they meet."""
    _, high = bootstrap_band(np.array([[0.0, 1.0, 2.0], [2.0, 1.0, 0.0]]))
    assert high.tolist() == [2.0, 1.0, 2.0]


def test_curves_meet_where_all_have_points():
    curve = over_runs([Curve([0, 10, 20], [0, 10, 0]), Curve([5, 15], [5, 25])])
    assert curve.x == [5.0, 10.0, 15.0]
    assert curve.y == [5.0, 12.5, 15.0]
    assert over_runs([Curve([0, 1], [0, 1]), Curve([2, 3], [0, 1])]) is None
    assert over_runs([Curve([0, 1], [0, 1]), Curve([], [])]) is None
    line = Curve(
        range(9001), range(9001)
    )  # of many points only some are drawn, always with both ends
    curve = over_runs([line, line], band=False)
    assert len(curve.x) < 9001 and curve.y == pytest.approx(curve.x)
    assert (curve.x[0], curve.x[-1]) == (0.0, 9000.0)


def test_nan_values_are_skipped():
    curve = over_runs([Curve([0, 1, 2], [0, float("nan"), 2]), Curve([0, 2], [2, 4])])
    assert curve.x == [0.0, 2.0] and curve.y == [1.0, 3.0]


def test_thinning_keeps_means_and_extremes():
    y = [float(i % 10) for i in range(1000)]
    y[500] = float("nan")
    curve = thinned(range(1000), y, most=50)
    assert len(curve.x) == len(curve.low) == 50
    assert min(curve.low) == 0.0 and max(curve.high) == 9.0
    assert np.mean(curve.y) == pytest.approx(4.5, abs=0.05)
