"""The builder's own promises: valid, repeatable, and the true beam."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from tests.traces.build import Sizes, random_trace, traces
from traces.schema import NO_SLOT, OUTSIDE_VOCAB, PAST_END, Trace
from traces.validate import check


@settings(deadline=None, max_examples=100)
@given(trace=traces())
def test_random_traces_are_valid(trace: Trace) -> None:
    assert check(trace) == []


def test_equal_seeds_give_equal_traces() -> None:
    first, second, other = (random_trace(np.random.default_rng(s)).digest for s in (5, 5, 6))
    assert first == second != other


@settings(deadline=None, max_examples=30)
@given(trace=traces())
def test_the_beam_is_the_best_by_path_log_prob(trace: Trace) -> None:
    """Plain loops: children of beam slots, float32 sums, ties by candidate index."""
    arrays, width, k = trace.arrays, trace.header.beam_width, trace.header.top_k
    for p in range(trace.num_positions):
        scores = {i: np.float32(x) for i, x in enumerate(arrays.root_logp[p])}
        for d in range(trace.header.levels - 1):
            ranked = sorted(scores, key=lambda i: (-scores[i], i))[:width]
            beam = [int(c) for c in arrays.slot_child[p, d, :width] if c != NO_SLOT]
            assert beam == ranked
            scores = {
                w * k + c: scores[node] + np.float32(arrays.child_logp[p, d, w, c])
                for w, node in enumerate(beam)
                for c in range(k)
            }


@settings(deadline=None, max_examples=30)
@given(trace=traces())
def test_a_revealed_path_node_has_the_stored_log_prob(trace: Trace) -> None:
    arrays, k = trace.arrays, trace.header.top_k
    for p in range(trace.num_positions):
        given_logp, node = arrays.root_logp[p], 0
        for c in range(trace.header.levels):
            rank = int(arrays.path_rank[p, c])
            if not 0 <= rank < len(given_logp):
                break
            assert arrays.path_logp[p, c] == given_logp[rank]
            slots = arrays.slot_child[p, c].tolist() if c < trace.header.levels - 1 else []
            candidate = node * k + rank
            if candidate not in slots:
                break
            node = slots.index(candidate)
            given_logp = arrays.child_logp[p, c, node]


def test_a_large_trace_has_every_case() -> None:
    trace = random_trace(np.random.default_rng(0), 40, Sizes(max_tokens=40))
    ranks, slots = trace.arrays.path_rank, trace.arrays.slot_child
    extra = slots[:, :, -1] != NO_SLOT
    assert {OUTSIDE_VOCAB, PAST_END} < set(ranks.ravel().tolist())
    assert 0.3 < (ranks[:, 0] == 0).mean() < 0.9
    assert (ranks[:, 0] >= trace.header.root_width).any()
    assert extra.any()
    assert not extra.all()
    assert (np.diff(trace.arrays.root_logp, axis=1) == 0).any(), "ties"
    assert {info.finish_reason for info in trace.header.requests} == {"stop", "length"}
