"""Prompt lookup before a draft model: who proposes what, and that it changes no output."""

import functools
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from echo_policies.api import DraftPlan, Frontier
from echo_policies.errors import InputError, SignalError
from echo_policies.testing.play import LinearCosts
from gpu_backend.capture import Capture
from gpu_backend.combined_drafter import CombinedDrafter
from gpu_backend.parity import check_parity
from gpu_backend.ragged_model import Extension
from gpu_backend.sampling import Sampling
from gpu_backend.serve_config import make_serve_config
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

SAMPLINGS = {"greedy": GREEDY, "hot": Sampling(temperature=1.0)}
POLICIES = [
    "chain:levels=5",
    "eagle3:levels=4,top_k=3,nodes=8",
    "echo:levels=4,top_k=4",
    "price:levels=5",
    "price:levels=4,top_k=2,width=2,margin=0",
    "echo:levels=4,top_k=4,w_topk=3,widen=truncated_and_complete,widen_depths=up_to_cut",
]
CHAIN = DraftPlan(levels=6)


@functools.cache
def pair(draft, confidence=0.5, levels=2):
    """With 0.5, two tokens that stood together once before are enough, and one is not."""
    models = make_pair(draft=draft)
    return replace(models, looks_up=True, confidence=confidence, model_levels=levels)


@functools.cache
def asked():
    """Prompts that repeat themselves, and some that do not."""
    rng = np.random.default_rng(0)
    parts = [rng.integers(2, 97, length).tolist() for length in (3, 5, 2)]
    return requests([*(part * 3 for part in parts), [7], [4, 9, 11]], (24, 20, 1, 24, 16))


@functools.cache
def truth(sampling):
    plain = tiny_model(seed=1)
    return {r.number: true_output(plain, r, SAMPLINGS[sampling]) for r in asked()}


def drafter_over(*texts, **options):
    """A drafter that has read the texts, the last token of each as the root."""
    models = replace(pair("same"), **options)
    engine = make_engine(models, "chain:levels=6", requests(texts, 20), batch=len(texts))
    made = engine.drafter
    assert isinstance(made, CombinedDrafter)
    for slot, text in enumerate(texts):
        made.admit(slot, len(text) + 20)
        if text[:-1]:
            made.read([Extension(slot, text[:-1])])
        made.commit(slot, text[-1:])
    return made


def chain_of(made, num_B, plan=CHAIN):
    """Tokens proposed to every request, down a chain."""
    layer = made.begin(plan, torch.ones(num_B, dtype=torch.bool))
    while made.revealed and len(made.token_layers) < CHAIN.levels:
        layer = made.expand(layer, Frontier(torch.zeros((num_B, 1), dtype=int), layer.exists_BW))
    tokens, exists = made.tokens(), []
    exists = np.stack([np.isfinite(kids.logp_BFk[:, 0, 0].numpy()) for kids, _ in made.revealed])
    return [tokens[b, exists[:, b]].tolist() for b in range(num_B)]


def true_next(text, count):
    model = tiny_model(seed=1)
    return true_output(model, requests([text], count)[0])


def test_repetition_is_looked_up_and_the_rest_is_the_models():
    """Slot 0 repeats two tokens; slot 1 does not, so the model proposes its two levels."""
    repeats, new = [5, 6, 7, 8, 9, 5, 6], [11, 12, 13]
    first, second = chain_of(drafter_over(repeats, new), 2)
    assert first == [7, 8, 9, 5, 6, 7]
    assert second == true_next(new, 2)


@pytest.mark.parametrize(("confidence", "looked_up"), [(0.3, True), (0.58, True), (0.6, False)])
def test_confidence_is_the_probability_that_needs_no_model(confidence, looked_up):
    """Two tokens seen once: 1 / (1 + 2 / 2 ** 1.5) = 0.586."""
    text = [5, 6, 7, 8, 9, 5, 6]
    (found,) = chain_of(drafter_over(text, confidence=confidence, model_levels=1), 1)
    assert (found[0] == 7) is looked_up
    assert looked_up or found == true_next(text, 1)


def test_a_plan_says_how_deep_and_for_whom_the_model_runs():
    """And who must not ask it gets whatever was found, however unsure: 9, behind one 4."""
    unsure, new = [4, 9, 11, 4], [11, 12, 13]
    plan = replace(CHAIN, model_levels=3, model_slots=frozenset({1}))
    first, second = chain_of(drafter_over(unsure, new), 2, plan)
    assert first == [9, 11, 4, 9, 11, 4]
    assert second == true_next(new, 3)
    nobody = drafter_over(unsure, new)
    first, second = chain_of(nobody, 2, replace(CHAIN, model_levels=0))
    assert (first, second) == ([9, 11, 4, 9, 11, 4], [])
    assert nobody.num_forwards == 0


def test_who_proposed_a_candidate_is_known():
    """Kind: acceptance of a lookup that counts as the model's."""
    made = drafter_over([5, 6, 7, 8, 9, 5, 6], [11, 12, 13])
    chain_of(made, 2)
    by_model_LB = torch.stack([layer[:, 0] for layer in made.model_layers])
    assert by_model_LB[:, 0].tolist() == [False] * CHAIN.levels
    assert by_model_LB[:, 1].tolist() == [True, True, False, False, False, False]


