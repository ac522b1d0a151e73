"""The affine cost model: recovered from rows that obey it, honest about rows that do not."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError
from simulator.cost import build_cost_model
from simulator.cost.affine import MIN_ROWS, build_affine_costs, fit_affine
from simulator.cost.protocol import StepCosts, marginal_verify_s
from simulator.cost.step_group import StepGroup, select_rows
from simulator.cost.step_rows import StepRow, read_step_rows
from tests.simulator.fake_costs import LineCosts
from tests.simulator.outside import STEP_TIMES

LAW = (6.0, 0.02, 4e-5)
POINTS = [(b, t, c) for b in (1, 8, 64) for t in (1, 4) for c in (256, 4096)]


def rows_of(law, points=POINTS, noise=None):
    a, b, c = law
    noise = np.ones(len(points)) if noise is None else noise
    return tuple(
        StepRow(
            line=2 + i,
            model="m",
            tp=1,
            batch=batch,
            context=context,
            tokens=tokens,
            ms=(a + b * batch * tokens + c * batch * context) * noise[i],
        )
        for i, (batch, tokens, context) in enumerate(points)
    )


def values(law):
    return [law.constant_s.value, law.per_token_s.value, law.per_kv_token_s.value]


def group(rows):
    return StepGroup(tuple(rows), {})


@given(st.tuples(st.floats(0.5, 50.0), st.floats(0.001, 1.0), st.floats(1e-6, 1e-3)))
def test_a_law_without_noise_is_recovered(law):
    fitted = fit_affine(rows_of(law))
    assert values(fitted) == pytest.approx([value / 1e3 for value in law], rel=1e-6)
    assert fitted.median_error < 1e-9
    for constant in (fitted.constant_s, fitted.per_token_s, fitted.per_kv_token_s):
        assert 0.0 <= constant.low <= constant.value <= constant.high
        assert constant.high - constant.low <= 1e-6 * constant.value


def test_intervals_hold_the_truth_nineteen_times_in_twenty():
    rng, inside = np.random.default_rng(5), 0
    for _ in range(200):
        law = fit_affine(rows_of(LAW, noise=np.exp(rng.normal(0.0, 0.02, len(POINTS)))))
        inside += law.per_token_s.low <= LAW[1] / 1e3 <= law.per_token_s.high
    assert 0.90 <= inside / 200 <= 0.99


@given(st.lists(st.floats(0.5, 100.0), min_size=12, max_size=12))
def test_no_rows_make_a_negative_cost(times):
    rows = [replace(row, ms=ms) for row, ms in zip(rows_of(LAW), times, strict=True)]
    law = fit_affine(rows)
    assert min(values(law)) >= 0.0
    assert law.step_s(1, 0) >= 0.0
    assert law.step_s(9, 99) <= law.step_s(10, 99) <= law.step_s(10, 100)
    for constant in (law.constant_s, law.per_token_s, law.per_kv_token_s):
        assert 0.0 <= constant.low <= constant.value <= constant.high


def test_a_term_that_rows_deny_is_zero():
    falling = rows_of((6.0, 0.02, 0.0), noise=[1.05 if c == 256 else 1.0 for _, _, c in POINTS])
    assert fit_affine(falling).per_kv_token_s.value == 0.0


@pytest.mark.parametrize("number", range(MIN_ROWS))
def test_too_few_rows_are_refused_with_the_number_needed(number):
    with pytest.raises(InputError, match=f"at least 6 rows; got {number}. Measure {6 - number} m"):
        fit_affine(rows_of(LAW)[:number])


@pytest.mark.parametrize(
    "points",
    [
        [(b, 1, 1024) for b in (1, 2, 4, 8, 16, 32)],  # KV tokens are 1024 times the tokens
        [(4, 2, c) for c in (1, 2, 4, 8, 16, 32)],  # always 8 tokens
        [(4, 1, 512)] * 9,
        [(b, 1, 0) for b in (1, 2, 4, 8, 16, 32)],
    ],
)
def test_rows_that_do_not_tell_terms_apart_are_refused(points):
    with pytest.raises(InputError, match="do not tell a token from a KV token"):
        fit_affine(rows_of(LAW, points))


def test_a_cost_model_of_a_line():
    costs = build_affine_costs(group(rows_of(LAW)), LineCosts(), scale=3.0)
    assert isinstance(costs, StepCosts)
    assert costs.verify_s(40, 8, 8192) == pytest.approx(3e-3 * (6 + 0.8 + 8192 * 4e-5))
    assert costs.verify_s(0, 8, 8192) == 0.0
    assert costs.plain_decode_s(8, 0) == costs.verify_s(8, 8, 0)
    assert marginal_verify_s(costs, 40, 8, 8192) == pytest.approx(3 * 0.02e-3)
    assert costs.draft_layer_s(1, 1, 1) == 3.0 * LineCosts().draft_layer_s(1, 1, 1)
    told = costs.describe()
    assert told["kind"] == "affine"
    assert told["law"]["num_rows"] == len(POINTS)
    assert told["measured"]["rows_by_kind"] == {"not stated": len(POINTS)}
    assert costs.label == (
        "m tp 1: affine fit of 12 measured steps of at most 4 tokens per request; drafts, prefill, "
        "checks, selection, packing, compaction, host and memory from line"
    )


def test_knee_of_a_line():
    costs = build_affine_costs(group(rows_of((6.0, 0.02, 0.0))), LineCosts())
    for batch in (1, 8, 64):
        knee = costs.knee_k_max(batch, 1024)
        limit_s = 1.25 * costs.plain_decode_s(batch, 0) * (1 + 1e-9)
        assert costs.verify_s(batch + knee, batch, 0) <= limit_s
        assert costs.verify_s(batch + knee + 1, batch, 0) > limit_s
    with pytest.raises(InputError, match="factor >= 1"):
        costs.knee_k_max(8, 1024, 0.5)


def test_seconds_given_for_milliseconds_are_found_by_the_computed_model():
    slow = rows_of((0.002, 1e-5, 1e-8))
    with pytest.raises(InputError, match="as if they were in seconds"):
        build_affine_costs(group(slow), LineCosts())
    with pytest.raises(InputError, match="scale must exceed 0; got 0"):
        build_affine_costs(group(rows_of(LAW)), LineCosts(), scale=0.0)


def test_knee_of_a_line_that_does_not_rise_is_the_search_limit():
    falling = rows_of((6.0, 0.0, 0.0), noise=[1.05 if t == 1 else 1.0 for _, t, _ in POINTS])
    costs = build_affine_costs(group(falling), LineCosts())
    assert costs.law.per_token_s.value == 0.0
    assert costs.knee_k_max(8, 1024) == 8192 - 8


@pytest.mark.skipif(not STEP_TIMES.exists(), reason="needs the shared data")
def test_an_engine_of_the_development_rows():
    chosen = select_rows(read_step_rows(STEP_TIMES), "llama-3.1-8b", 1, engine="trtllm")
    costs = build_affine_costs(chosen, build_cost_model("llama-3.1-8b", "h100", 1))
    assert costs.law.num_rows == 6
    assert costs.law.median_error < 0.1
