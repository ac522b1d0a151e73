"""Constants drawn from their fit, and what they do to a comparison."""

import json

import numpy as np
import pytest

import simulator
from echo_policies.errors import InputError
from simulator.cost.constants import ConstantsFile, shipped_file
from simulator.cost.draws import draw_parameters
from simulator.cost.parameters import CONSTANTS, PUBLISHED
from simulator.output import notes


def test_draws_spread_as_the_intervals_say():
    content = shipped_file()
    drawn = draw_parameters(content, 2000, np.random.default_rng(0))
    for name in content.names:
        values = np.array([getattr(parameters, name) for parameters in drawn])
        low, high = content.intervals[name]
        assert 0.92 < np.mean((values > low) & (values < high)) < 0.98
        assert CONSTANTS[name]["low"] <= values.min()
        assert values.max() <= CONSTANTS[name]["high"]
    assert {parameters.gemm_floor_us for parameters in drawn} == {PUBLISHED.gemm_floor_us}


def test_constants_without_covariance_are_refused():
    with pytest.raises(InputError, match="constants with a covariance"):
        draw_parameters(ConstantsFile(PUBLISHED), 3, np.random.default_rng(0))


def test_comparison_under_drawn_constants(trace_file):
    options = {"trace": str(trace_file), "batch_sizes": (2,), "target": "llama-3.1-8b"}
    plain = simulator.simulate(policies=["chain:levels=3", "chain:levels=4"], **options)
    drawn = simulator.simulate(
        policies=["chain:levels=3", "chain:levels=4"], cost_interval=6, **options
    )
    (before,), (after,) = plain.batches, drawn.batches
    for row, same in zip(before.rows, after.rows, strict=True):
        assert row.cost_tokens_per_s is None
        assert row.summary.tokens_per_s == same.summary.tokens_per_s  # the table does not change
        low, high = same.cost_tokens_per_s
        assert 0 < low < high
    assert all(0 < flip.share <= 1 for flip in after.order_flips)
    assert "under drawn cost constants" in "\n".join(notes(after))
    assert json.loads(drawn.to_json())["batches"][0]["rows"][0]["cost_tokens_per_s"]
    again = simulator.simulate(
        policies=["chain:levels=3", "chain:levels=4"], cost_interval=6, **options
    )
    assert again.to_json() == drawn.to_json()


def test_a_pure_roofline_has_nothing_to_draw(trace_file):
    with pytest.raises(InputError, match="cost_interval draws fitted constants"):
        simulator.simulate(
            policies=["chain:levels=3"], trace=str(trace_file), cost_interval=3, pure_roofline=True
        )