def test_a_chain_goes_on_by_lookup_from_what_the_model_began():
    """Kind: a branch whose model-drafted tokens the lookup does not see."""
    made = drafter_over([21, 22, 60, 61, 62, 11, 12, 13])
    made._model.draft.extend = lambda given: torch.eye(VOCAB)[[21]]
    made._model.draft.branch = lambda given: torch.eye(VOCAB)[[22]]
    (found,) = chain_of(made, 1)
    assert found == [21, 22, 60, 61, 62, 11]


def test_where_everything_is_looked_up_no_forward_runs_and_later_one_catches_up():
    """Kind: keys and values of skipped tokens that are missing when the model is asked."""
    text = [5, 6, 7, 8, 9, 5, 6]
    made = drafter_over(text)
    calls, model = [], made._model.draft
    extend, branch = model.extend, model.branch
    model.extend = lambda given, **o: calls.append(len(given[0].tokens)) or extend(given, **o)
    model.branch = lambda given: calls.append("branch") or branch(given)
    chain_of(made, 1)
    made.commit(0, [7, 8])
    chain_of(made, 1)
    assert calls == []
    made.commit(0, [30])
    (found,) = chain_of(made, 1)
    assert calls == [10, "branch"]  # the whole text
    assert found == true_next([*text, 7, 8, 30], 2)
    made.commit(0, found)
    chain_of(made, 1)
    assert calls[2] == 2  # what was emitted since


@pytest.mark.parametrize(
    ("spec", "draft", "sampling"),
    [
        *itertools.product(POLICIES, ["close"], SAMPLINGS),
        ("chain:levels=5", "different", "greedy"),
        ("chain:levels=5", "same", "hot"),
        ("autoregressive", "close", "greedy"),
    ],
)
def test_output_is_the_targets_own(spec, draft, sampling):
    engine = make_engine(
        pair(draft), spec, asked(), sampling=SAMPLINGS[sampling], pool_requests=2, prefill_chunk=2
    )
    assert serve(engine, asked()) == truth(sampling)


@pytest.mark.parametrize(("confidence", "levels"), [(0.3, 3), (0.5, 2), (0.65, 1)])
def test_the_model_proposes_what_plain_text_gives(confidence, levels):
    """Kind: wrong keys and values after lookups, accepted paths or nothing accepted.

    The draft is the target, so whatever the model proposes to a root is the next token.
    """
    engine = make_engine(
        pair("same", confidence, levels), "chain:levels=5", asked(), prefill_chunk=3
    )
    engine.observer = capture = Capture(engine.drafter)
    asked_for, roots = [], engine.drafter._model.roots

    def noted(plan, drafting_B):
        asked_for.append(drafting_B.clone())
        return roots(plan, drafting_B)

    engine.drafter._model.roots = noted
    found = serve(engine, asked())
    drafted = [step for step in capture.steps if step.expansions]
    checked = 0
    for step, slots in zip(drafted, asked_for, strict=True):
        for slot, (request, length) in step.where.items():
            if slots[slot]:
                token = step.expansions[0].token_BFk[slot, 0, 0]
                assert token == found[request][length]
                checked += 1
    assert checked >= 5
    assert checked < sum(len(step.where) for step in drafted), "nothing was looked up"


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"is_staged": False, "caps_all": True, "k_max": 4}])
def test_replay_takes_the_same_decisions(spec, changes):
    given = {"num_slots": 3, "k_max": 10, "max_tokens": 45, "sampling": GREEDY}
    settings = ServeSettings(**given | {"costs": LinearCosts()} | changes)
    report = check_parity(pair("close"), calibrated(spec), settings, asked())
    assert report.first is None
    assert report.drafts >= 15
    assert report.accepted >= 4


def test_a_draft_with_a_cut_head_never_proposes_the_rest():
    """And the output is the target's own, tokens beyond the cut included."""
    models = make_pair(draft="different", draft_vocab=20)
    engine = make_engine(models, "eagle3:levels=3,top_k=3,nodes=6", asked())
    engine.observer = capture = Capture(engine.drafter)
    assert serve(engine, asked()) == truth("greedy")
    proposed = [layer for step in capture.steps for layer in step.tokens]
    assert proposed
    assert all(layer.max() < 20 for layer in proposed)
    assert max(max(tokens) for tokens in truth("greedy").values()) >= 20


def test_fixed_trees_are_refused():
    with pytest.raises(SignalError, match="verifies a fixed tree"):
        make_engine(pair("close"), "static:tree=0/1", asked())


@pytest.mark.parametrize(
    ("draft", "looks_up", "model"),
    [
        ("prompt-lookup", True, None),
        ("prompt-lookup+some/model", True, "some/model"),
        ("some/model", False, "some/model"),
    ],
)
def test_what_a_draft_option_names(draft, looks_up, model):
    config = make_serve_config({}, policies=("echo",), target="t", prompts=("p",), draft=draft)
    assert (config.looks_up, config.draft_model) == (looks_up, model)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"draft": "prompt-lookup+"}, "must name a model behind prompt-lookup"),
        ({"draft": "prompt-lookup", "draft_vocab": 10}, "prompt lookup has none"),
        ({"lookup_confidence": 1.5}, "lookup_confidence"),
    ],
)
def test_what_cannot_be_is_refused(options, message):
    with pytest.raises(InputError, match=message):
        make_serve_config({}, policies=("echo",), target="t", prompts=("p",), **options)
