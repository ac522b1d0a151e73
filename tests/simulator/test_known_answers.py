"""Results computed by hand, and laws that need no reference implementation."""

from __future__ import annotations

import numpy as np
import pytest

from echo_policies.api import Policy
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.registry import parse
from tests.simulator.small import constant_acceptance, three_positions, walk
from tests.traces.build import random_trace


def gated(spec: str, *taus: tuple[int, float]) -> Policy:
    policy = parse(spec)
    gate = ConfidenceGate(taus=taus) if taus else ConfidenceGate(gate_set="off")
    return policy.model_copy(update={"gate": gate})


SMALL = "levels=2,top_k=2"
BY_HAND = [
    # (accepted, emitted, verified) of every step; see the tables in small.py.
    ("autoregressive", parse("autoregressive"), 9, [(0, 1, 0)] * 3),
    # Position 0 agrees at level 1 only; position 2 agrees and its output ends there.
    ("chain", parse("chain:levels=2"), 9, [(1, 2, 2), (1, 1, 2)]),
    ("whole tree", parse("static:tree=0/1/00/01/10"), 9, [(2, 3, 5)]),
    ("two siblings", parse("static:tree=0/1"), 9, [(1, 2, 2), (1, 1, 2)]),
    # Scores at position 0: 0 .60, 00 .30, 1 .25, 01 .24, 10 .225.
    ("eagle3, 3 nodes", parse(f"eagle3:{SMALL},nodes=3"), 9, [(1, 2, 3), (1, 1, 3)]),
    ("eagle3, 4 nodes", parse(f"eagle3:{SMALL},nodes=4"), 9, [(2, 3, 4)]),
    # c at depth 1 is .6, then .8: above tau both deepen to the chain 0, 00.
    ("echo deepens", gated(f"echo:{SMALL},w_topk=1", (1, 0.5)), 2, [(1, 2, 2), (1, 1, 2)]),
    # .6 is truncated and widened to 0, 1; .8 deepens.
    ("echo widens", gated(f"echo:{SMALL},w_topk=1", (1, 0.7)), 2, [(1, 2, 2), (1, 1, 2)]),
    ("echo widens off", gated(f"echo:{SMALL},w_topk=1,widen=off", (1, 0.7)), 2,
     [(0, 1, 0), (0, 1, 0), (1, 1, 2)]),
    # Depth 1 takes two nodes, one is left for the best of depth 2: 00.
    ("echo, 3 nodes", gated(f"echo:{SMALL},w_topk=2"), 3, [(1, 2, 3), (1, 1, 3)]),
    ("echo, 4 nodes", gated(f"echo:{SMALL},w_topk=2"), 4, [(2, 3, 4)]),
    ("echo, no budget", gated(f"echo:{SMALL},w_topk=2"), 0, [(0, 1, 0)] * 3),
]  # fmt: skip


@pytest.mark.parametrize(
    ("policy", "k_max", "expected"), [row[1:] for row in BY_HAND], ids=[row[0] for row in BY_HAND]
)
def test_three_positions_by_hand(policy, k_max, expected):
    assert walk(three_positions(), policy, k_max) == expected


@pytest.mark.parametrize(("rate", "levels"), [(0.5, 1), (0.6, 3), (0.8, 5), (0.9, 8)])
def test_chain_reaches_the_geometric_law(rate, levels):
    trace = constant_acceptance(np.random.default_rng(7), rate, positions=4000, chain=8)
    steps = walk(trace, parse(f"chain:levels={levels}"), 0)
    emitted = np.array([emitted for _, emitted, _ in steps[:-2]])
    expected = (1 - rate ** (levels + 1)) / (1 - rate)
    error = emitted.std(ddof=1) / np.sqrt(emitted.size)
    assert abs(emitted.mean() - expected) < 4 * error


def test_zero_thresholds_and_unlimited_budget_give_the_ungated_tree():
    trace = random_trace(np.random.default_rng(3), 4)
    shape = "levels=4,top_k=4,w_topk=3"
    open_all = gated(f"echo:{shape}", *((depth, 0.0) for depth in range(1, 5)))
    ungated = gated(f"echo:{shape}")
    for request in range(4):
        assert walk(trace, open_all, 10**6, request) == walk(trace, ungated, 10**6, request)


@pytest.mark.parametrize(
    "spec",
    [
        "echo:levels=4,top_k=4,w_topk=1",
        "echo:levels=4,top_k=4,w_topk=3,widen_depths=up_to_cut",
    ],
)
def test_no_budget_is_plain_decoding(spec):
    trace = random_trace(np.random.default_rng(4), 3)
    policy = gated(spec, (1, 0.2))
    for request in range(3):
        assert walk(trace, policy, 0, request) == walk(trace, parse("autoregressive"), 0, request)
