"""Weights, draws and orders of positions against known answers."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError
from traces.published import QWEN235B
from traces.resample import arrange, draw, fit_tilt, gains, walk

STEPS = (3, 5, 7)


def pooled(levels: list[np.ndarray], weights: list[np.ndarray], steps: int) -> float:
    """Tokens per step of requests that emit equally many tokens."""
    lengths = [1 + np.minimum(x, steps) @ w for x, w in zip(levels, weights, strict=True)]
    return len(lengths) / sum(1 / length for length in lengths)


def test_own_figures_leave_the_weights_uniform() -> None:
    rng = np.random.default_rng(0)
    levels = [np.minimum(rng.geometric(1 - rate, 200) - 1, 7) for rate in (0.6, 0.7, 0.8)]
    uniform = [np.full(len(level), 1 / len(level)) for level in levels]
    targets = {steps: pooled(levels, uniform, steps) for steps in STEPS}
    tilt = fit_tilt(levels, np.full(len(levels), 1 / len(levels)), targets, "own")
    assert tilt.multipliers == pytest.approx((0, 0, 0), abs=1e-5)
    assert tilt.kl_nats == pytest.approx(0, abs=1e-9)
    for level, flat in zip(levels, uniform, strict=True):
        assert tilt.weights(level) == pytest.approx(flat, rel=1e-4)


def test_a_known_tilt_is_found() -> None:
    level = np.repeat([0, 1, 2], [10, 20, 30])
    weights = np.exp(0.7 * np.minimum(level, 1) - 0.4 * level)
    weights /= weights.sum()
    targets = {k: 1 + float(np.minimum(level, k) @ weights) for k in (1, 2)}
    tilt = fit_tilt([level], np.ones(1), targets, "known")
    assert tilt.multipliers == pytest.approx((0.7, -0.4), abs=1e-5)
    assert tilt.weights(level) == pytest.approx(weights)
    assert tilt.kl_nats == pytest.approx(float(weights @ np.log(weights * 60)))


@settings(deadline=None, max_examples=30)
@given(seed=st.integers(0, 2**32 - 1), wanted=st.sampled_from(QWEN235B.sets))
def test_weights_meet_the_targets_in_tokens_per_step(seed: int, wanted: object) -> None:
    rng = np.random.default_rng(seed)
    levels = [np.minimum(rng.geometric(1 - rate, 200) - 1, 7) for rate in rng.uniform(0.3, 0.8, 4)]
    for level in levels:
        level[:2] = 6, 7
    targets = dict(wanted.acceptance)  # type: ignore[attr-defined]
    tilt = fit_tilt(levels, np.full(4, 0.25), targets, "random")
    weights = [tilt.weights(level) for level in levels]
    for steps, value in targets.items():
        assert pooled(levels, weights, steps) == pytest.approx(value, abs=1e-5)


def test_a_request_without_support_is_made_up_for() -> None:
    rng = np.random.default_rng(0)
    levels = [np.minimum(rng.geometric(0.4, 400) - 1, deepest) for deepest in (5, 7, 7, 7)]
    targets = dict(QWEN235B.sets[2].acceptance)
    tilt = fit_tilt(levels, np.full(4, 0.25), targets, "one short")
    weights = [tilt.weights(level) for level in levels]
    assert pooled(levels, weights, 7) == pytest.approx(3.511, abs=1e-5)


@pytest.mark.parametrize(
    ("deepest", "steps", "value"), [(1, 3, 3.239), (3, 5, 4.084), (5, 7, 4.487)]
)
def test_targets_out_of_reach_are_named(deepest: int, steps: int, value: float) -> None:
    level = np.arange(200) % (deepest + 1)
    with pytest.raises(InputError, match=rf"HumanEval.* of {steps} steps must be {value}, but"):
        fit_tilt([level], np.ones(1), dict(QWEN235B.sets[1].acceptance), "HumanEval")


def test_systematic_draws_keep_expected_counts() -> None:
    rng = np.random.default_rng(0)
    level = rng.integers(0, 8, 300)
    weights = rng.random(300)
    weights /= weights.sum()
    drawn = draw(rng, level, weights, 128)
    for value in range(8):
        expected = 128 * weights[level == value].sum()
        assert abs((level[drawn] == value).sum() - expected) <= 1


def test_walks_count_the_last_step_in_full() -> None:
    steps, tokens = walk(np.array([[2, 0, 0, 3], [0, 1, 0, 0]]), 2)
    assert steps.tolist() == [2, 3]  # 0, 3; and 0, 1, 3
    assert tokens.tolist() == [6, 4]


def test_the_order_is_a_permutation_with_a_typical_walk() -> None:
    rng = np.random.default_rng(0)
    level = rng.integers(0, 8, 128)
    order = arrange(rng, level, STEPS)
    assert sorted(order.tolist()) == list(range(128))
    for steps, mean in zip(STEPS, 1 + gains(level, STEPS).mean(axis=0), strict=True):
        walked_steps, tokens = walk(level[order][None], steps)
        assert float(tokens[0] / walked_steps[0]) == pytest.approx(mean, rel=0.05)
