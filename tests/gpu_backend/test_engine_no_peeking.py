"""A policy cannot know the outcome, and if it did the output would stay what it is."""

import dataclasses

import numpy as np
import pytest
import torch

from echo_policies.api import LayerView, StepContext
from echo_policies.forest import close_under_ancestors
from gpu_backend.sampling import Sampling
from gpu_backend.serving_batch import ServeRequest
from gpu_backend.verifier import TargetVerifier
from tests.gpu_backend.serve import make_engine, make_pair, requests, serve, true_output
from tests.gpu_backend.tiny import tiny_model

WARM = Sampling(temperature=1.0)
PROMPT = [5, 9, 40, 7]
TREE = "eagle3:levels=3,top_k=3,nodes=10"
LAYER = {"depth", "exists_BW", "parent_BW", "path_logp_BW", "is_sorted", "entropy_BF"}
TENSORS = {"live_B", "remaining_B", "arrival_B"}
NUMBERS = {"k_max", "step", "level_limit", "num_live", "remaining", "unread", "looks_up"}
CONTEXT = TENSORS | NUMBERS


class FirstStep:
    """Keeps what the first decision was made of."""

    def __init__(self):
        self.seen = None

    def decided(self, step):
        self.seen = self.seen or step


def first_decision(pair, spec, seed):
    asked = [ServeRequest(0, PROMPT, 6, seed)]
    engine = make_engine(pair, spec, asked, batch=1, sampling=WARM)
    engine.observer = FirstStep()
    return engine.observer, serve(engine, asked)[0]


@pytest.mark.parametrize("draft", ["close", "lookup"])
def test_what_a_policy_sees_holds_nothing_of_the_outcome(draft):
    """Kind: an anticipating gate, which reads of the very token that it lets through or not.

    It would need the request's seed, the target's logits or the tokens drawn, and no view has a
    field for them. Two requests that differ in nothing but the noise of the tokens to come look
    alike in every tensor of the step.
    """
    assert {field.name for field in dataclasses.fields(LayerView)} == LAYER
    assert {field.name for field in dataclasses.fields(StepContext)} == CONTEXT | {"costs"}
    pair = make_pair(draft=draft)
    plain = tiny_model(seed=1)
    texts = {s: true_output(plain, ServeRequest(0, PROMPT, 3, s), WARM) for s in range(40)}
    here = 0
    there = next(s for s, t in texts.items() if t[0] == texts[0][0] and t[1] != texts[0][1])
    for spec in (TREE, "echo:levels=3,top_k=3"):
        (one, text), (other, changed) = (first_decision(pair, spec, s) for s in (here, there))
        assert text[0] == changed[0]
        assert text[1] != changed[1]
        for view, same in zip(
            one.seen.decision.forest.layers, other.seen.decision.forest.layers, strict=True
        ):
            for name in LAYER:
                assert equal(getattr(view, name), getattr(same, name)), name
        for name in CONTEXT:
            assert equal(getattr(one.seen.ctx, name), getattr(other.seen.ctx, name)), name
        assert equal(one.seen.decision.keep_BN, other.seen.decision.keep_BN)


def equal(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    return left == right


def test_even_a_plan_that_knows_the_outcome_changes_no_token(monkeypatch):
    """A plan that drops exactly the nodes that would be accepted: slower, and as right.

    By the p/q rule of sampled drafts it would bias the output. Here a draft only saves forwards.
    """
    original = TargetVerifier.verify

    def verify(self, forest, keep_BN):
        original(self, forest, keep_BN)
        if forest.layers:
            tokens = torch.from_numpy(self._drafter.tokens())
            for slot, outcome in self.accepted.items():
                keep_BN = keep_BN.clone()
                keep_BN[slot, : forest.widths[0]] &= (
                    tokens[slot, : forest.widths[0]] != outcome.tokens[0]
                )
            keep_BN = close_under_ancestors(forest, keep_BN)
        self.accepted = {}
        return original(self, forest, keep_BN)

    monkeypatch.setattr(TargetVerifier, "verify", verify)
    rng = np.random.default_rng(2)
    asked = requests([rng.integers(2, 97, size).tolist() for size in (3, 1, 6)], 6)
    engine = make_engine(make_pair(draft="same"), TREE, asked, sampling=WARM)
    plain = tiny_model(seed=1)
    assert serve(engine, asked) == {r.number: true_output(plain, r, WARM) for r in asked}
    assert engine.log.freeze().accepted_SB.sum() == 0
