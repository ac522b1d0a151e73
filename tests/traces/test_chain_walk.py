"""A chain's walk against a plain one, and against the policy that it stands for."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings

from echo_policies.registry import parse
from tests.simulator.small import constant_acceptance, walk
from tests.traces.build import Sizes, random_trace, traces
from traces.chain_walk import accepted_by_position, accepted_by_step, chain_walk
from traces.schema import Trace


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
        found = chain_walk(trace, levels)
        assert found.steps == steps
        assert found.acceptance_length == pytest.approx(emitted / steps)


@pytest.mark.parametrize("levels", [1, 3, 5])
def test_it_is_what_the_policy_is_served(levels: int) -> None:
    sizes = Sizes(levels=5, chain_levels=6, min_tokens=4, max_tokens=60)
    trace = random_trace(np.random.default_rng(levels), 12, sizes)
    assert {info.finish_reason for info in trace.header.requests} == {"stop", "length"}
    policy = parse(f"chain:levels={levels}")
    for q in range(trace.num_requests):
        served = [accepted for accepted, _, _ in walk(trace, policy, 10**6, q)]
        assert accepted_by_step(trace, q, levels).tolist() == served


def test_constant_acceptance_has_no_memory() -> None:
    trace = constant_acceptance(np.random.default_rng(3), 0.7, 6000, 8)
    found = chain_walk(trace, 8)
    assert found.acceptance_length == pytest.approx((1 - 0.7**9) / 0.3, rel=0.03)
    assert abs(found.autocorrelation.pooled) < 0.06
    assert found.spread.requests == 1


def test_some_requests_alone() -> None:
    trace = random_trace(np.random.default_rng(0), 4)
    steps = [chain_walk(trace, 3, [q]).steps for q in range(4)]
    assert sum(steps) == chain_walk(trace, 3).steps
    assert chain_walk(trace, 3, [1, 3]).steps == steps[1] + steps[3]
    assert len(accepted_by_position(trace, 1, 3)) == len(trace.output_tokens(1)) - 1
