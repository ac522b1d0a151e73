"""Prompt lookup: known answers of the prediction, and recordings made with it."""

import math
import tracemalloc
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError
from gpu_backend.config import RecordConfig
from gpu_backend.greedy import TargetOutput
from gpu_backend.prompt_lookup import ContextIndex
from gpu_backend.prompts import Prompt
from gpu_backend.recorded_outputs import RecordedOutputs
from gpu_backend.recording import record_lookup
from tests.traces.build import random_trace
from traces.schema import NO_SLOT, OUTSIDE_VOCAB, PAST_END, ModelInfo

VOCAB = 9
TEXTS = st.lists(st.integers(0, 3), min_size=1, max_size=24)


def index(text, **options):
    made = ContextIndex(**options)
    made.extend(text)
    return made


def test_one_occurrence_by_hand():
    """1 2 was followed by 3 once; what escapes goes to 2 alone, which names nothing new."""
    found = index([1, 2, 3, 1, 2]).followers()
    whole = 1 + 2 / 2**1.5
    assert found.tokens == (3,)
    assert np.exp(found.log_probs) == pytest.approx([1 / whole])
    assert found.escape == pytest.approx(1 - 1 / whole)


def test_shorter_context_gets_what_escapes():
    """After 1 2: 3 twice, 4 once, of 3 and the weight of two; after 2 alone 5 once, of 1 and 2."""
    found = index([1, 2, 3, 1, 2, 3, 1, 2, 4, 0, 2, 5, 1, 2]).followers()
    whole = 3 + 2 * 2 / 2**1.5
    left = 1 - 3 / whole
    assert found.tokens == (3, 4, 5)
    assert np.exp(found.log_probs) == pytest.approx([2 / whole, 1 / whole, left / 3])
    assert found.escape == pytest.approx(left * 2 / 3)


@pytest.mark.parametrize("order", [1, 2, 4, 8, 16])
def test_longer_matches_are_worth_more(order):
    """Guards against escape method C, which gives 0.5 at every order."""
    shared = list(range(10, 10 + order))
    found = index([1, *shared, 2, *shared]).followers()
    assert found.tokens[0] == 2
    assert math.exp(found.log_probs[0]) == pytest.approx(1 / (1 + 2 / order**1.5))


def plain_followers(text, drafted, max_ngram):
    """The definition, by a dictionary of every context."""
    places = {}
    for place in range(1, len(text)):
        for order in range(1, min(max_ngram, place) + 1):
            places.setdefault(tuple(text[place - order : place]), []).append(place)
    context = [*text, *drafted][-max_ngram:]
    shares, escape = {}, 1.0
    for order in range(len(context), 0, -1):
        ends = places.get(tuple(context[-order:]), [])
        new = [place for place in ends if text[place] not in shares]
        counts = Counter(text[place] for place in new)
        if not counts:
            continue
        weight = 2 / order**1.5 * len(counts)
        whole = counts.total() + weight
        latest = {text[place]: place for place in new}
        shares |= {t: (escape * count / whole, latest[t]) for t, count in counts.items()}
        escape = escape * weight / whole
    ranked = sorted(shares, key=lambda token: shares[token], reverse=True)
    return tuple(ranked), [shares[token][0] for token in ranked], escape


LONG_TEXTS = st.builds(
    lambda part, times, end: part * times + end,
    st.lists(st.integers(0, 2), min_size=1, max_size=40),
    st.integers(1, 300),
    st.lists(st.integers(0, 2), max_size=20),
)
"""From loops of one token, in which a pair stands often enough to be sorted, to few repeats."""


@settings(max_examples=60, deadline=None)
@given(TEXTS | LONG_TEXTS, st.lists(st.integers(0, 4), max_size=20), st.integers(1, 17), st.data())
def test_followers_are_those_of_the_definition(text, drafted, max_ngram, data):
    made = index(text, max_ngram=max_ngram)
    length = data.draw(st.none() | st.integers(0, len(text)))
    tokens, shares, escape = plain_followers(text[:length], drafted, max_ngram)
    found = made.followers(drafted, length)
    assert found.tokens == tokens
    assert np.exp(found.log_probs) == pytest.approx(shares)
    assert found.escape == pytest.approx(escape)


def test_memory_is_linear_in_the_text():
    """Guards against an index that keeps every context of every length."""
    tracemalloc.start()
    try:
        made = index(np.random.default_rng(0).integers(0, 10**5, 4000).tolist())
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held / len(made) < 800, "bytes a token"


