"""Replay: the bracket of unrevealed nodes, entropies, what never is in a view."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from echo_policies.api import Frontier, StepContext
from echo_policies.errors import SignalError
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.registry import parse
from echo_policies.session import open_session
from tests.traces.build import Sizes, random_trace
from traces.replay import RecordedDrafter, RecordedVerifier, replay_tables
from traces.schema import OUTSIDE_VOCAB
from traces.store import make_trace

NARROW = Sizes(levels=5, beam_width=2, root_width=6, top_k=4, chain_levels=6, max_tokens=40)


def context(size: int, k_max: int = 10**6) -> StepContext:
    one = torch.ones(size, dtype=torch.int64)
    return StepContext(k_max, 0, one.bool(), one * 100, torch.arange(size), 99)


def step(trace, policy, k_max=10**6, **options):
    drafter = RecordedDrafter(replay_tables(trace), **options)
    session = open_session(policy, drafter)
    drafter.seek(torch.arange(trace.num_positions))
    decision = session.decide(context(trace.num_positions, k_max), None)
    accepted = RecordedVerifier(drafter).verify(decision.forest, decision.keep_BN)
    return decision, accepted, drafter.unrevealed_B


def wide_policy(width: int):
    policy = parse(f"echo:levels=5,top_k=4,w_topk={width}")
    return policy.model_copy(update={"gate": ConfidenceGate(gate_set="off")})


@pytest.mark.parametrize("seed", range(5))
def test_bracket_encloses_and_is_tight_where_all_is_revealed(seed):
    trace = random_trace(np.random.default_rng(seed), 6, NARROW)
    wide = wide_policy(4)
    _, lower, unrevealed = step(trace, wide)
    _, upper, _ = step(trace, wide, reveals_path=True)
    assert unrevealed.sum() > 0
    assert (upper >= lower).all()
    assert (upper > lower).any()
    assert (upper == lower)[unrevealed == 0].all()


def test_the_greedy_chain_is_never_unrevealed():
    trace = random_trace(np.random.default_rng(0), 8, NARROW)
    decision, _, unrevealed = step(trace, wide_policy(1))
    assert unrevealed.sum() == 0
    assert int(decision.depth_B.min()) == 5


@pytest.mark.parametrize(
    "spec", ["echo:levels=5,top_k=4,w_topk=2", "eagle3:levels=4,top_k=3,nodes=7"]
)
def test_no_outcome_in_any_view(spec):
    """Kind: a plan that knows what the target said."""
    trace = random_trace(np.random.default_rng(1), 6, NARROW)
    shuffled = np.random.default_rng(2).permutation(trace.num_positions)
    path = {
        "path_rank": np.where(
            trace.arrays.path_rank >= 0, trace.arrays.path_rank[shuffled], OUTSIDE_VOCAB
        ).astype(np.int32),
        "path_logp": trace.arrays.path_logp[shuffled],
    }
    other = make_trace(trace.header, replace(trace.arrays, **path))
    policy = parse(spec)
    if policy.scheduler.uses_gate:
        policy = policy.model_copy(update={"gate": ConfidenceGate(taus=((1, 0.4), (3, 0.1)))})
    for k_max in (3, 50, 10**6):
        first, *_ = step(trace, policy, k_max)
        second, *_ = step(other, policy, k_max)
        assert torch.equal(first.keep_BN, second.keep_BN)


def test_entropy_is_there_only_where_asked_for():
    trace = random_trace(np.random.default_rng(3), 4, NARROW, entropies=True)
    tables = replay_tables(trace)
    plan = parse("eagle3:levels=3,top_k=2,nodes=4").scheduler.begin(context(2), None)[0]
    for asked in (True, False):
        drafter = RecordedDrafter(tables, gives_entropy=asked)
        assert "entropy" in drafter.signals
        drafter.seek(torch.tensor([0, 5]))
        layer = drafter.begin(plan, torch.ones(2, dtype=torch.bool))
        index = layer.order_BW[:, :2]
        deeper = drafter.expand(layer, Frontier(index, torch.ones_like(index, dtype=torch.bool)))
        assert (layer.entropy_BF is not None) == (deeper.entropy_BF is not None) == asked
        if asked:
            recorded = trace.arrays.root_entropy[[0, 5]].astype(np.float32)
            assert np.array_equal(layer.entropy_BF[:, 0].numpy(), recorded)
    without = random_trace(np.random.default_rng(3), 4, NARROW)
    assert "entropy" not in RecordedDrafter(replay_tables(without)).signals


def test_more_children_than_recorded_are_refused_by_name():
    trace = random_trace(np.random.default_rng(3), 4, NARROW)
    objection = RecordedDrafter(replay_tables(trace)).objection(
        parse("eagle3:levels=3,top_k=5,nodes=4").scheduler.begin(context(1), None)[0]
    )
    assert objection is not None
    assert "reveals 5 children per node, but the recording has 4" in objection


def from_lookup(seed, chain_levels):
    """A trace said to be of prompt lookup, whose greedy chain ends after ``chain_levels``."""
    trace = random_trace(np.random.default_rng(seed), 2)
    chain = trace.arrays.chain_logp.copy()
    chain[:, chain_levels:] = -np.inf
    header = trace.header.model_copy(update={"drafter": "prompt_lookup"})
    return make_trace(header, replace(trace.arrays, chain_logp=chain))


def test_chain_of_prompt_lookup_ends_where_nothing_was_found():
    """A fixed chain verifies only what the lookup proposed."""
    decision, _, _ = step(from_lookup(5, chain_levels=2), parse("chain:levels=4"))
    assert set(decision.verified_B.tolist()) == {2}


def test_fixed_tree_of_prompt_lookup_is_refused():
    with pytest.raises(SignalError, match="prompt lookup proposes only what it finds"):
        step(from_lookup(5, chain_levels=2), parse("static:tree=0/1"))
