"""Acceptance by level: hand-made ranks, and what holds of any."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from traces.acceptance import RANK_BINS, WITHIN, rank_shares, within_first
from traces.schema import OUTSIDE_VOCAB, PAST_END

RANKS = np.array([[0, 0, 0], [0, 1, 0], [0, 0, PAST_END], [2, 0, OUTSIDE_VOCAB]], np.int32)


@st.composite
def path_ranks(draw: st.DrawFn) -> np.ndarray:
    """[P, C] with ends that stay ends, as in a trace."""
    shape = (draw(st.integers(1, 20)), draw(st.integers(1, 6)))
    ranks = draw(hnp.arrays(np.int32, shape, elements=st.integers(OUTSIDE_VOCAB, 40)))
    ends = draw(hnp.arrays(np.int64, shape[0], elements=st.integers(0, shape[1])))
    ranks[np.arange(shape[1]) >= ends[:, None]] = PAST_END
    return ranks


def test_the_greedy_chain_by_level() -> None:
    chain = within_first(RANKS, 1)
    assert chain.cumulative == (3 / 4, 2 / 4, 1 / 3)
    assert chain.conditional == (3 / 4, 2 / 3, 1 / 1)
    assert chain.reached == (4, 4, 3)
    assert chain.succeeded == (3, 2, 1)


def test_within_the_first_three() -> None:
    wide = within_first(RANKS, 3)
    assert wide.cumulative == (1, 1, 2 / 3)
    assert wide.conditional == (1, 1, 2 / 3)


def test_a_level_that_no_output_reaches_has_no_share() -> None:
    ended = within_first(np.array([[0, PAST_END]], np.int32), 1)
    assert ended.cumulative[0] == 1
    assert math.isnan(ended.cumulative[1])
    assert math.isnan(ended.conditional[1])


def test_ranks_fall_into_bins_counted_from_one() -> None:
    ranks = [0, 0, 1, 2, 3, 9, 10, 31, 32, 900, OUTSIDE_VOCAB, PAST_END]
    shares = rank_shares(np.array(ranks, np.int32))
    expected = {"1": 2, "2": 1, "3": 1, "4-10": 2, "11-32": 2, ">32": 2, "outside": 1}
    assert shares == {name: count / 11 for name, count in expected.items()}
    assert all(math.isnan(x) for x in rank_shares(np.array([PAST_END], np.int32)).values())


@given(ranks=path_ranks())
def test_shares_of_any_ranks(ranks: np.ndarray) -> None:
    shares = [within_first(ranks, k) for k in WITHIN]
    for level in range(ranks.shape[1]):
        bins = rank_shares(ranks[:, level])
        if not shares[0].reached[level]:
            continue
        assert sum(bins.values()) == pytest.approx(1)
        assert list(bins) == list(RANK_BINS)
        for narrow, wide in itertools.pairwise(shares):
            assert narrow.cumulative[level] <= wide.cumulative[level]
        for one in shares:
            conditional = one.conditional[level]
            assert math.isnan(conditional) or one.cumulative[level] <= conditional <= 1
            assert one.succeeded[level] <= one.reached[level]


@given(ranks=path_ranks())
def test_without_ends_cumulative_is_the_product(ranks: np.ndarray) -> None:
    whole = ranks[(ranks != PAST_END).all(axis=1)]
    if not len(whole):
        return
    for k in WITHIN:
        one = within_first(whole, k)
        product = np.nancumprod(one.conditional)
        assert one.cumulative == pytest.approx(tuple(product))
