"""Two recordings side by side: planted differences are found, and nothing else is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError
from tests.traces.build import Sizes, random_trace, subset, traces
from traces.compare import Comparison, compare
from traces.content_difference import Count, match_slots
from traces.policy_difference import POLICIES, Replaying
from traces.schema import NO_SLOT, PAST_END, Trace
from traces.store import make_trace

LABELS = ("one", "other")
SIZES = Sizes(levels=4, beam_width=4, root_width=6, top_k=4, chain_levels=6, max_tokens=30)
QUICK = ["chain:levels=2", "eagle3:levels=3,top_k=3,nodes=4"]


def put(one: Trace, other: Trace, policies: list[str] | None = None) -> Comparison:
    return compare(one, other, labels=LABELS, policies=policies or QUICK)


def with_arrays(trace: Trace, **changes: np.ndarray) -> Trace:
    return make_trace(trace.header, dataclasses.replace(trace.arrays, **changes))


def with_infos(trace: Trace, **changes: object) -> Trace:
    infos = (trace.header.requests[0].model_copy(update=changes), *trace.header.requests[1:])
    return make_trace(trace.header.model_copy(update={"requests": infos}), trace.arrays)


@pytest.fixture(scope="module")
def trace() -> Trace:
    return random_trace(np.random.default_rng(8), 6, SIZES, entropies=True)


@settings(deadline=None, max_examples=20)
@given(trace=traces(), data=st.data())
def test_the_same_recording_is_identical_in_any_order(trace: Trace, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(trace.num_requests)))
    found = compare(
        trace, subset(trace, order), labels=LABELS, policies=["chain:levels=1", "static:tree=0/1"]
    )
    assert found.is_identical
    assert not found.header_fields
    assert found.positions == trace.num_positions
    assert all(pair.parting is None for pair in found.requests)
    content = found.content
    assert content is not None
    counts = [content.proposals, content.chain_agreement, content.chain_values]
    for count in [*counts, *content.slots, *content.nodes, *content.path_ranks]:
        assert count.differ == 0
    for gap in (content.root_logp, content.child_logp, content.chain_logp, content.path_logp):
        assert (gap.differ, gap.largest, gap.mean, gap.in_one_only) == (0, 0, 0, 0)
    assert content.root_logp.values > 0
    for row in found.policies:
        assert (row.plans_differ, row.accepted_differ) == (0, 0)
        assert row.positions == trace.num_positions


def test_equal_content_under_another_header_is_identical(trace: Trace) -> None:
    target = trace.header.target.model_copy(update={"dtype": "bfloat16"})
    other = make_trace(trace.header.model_copy(update={"target": target}), trace.arrays)
    found = put(trace, other)
    assert found.is_identical
    assert [(f.field, f.one, f.other) for f in found.header_fields] == [
        ("target.dtype", "float32", "bfloat16")
    ]
    assert found.digests[0] != found.digests[1]


def test_another_token_ends_what_is_compared(trace: Trace) -> None:
    q, place = 0, 5
    offset = int(trace.arrays.token_offset[q])
    start, stop = trace.positions(q).start, trace.positions(q).stop
    assert stop - start > place + 3
    tokens, ranks = trace.arrays.tokens.copy(), trace.arrays.path_rank.copy()
    tokens[offset + place] = (tokens[offset + place] + 1) % SIZES.vocab_size
    # All that follows from the other token: ranks at and beyond it, and all later positions.
    for p in range(start, stop):
        beyond = np.arange(1, ranks.shape[1] + 1) + (p - start) >= place
        ranks[p, beyond & (ranks[p] != PAST_END)] = 3
    root = trace.arrays.root_logp.copy()
    root[start + place : stop] = -1
    other = with_arrays(trace, tokens=tokens, path_rank=ranks, root_logp=root)
    found = put(trace, other)
    assert not found.is_identical
    pair = found.requests[q]
    assert pair.parting is not None
    assert (pair.parting.token, pair.positions) == (place, place)
    rank = int(trace.arrays.path_rank[start + place - 1, 0])
    assert (pair.parting.rank_one, pair.parting.rank_other) == (rank, 3)
    assert found.positions == trace.num_positions - (stop - start) + place
    assert found.content is not None
    assert all(count.differ == 0 for count in found.content.path_ranks)
    # Levels 1..place - 1 are common at the first position, none at the last one.
    whole = put(trace, trace).content
    assert whole is not None
    lost = [a.of - b.of for a, b in zip(whole.path_ranks, found.content.path_ranks, strict=True)]
    length = int(trace.arrays.token_offset[q + 1]) - offset
    expected = [
        min(stop - start, length - d) - max(min(place, place - d), 0)
        for d in range(1, SIZES.chain_levels + 1)
    ]
    assert lost == expected
    assert found.content.chain_agreement.differ == 0
    assert [(row.plans_differ, row.accepted_differ) for row in found.policies] == [(0, 0)] * 2


def test_the_prefill_token_leaves_nothing_to_compare(trace: Trace) -> None:
    tokens = trace.arrays.tokens.copy()
    tokens[trace.arrays.token_offset[:-1]] += 1
    found = put(trace, with_arrays(trace, tokens=tokens % SIZES.vocab_size))
    assert found.positions == 0
    assert found.content is None
    assert [pair.parting.rank_one for pair in found.requests if pair.parting] == [None] * 6


def test_one_changed_value_is_found_and_measured(trace: Trace) -> None:
    child = trace.arrays.child_logp.copy()
    before = float(child[2, 1, 0, 3])
    assert np.isfinite(before)
    child[2, 1, 0, 3] = before - 0.5
    content = put(trace, with_arrays(trace, child_logp=child)).content
    assert content is not None
    assert (content.child_logp.differ, content.child_logp.in_one_only) == (1, 0)
    assert content.child_logp.largest == pytest.approx(0.5, abs=0.01)
    assert content.child_logp.mean == content.child_logp.largest / content.child_logp.values
    assert (content.proposals.differ, content.chain_values.differ) == (1, 0)
    assert content.root_logp.differ == content.path_logp.differ == 0


def test_ranks_and_chains_that_meet_the_text_differently(trace: Trace) -> None:
    ranks = trace.arrays.path_rank.copy()
    hit = int(np.flatnonzero((ranks[:, 0] == 0) & (ranks[:, 1] != PAST_END))[0])
    ranks[hit, 0] = 1
    found = put(trace, with_arrays(trace, path_rank=ranks))
    assert found.content is not None
    assert [count.differ for count in found.content.path_ranks] == [1, 0, 0, 0, 0, 0]
    assert found.content.chain_agreement.differ == 1
    chain = found.policies[0]
    assert (chain.plans_differ, chain.accepted_differ) == (0, 1)


def test_other_proposals_make_other_plans(trace: Trace) -> None:
    root = trace.arrays.root_logp.copy()
    root[:, 1:] = -20  # nothing but the chain is worth a node any more
    found = put(trace, with_arrays(trace, root_logp=root))
    assert found.policies[0].plans_differ == 0
    wide = found.policies[1]
    assert wide.unrevealed > 0
    assert 0 < wide.plans_differ <= wide.positions - wide.unrevealed


def test_requests_and_their_data(trace: Trace) -> None:
    other = with_infos(subset(trace, [1, 2, 3]), max_new_tokens=999)
    found = put(subset(trace, [0, 1, 2]), other)
    assert (found.only_one, found.only_other) == (("chat/0",), ("chat/3",))
    assert found.request_fields == {"max_new_tokens": 1}
    assert not found.is_identical
    prompt = put(trace, with_infos(trace, prompt_tokens=7))
    assert not prompt.requests[0].has_same_prompt
    assert prompt.requests[0].positions == 0
    assert prompt.positions == trace.num_positions - trace.positions(0).stop


def test_entropies(trace: Trace) -> None:
    entropy = trace.arrays.root_entropy
    assert entropy is not None
    found = put(trace, with_arrays(trace, root_entropy=entropy + np.float16(1)))
    assert found.content is not None
    assert found.content.root_entropy.differ == trace.num_positions
    assert not found.is_identical
    less = with_arrays(trace, root_entropy=None, slot_entropy=None)
    found = put(trace, less)
    assert found.arrays_in_one_only == ("root_entropy", "slot_entropy")
    assert found.content is not None
    assert found.content.root_entropy.values == 0
    assert not found.is_identical


def test_what_cannot_be_compared_is_refused(trace: Trace) -> None:
    other = random_trace(np.random.default_rng(0), 2, dataclasses.replace(SIZES, top_k=3))
    with pytest.raises(InputError, match="agree in top_k; got 4 in one and 3 in other"):
        put(trace, other)
    with pytest.raises(InputError, match="other holds chat/0 as requests 0 and 1"):
        put(trace, subset(trace, [0, 0]))


def test_only_policies_that_were_asked_for_must_run(trace: Trace) -> None:
    found = compare(trace, trace, labels=LABELS, replaying=Replaying(positions=8, batch_size=4))
    rows = {row.policy: row for row in found.policies}
    assert tuple(rows) == POLICIES
    assert "levels" in rows["eagle3"].reason
    assert found.replaying.positions == 8
    for row in found.policies:
        assert row.positions == (0 if row.reason else 8)
    with pytest.raises(InputError, match="eagle3"):
        put(trace, trace, ["eagle3"])
    with pytest.raises(InputError, match="Calibration needs"):
        put(subset(trace, [0]), subset(trace, [0]), ["echo:levels=3,top_k=3,w_topk=1"])


@given(seed=st.integers(0, 2**32 - 1))
def test_a_node_is_its_path_in_whichever_slot(seed: int) -> None:
    rng = np.random.default_rng(seed)
    slots = random_trace(rng, 2, SIZES).arrays.slot_child.astype(np.int64)
    width = slots.shape[2]
    moved = slots.copy()
    place = np.tile(np.arange(width), (len(slots), 1))  # new slot of each old one, depth above
    expected = np.full(slots.shape, -1)
    for d in range(slots.shape[1]):
        candidate = slots[:, d]
        if d:
            parent = np.take_along_axis(place, np.maximum(candidate, 0) // SIZES.top_k, axis=1)
            renumbered = parent * SIZES.top_k + candidate % SIZES.top_k
            candidate = np.where(candidate == NO_SLOT, NO_SLOT, renumbered)
        place = rng.permuted(np.tile(np.arange(width), (len(slots), 1)), axis=1)
        np.put_along_axis(moved[:, d], place, candidate, axis=1)
        expected[:, d] = np.where(candidate == NO_SLOT, -1, place)
    assert (match_slots(slots, moved, SIZES.top_k) == expected).all()


def test_shares() -> None:
    assert Count(1, 4).share == 0.25
    assert np.isnan(Count(0, 0).share)
    assert Count(1, 4) + Count(2, 4) == Count(3, 8)