def test_latest_of_equals_comes_first():
    assert index([1, 2, 1, 3, 1]).followers().tokens == (3, 2)


def test_drafted_tokens_are_context_but_no_evidence():
    text = index([1, 2, 3, 4, 0, 1])
    assert text.followers([2]).tokens == (3,)
    assert text.followers([2, 3]).tokens == (4,)
    assert text.followers([7]).tokens == ()


def test_nothing_is_found_in_a_text_without_repeats():
    found = index([1, 2, 3]).followers()
    assert (found.tokens, found.escape) == ((), 1.0)
    assert found.entropy(VOCAB) == pytest.approx(math.log(VOCAB))


@given(TEXTS, st.lists(st.integers(0, 4), max_size=4), st.integers(1, 5))
def test_followers_are_a_distribution(text, drafted, max_ngram):
    found = index(text, max_ngram=max_ngram).followers(drafted)
    shares = np.exp(found.log_probs)
    assert shares.sum() + found.escape == pytest.approx(1)
    assert list(shares) == sorted(shares, reverse=True)
    assert len(set(found.tokens)) == len(found.tokens)
    assert set(found.tokens) <= set(text)
    assert 0 <= found.entropy(VOCAB) <= math.log(VOCAB) + 1e-9


@given(TEXTS, TEXTS)
def test_what_comes_later_is_not_known(text, later):
    """Guards against a drafter that looks into the output it is to predict."""
    assert index(text + later).followers(length=len(text)) == index(text).followers()


@given(TEXTS)
def test_growing_equals_indexing_at_once(text):
    grown = ContextIndex()
    for token in text:
        grown.extend([token])
    assert grown.followers() == index(text).followers()


def recorded(prompt, output, num_emitted, config):
    asked = Prompt(task="t", question_id="1", token_ids=prompt, split="evaluation")
    said = TargetOutput(tokens=output, num_emitted=num_emitted, finish_reason="length")
    return record_lookup(asked, said, config, VOCAB)


SMALL = RecordConfig(levels=3, beam_width=2, root_width=4, top_k=3, chain_levels=5)


@given(TEXTS, st.lists(st.integers(0, 3), min_size=2, max_size=16))
def test_recording_equals_lookups_at_every_position(prompt, output):
    num_emitted = max(1, len(output) - SMALL.chain_levels)
    arrays = recorded(prompt, output, num_emitted, SMALL)
    for p in range(num_emitted - 1):
        text = index([*prompt, *output[: p + 1]])
        root = text.followers()
        kept = [*root.log_probs, *[-math.inf] * 4][:4]
        assert arrays.root_logp[p].tolist() == np.float16(kept).tolist()
        check_chain(text, arrays.chain_logp[p])
        for level, token in enumerate(output[p + 1 : p + 1 + SMALL.chain_levels]):
            found = text.followers(output[p + 1 : p + 1 + level]).tokens
            expected = found.index(token) if token in found else OUTSIDE_VOCAB
            assert arrays.path_rank[p, level] == expected
        assert (arrays.path_rank[p, len(output) - p - 1 :] == PAST_END).all()


def check_chain(text, chain_logp):
    drafted = []
    for value in chain_logp:
        found = text.followers(drafted)
        if not found.tokens:
            assert (chain_logp[len(drafted) :] == -np.inf).all()
            return
        assert value == np.float16(found.log_probs[0])
        drafted.append(found.tokens[0])


def test_beam_stops_where_nothing_is_proposed():
    arrays = recorded([1, 2, 3], [5, 1], 2, SMALL)
    assert (arrays.root_logp == -np.inf).all()
    assert (arrays.slot_child == NO_SLOT).all()
    assert (arrays.child_logp == -np.inf).all()


def test_wrong_recording_of_outputs_is_refused():
    trace = random_trace(np.random.default_rng(0))
    outputs = RecordedOutputs(trace, RecordConfig(levels=1, chain_levels=1))
    with pytest.raises(InputError, match="its digest is"):
        outputs.check_target(ModelInfo(name="other", digest="1" * 64))
    with pytest.raises(InputError, match="must look ahead 99 tokens"):
        RecordedOutputs(trace, RecordConfig(chain_levels=99)).check_target(trace.header.target)
    asked = Prompt(task="none", question_id="1", token_ids=[1], split="evaluation")
    with pytest.raises(InputError, match="none question 1 is not"):
        outputs.decode([asked])
