"""Figures of a trace against known answers and slow, plain computations."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings

from tests.traces.build import Sizes, random_trace, traces
from traces.card import acceptance, autocorrelation, calibration_error, chain_walk, describe
from traces.schema import PAST_END, Trace


def test_acceptance_by_level() -> None:
    ranks = np.array([[0, 0, 0], [0, 1, 0], [0, 0, PAST_END], [2, 0, -1]], np.int32)
    assert acceptance(ranks).by_level == (3 / 4, 2 / 4, 1 / 3)
    ended = acceptance(np.array([[0, PAST_END]], np.int32)).by_level
    assert ended[0] == 1
    assert math.isnan(ended[1])


@settings(deadline=None, max_examples=30)
@given(trace=traces())
def test_a_walk_emits_every_token_once(trace: Trace) -> None:
    for levels in range(1, trace.header.chain_levels + 1):
        steps = emitted = 0
        for q in range(trace.num_requests):
            ranks = trace.arrays.path_rank[trace.positions(q)]
            position = 0
            while position < len(ranks):
                accepted = 0
                while accepted < levels and ranks[position, accepted] == 0:
                    accepted += 1
                steps += 1
                emitted += min(accepted + 1, len(ranks) - position)
                position += accepted + 1
        walk = chain_walk(trace, levels)
        assert walk.steps == steps
        assert walk.acceptance_length == pytest.approx(emitted / steps)


def test_autocorrelation_of_known_series() -> None:
    assert autocorrelation([np.array([0, 1] * 50)]) == pytest.approx(-1)
    assert autocorrelation([np.array([0] * 500 + [1] * 500)]) == pytest.approx(1, abs=0.01)
    assert math.isnan(autocorrelation([np.array([3]), np.array([4])]))
    assert math.isnan(autocorrelation([np.array([2, 2, 2])]))


def test_calibration_error_of_known_predictions() -> None:
    hit = np.arange(1000) % 10 == 0
    assert calibration_error(np.full(1000, 0.1), hit) == pytest.approx(0)
    assert calibration_error(np.full(1000, 0.6), hit) == pytest.approx(0.5)
    assert calibration_error(np.array([0.9]), np.array([True])) == pytest.approx(0.1)


def test_the_card_of_a_trace() -> None:
    sizes = Sizes(root_width=16, chain_levels=6, min_tokens=100, max_tokens=100)
    trace = random_trace(np.random.default_rng(0), 9, sizes)
    card = describe(trace)
    assert [(g.task, g.split, g.requests, g.positions) for g in card.groups] == [
        ("chat", "evaluation", 3, 297),
        ("code", "calibration", 3, 297),
        ("maths", "evaluation", 3, 297),
    ]
    assert [walk.levels for walk in card.walks] == [3, 5]
    assert list(card.acceptance_by_task) == ["chat", "code", "maths"]
    assert card.acceptance.positions == sum(a.positions for a in card.acceptance_by_task.values())
    assert list(card.acceptance.by_level) == sorted(card.acceptance.by_level, reverse=True)
    assert 0.5 < card.acceptance.by_level[0] <= card.coverage <= 1
    assert card.calibration_error < 0.15
    assert card.digest == trace.digest
    assert card.array_bytes > 297 * 3 * 16 * 2
