"""Autocorrelation and spread between requests: known series, and bounds that always hold."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from traces.series import autocorrelation, spread

SERIES = st.lists(
    hnp.arrays(np.int64, st.integers(0, 12), elements=st.integers(0, 8)), min_size=1, max_size=6
)


def test_autocorrelation_of_known_series() -> None:
    assert autocorrelation([np.array([0, 1] * 50)]).pooled == pytest.approx(-1)
    assert autocorrelation([np.array([0] * 500 + [1] * 500)]).pooled == pytest.approx(1, abs=0.01)
    lonely = autocorrelation([np.array([3]), np.array([4])])
    assert (lonely.pairs, math.isnan(lonely.pooled)) == (0, True)
    constant = autocorrelation([np.array([2, 2, 2])])
    assert (constant.pairs, math.isnan(constant.within)) == (2, True)


def test_lasting_differences_count_in_the_pooled_figure_only() -> None:
    rng = np.random.default_rng(0)
    series = [10 * (q % 2) + rng.integers(0, 3, 400) for q in range(8)]
    found = autocorrelation(series)
    assert found.pooled > 0.95
    assert abs(found.within) < 0.05


def test_pairs_do_not_reach_across_requests() -> None:
    one, other = np.array([0, 1, 1, 0]), np.array([1, 0, 0, 1])
    assert autocorrelation([one, other]).pairs == 6
    values = np.array([[0, 1], [1, 1], [1, 0], [1, 0], [0, 0], [0, 1]])
    expected = np.corrcoef(values.T)[0, 1]
    assert autocorrelation([one, other]).pooled == pytest.approx(expected)


@given(series=SERIES)
def test_autocorrelation_is_a_correlation(series: list[np.ndarray]) -> None:
    found = autocorrelation(series)
    for value in (found.pooled, found.within):
        assert math.isnan(value) or -1 <= value <= 1


def test_spread_of_a_worked_example() -> None:
    # Means 2, 4 and 9; sums of squares about them 2 + 2 + 2 on 6 degrees of freedom.
    series = [np.array([1, 2, 3]), np.array([3, 4, 5]), np.array([8, 9, 10])]
    found = spread(series)
    within, between = 1.0, (3 * 26 / 2 - 1.0) / 3
    assert found.sd_of_means == pytest.approx(math.sqrt(13))
    assert found.sd_between == pytest.approx(math.sqrt(between))
    assert found.icc == pytest.approx(between / (between + within))


def test_spread_recovers_what_was_planted() -> None:
    rng = np.random.default_rng(1)
    sizes = rng.integers(20, 200, 600)
    series = [np.rint(100 * rng.normal(rng.normal(0, 1), 2, n)).astype(np.int64) for n in sizes]
    found = spread(series)
    assert found.sd_between == pytest.approx(100, rel=0.1)
    assert found.icc == pytest.approx(0.2, abs=0.03)
    assert found.sd_of_means > found.sd_between


def test_spread_at_its_ends() -> None:
    assert spread([np.array([1, 1]), np.array([5, 5])]).icc == 1
    assert spread([np.array([1, 5]), np.array([5, 1])]).icc == 0
    assert math.isnan(spread([np.array([3, 3]), np.array([3, 3])]).icc)
    assert math.isnan(spread([np.array([1, 2])]).sd_of_means)
    alone = spread([np.array([1]), np.array([3])])
    assert alone.sd_of_means == pytest.approx(math.sqrt(2))
    assert math.isnan(alone.icc)


@given(series=SERIES)
def test_icc_is_a_share(series: list[np.ndarray]) -> None:
    found = spread(series)
    assert found.requests == sum(len(one) > 0 for one in series)
    assert math.isnan(found.icc) or 0 <= found.icc <= 1
    if not math.isnan(found.sd_between):
        assert found.sd_between >= 0
