"""Plans as sets of rank paths: the fast comparison against a plain one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.registry import parse
from echo_policies.session import Decision
from tests.traces.build import Sizes, random_trace
from traces.positions import agreement, batch_context, drive, plans_differ
from traces.replay import RecordedDrafter, RecordedVerifier, replay_tables
from traces.schema import Trace

SIZES = Sizes(levels=5, beam_width=4, root_width=6, top_k=4, chain_levels=6, max_tokens=40)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return random_trace(np.random.default_rng(4), 6, SIZES)


def played(trace: Trace, spec: str, k_per_request: int = 6):
    policy = parse(spec)
    if spec.startswith("echo"):
        policy = policy.model_copy(update={"gate": ConfidenceGate(gate_set="off")})
    drafter = RecordedDrafter(replay_tables(trace))
    drafter.seek(torch.arange(trace.num_positions))
    ctx = batch_context(torch.full((trace.num_positions,), 50), k_per_request)
    return drive(policy, drafter, RecordedVerifier(drafter), ctx), drafter.unrevealed_B


def paths(decision: Decision) -> list[set[tuple[int, ...]]]:
    """Kept nodes of every request, each as the ranks that lead to it."""
    layers, tree = decision.forest.layers, decision.plan.template
    kept = decision.forest.split(decision.keep_BN)
    found: list[set[tuple[int, ...]]] = [set() for _ in range(decision.keep_BN.shape[0])]
    for depth, mask in enumerate(kept):
        for b, place in mask.nonzero().tolist():
            path, at = [], place
            for d in range(depth, -1, -1):
                if tree is not None:
                    path.append(tree.ranks[tree.layers[d]][at])
                else:
                    path.append(at % decision.plan.top_k)
                at = int(layers[d].parent_BW[b, at]) if d else 0
            found[b].add(tuple(reversed(path)))
    return found


PAIRS = [
    ("echo:levels=5,top_k=4,w_topk=2", "echo:levels=5,top_k=4,w_topk=1"),
    ("echo:levels=5,top_k=4,w_topk=2", "eagle3:levels=4,top_k=3,nodes=6"),
    ("eagle3:levels=4,top_k=3,nodes=5", "eagle3:levels=4,top_k=4,nodes=5"),
    ("chain:levels=3", "static:tree=0/00/000"),
    ("chain:levels=2", "chain:levels=3"),
    ("static:tree=0/1/10", "eagle3:levels=2,top_k=2,nodes=3"),
    ("autoregressive", "chain:levels=1"),
]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_plans_differ_where_rank_paths_do(trace: Trace, one: str, other: str) -> None:
    first, second = played(trace, one)[0].decision, played(trace, other)[0].decision
    expected = [a != b for a, b in zip(paths(first), paths(second), strict=True)]
    assert plans_differ(first, second).tolist() == expected
    assert plans_differ(second, first).tolist() == expected
    assert not plans_differ(first, first).any()


def test_the_pairs_show_both_outcomes(trace: Trace) -> None:
    shares = [
        float(plans_differ(*(played(trace, spec)[0].decision for spec in pair)).float().mean())
        for pair in PAIRS
    ]
    assert any(0 < share < 1 for share in shares)
    assert shares[3] == 0  # the same chain, scored and as a fixed tree
    assert shares[-1] > 0


def test_acceptance_is_compared_within_the_common_text(trace: Trace) -> None:
    short, hidden = played(trace, "chain:levels=1")
    long, _ = played(trace, "chain:levels=4")
    size = trace.num_positions
    anywhere = agreement(short, long, hidden == 0)
    assert anywhere.accepted_differs_B.tolist() == (long.accepted_B > 1).tolist()
    near = agreement(short, long, hidden == 0, torch.ones(size, dtype=torch.int64))
    assert near.counts() == (size, 0, int(near.plan_differs_B.sum()), 0)
    nowhere = agreement(short, long, torch.zeros(size, dtype=torch.bool))
    assert nowhere.counts() == (size, size, 0, 0)
