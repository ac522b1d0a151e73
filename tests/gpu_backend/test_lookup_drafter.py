"""Prompt lookup in the serving engine: what it proposes, and that it changes no output."""

import functools
import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.api import DraftPlan, Frontier
from echo_policies.errors import SignalError
from echo_policies.registry import parse
from echo_policies.session import widest_plan
from gpu_backend.lookup_drafter import LookupDrafter
from gpu_backend.lookup_trie import LookupTrie
from gpu_backend.parity import check_parity
from gpu_backend.prompt_lookup import escape_weight
from gpu_backend.ragged_model import Extension
from gpu_backend.sampling import Sampling
from gpu_backend.serving import ServeSettings
from tests.gpu_backend.serve import (
    GREEDY,
    calibrated,
    make_engine,
    make_pair,
    requests,
    serve,
    true_output,
)
from tests.gpu_backend.tiny import VOCAB, tiny_model

HOT = Sampling(temperature=1.0)
SAMPLINGS = {"greedy": GREEDY, "hot": HOT}
POLICIES = [
    "chain:levels=5",
    "eagle3:levels=4,top_k=3,nodes=8",
    "echo:levels=4,top_k=4",
    "echo:levels=4,top_k=4,w_topk=3,widen=truncated_and_complete,widen_depths=up_to_cut",
    "dense:levels=4,top_k=4,w_topk=1,budget_order=round_robin",
]


@functools.cache
def pair():
    return make_pair(draft="lookup")


@functools.cache
def asked():
    """Prompts that repeat themselves, one that does not, and outputs long enough for loops."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(2, 97, length).tolist() for length in (3, 5, 2, 4)]
    return requests([*(part * 3 for part in parts), [7]], (30, 24, 30, 9, 1))


@functools.cache
def truth(sampling):
    plain = tiny_model(seed=1)
    return {r.number: true_output(plain, r, SAMPLINGS[sampling]) for r in asked()}


def drafter(*texts, slots=None):
    made = LookupDrafter(slots or len(texts), VOCAB)
    for slot, text in enumerate(texts):
        made.admit(slot, len(text))
        made.read([Extension(slot, text[:-1])])
        made.commit(slot, text[-1:])
    return made


def every(mask):
    return torch.tensor(mask)


def test_two_layers_by_hand():
    """3 twice and 4 once behind 1 2, 5 behind 2 alone: as in the test of the index."""
    text = [1, 2, 3, 1, 2, 3, 1, 2, 4, 0, 2, 5, 1, 2]
    made = drafter(text, [8, 9])
    plan = DraftPlan(levels=2, top_k=4, width=2)
    layer = made.begin(plan, every([True, True]))
    assert made.tokens()[0, :3].tolist() == [3, 4, 5]
    assert layer.exists_BW.tolist() == [[True, True, True, False], [False] * 4]
    whole = 3 + 2 * escape_weight(2)
    left = 2 * escape_weight(2) / whole
    shares = np.array([2 / whole, 1 / whole, left / (1 + escape_weight(1))])
    first = np.log(shares).astype(np.float16).astype(np.float32)
    assert layer.path_logp_BW[0, :3].tolist() == first.tolist()
    frontier = Frontier(torch.tensor([[0, 2], [0, 0]]), torch.tensor([[True, True], [False] * 2]))
    deeper = made.expand(layer, frontier)
    assert deeper.parent_BW[0].tolist() == [0] * 4 + [2] * 4
    for place, drafted in ((0, [3]), (1, [5])):
        found = made._text(0).followers(drafted)
        where = slice(4 * place, 4 * place + len(found.tokens))
        assert made.token_layers[1][0, where].tolist() == list(found.tokens[:4])
        added = first[2 * place] + np.array(found.log_probs, np.float16).astype(np.float32)
        assert deeper.path_logp_BW[0, where].tolist() == added.tolist()
    assert not deeper.exists_BW[1].any()
    assert made.tokens().shape == (2, 12)


def test_an_expanded_node_is_found_behind_its_whole_branch():
    """Kind: a branch that loses a token, or takes a sibling's; depth 3 shows it."""
    text = [1, 2, 3, 4, 5, 9, 3, 4, 6, 1]
    made = drafter(text)
    plan = DraftPlan(levels=4, top_k=2, width=2)
    layer = made.begin(plan, every([True]))
    for depth in range(2, 5):
        first = torch.tensor([[0]])
        layer = made.expand(layer, Frontier(first, layer.exists_BW.gather(1, first)))
        assert made.token_layers[-1][0, 0] == text[depth]  # 1 is followed by 2 3 4 5


@settings(max_examples=30, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=20), st.integers(1, 4))
def test_children_are_those_of_recordings(text, top_k):
    """The recorder's nodes at the text's last token."""
    made = drafter(text)
    layer = made.begin(DraftPlan(levels=1, top_k=top_k), every([True]))
    nodes = LookupTrie(text[:-1], text[-1:], width=top_k, vocab_size=VOCAB)
    assert np.array_equal(layer.path_logp_BW.numpy()[0], nodes.child_logp[0].astype(np.float32))
    exists = layer.exists_BW[0].numpy()
    assert np.array_equal(made.tokens()[0, exists], nodes.child_token[0, exists])
    assert layer.entropy_BF.item() == np.float32(nodes.entropy[0])


def test_a_slot_forgets_with_its_request():
    made = drafter([1, 2, 1], slots=2)
    made.release(0)
    made.check_integrity([])
    made.admit(0, 3)
    made.read([Extension(0, [1])])
    made.commit(0, [3])
    made.commit(0, [1])
    made.check_integrity([0])
    made.begin(DraftPlan(levels=1, top_k=2), every([True, False]))
    assert made.tokens()[0].tolist() == [3, 0]
    with pytest.raises(AssertionError):
        made.check_integrity([0, 1])


def test_fixed_trees_are_refused_and_chains_are_not():
    with pytest.raises(SignalError, match=r"verifies a fixed tree, but .* use a chain"):
        make_engine(pair(), "static:tree=0/1", asked())
    assert LookupDrafter(1, VOCAB).objection(widest_plan(parse("chain"))) is None


@pytest.mark.parametrize(
    ("spec", "sampling"), list(itertools.product(["autoregressive", *POLICIES], SAMPLINGS))
)
def test_output_is_the_targets_own(spec, sampling):
    engine = make_engine(pair(), spec, asked(), sampling=SAMPLINGS[sampling], pool_requests=2)
    assert serve(engine, asked()) == truth(sampling)
    records = engine.log.freeze()
    if spec == "autoregressive":
        assert records.verified_SB.sum() == 0
    elif sampling == "greedy":
        assert records.accepted_SB.sum() >= 10, "hardly anything accepted, so nothing was tested"


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"is_staged": False, "caps_all": True, "k_max": 4}])
def test_replay_takes_the_same_decisions(spec, changes):
    """Chains end in the replay where nothing was found in the run."""
    options = {"num_slots": 3, "k_max": 10, "max_tokens": 45, "sampling": GREEDY} | changes
    report = check_parity(pair(), calibrated(spec), ServeSettings(**options), asked())
    assert report.first is None
    assert report.drafts >= 15
    assert report.accepted >= 4


def test_chains_end_where_nothing_is_found():
    """Kind: a chain that is padded to its full length; parity would not see it in both engines."""
    engine = make_engine(pair(), "chain:levels=5", asked())
    serve(engine, asked())
    records = engine.log.freeze()
    lengths = set(records.verified_SB[records.live_SB].tolist())
    assert {0, 5} < lengths
