"""Confidence against acceptance: predictions whose error and AUC are known."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from traces.reliability import (
    binned_error,
    chain_reliability,
    equal_mass_error,
    reliability_bins,
)
from traces.schema import PAST_END


def test_bins_hold_what_lies_between_their_edges() -> None:
    confidence = np.array([0.0, 0.05, 0.1, 0.55, 0.95, 1.0])
    hit = np.array([False, True, True, False, True, True])
    bins = reliability_bins(confidence, hit)
    assert [one.positions for one in bins] == [2, 1, 0, 0, 0, 1, 0, 0, 0, 2]
    assert (bins[0].confidence, bins[0].accepted) == (0.025, 0.5)
    assert (bins[9].confidence, bins[9].accepted) == (0.975, 1)
    assert math.isnan(bins[2].accepted)
    gaps = 2 * 0.475 + 0.9 + 0.55 + 2 * 0.025
    assert binned_error(bins) == pytest.approx(gaps / 6)


def test_errors_of_known_predictions() -> None:
    hit = np.arange(1000) % 10 == 0
    for probability, error in ((0.1, 0.0), (0.6, 0.5)):
        confidence = np.full(1000, probability)
        assert equal_mass_error(confidence, hit) == pytest.approx(error)
        assert binned_error(reliability_bins(confidence, hit)) == pytest.approx(error)
    assert equal_mass_error(np.array([0.9]), np.array([True])) == pytest.approx(0.1)
    nothing = np.zeros(0), np.zeros(0, bool)
    assert math.isnan(equal_mass_error(*nothing))
    assert math.isnan(binned_error(reliability_bins(*nothing)))


def test_equal_mass_shows_what_equal_width_averages_out() -> None:
    confidence = np.repeat([0.91, 0.99], 500)
    hit = np.full(1000, True)
    hit[500::10] = False  # 0.91 is always right, 0.99 in 0.9 of the cases: 0.95 on average
    assert binned_error(reliability_bins(confidence, hit)) == pytest.approx(0)
    assert equal_mass_error(confidence, hit) == pytest.approx(0.09)


def test_levels_are_judged_given_the_levels_before() -> None:
    logp = np.log(np.array([[0.9, 0.5], [0.8, 0.6], [0.3, 0.2], [0.7, 0.9]])).astype(np.float16)
    ranks = np.array([[0, 0], [0, 3], [1, 0], [0, PAST_END]], np.int32)
    first, second = chain_reliability(logp, ranks)
    assert (first.level, first.accepted, first.rejected, first.auc) == (1, 3, 1, 1.0)
    # Only the first two positions are labelled at level 2, and the wrong one is surer.
    assert (second.accepted, second.rejected, second.auc) == (1, 1, 0.0)
    assert sum(one.positions for one in second.bins) == 2
    assert second.ece == pytest.approx((0.5 + 0.6) / 2, abs=1e-3)


@given(
    pairs=st.lists(st.tuples(st.floats(0, 1), st.booleans()), min_size=1, max_size=60),
)
def test_errors_lie_between_0_and_1(pairs: list[tuple[float, bool]]) -> None:
    confidence, hit = np.array([p for p, _ in pairs]), np.array([h for _, h in pairs])
    bins = reliability_bins(confidence, hit)
    assert sum(one.positions for one in bins) == len(pairs)
    for one in bins:
        if one.positions:
            assert one.low - 1e-12 <= one.confidence <= one.high + 1e-12
            assert 0 <= one.accepted <= 1
    # No binning can hide the error of the mean.
    least = abs(confidence.mean() - hit.mean()) - 1e-12
    assert least <= binned_error(bins) <= 1
    assert least <= equal_mass_error(confidence, hit) <= 1 + 1e-12
