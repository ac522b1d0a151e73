"""Sampled output end to end against the target's own distribution, on a vocabulary of 8.

The target's attention is switched off, so that a token depends on the one before it alone: every
token of every request is then a draw from one of 8 known distributions, accepted or not. 20,000
draws find every total variation of 0.05: the non-centrality is then at least 4 n TV^2 = 200, on 56
degrees of freedom.
"""

import functools

import numpy as np
import pytest
import torch
from scipy import stats

from gpu_backend import serving
from gpu_backend.model_preparation import prepare_model
from gpu_backend.sampling import Sampling
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving import ModelPair
from tests.gpu_backend.serve import make_engine, outputs, requests
from tests.gpu_backend.tiny import disturb, tiny_model

V = 8
DRAWS = 20_000
FEWER_DRAWS = 4000
NUM_REQUESTS = 400
ALPHA = 1e-4
TREE = "eagle3:levels=2,top_k=3,nodes=8"


def markov_model():
    """One layer whose attention adds nothing, so logits are a function of the last token."""
    model = tiny_model("llama", seed=3, vocab=V)
    del model.model.layers[1:]
    model.config.num_hidden_layers = 1
    with torch.no_grad():
        model.model.layers[0].self_attn.o_proj.weight.zero_()
        model.lm_head.weight.mul_(1.5)
    return model


@pytest.fixture(scope="module")
def pair():
    target, draft = markov_model(), disturb(markov_model(), 0.1)
    for model in (target, draft):
        prepare_model(model, V)
    return ModelPair(target, draft, V, frozenset())


@pytest.fixture(autouse=True)
def laid_out_as_on_a_gpu(monkeypatch):
    """All requests in one product: several times faster for so many of them."""
    padded = functools.partial(serving.RaggedModel, pads=True)
    monkeypatch.setattr(serving, "RaggedModel", padded)


@torch.inference_mode()
def warped(sampling):
    """float64 [V, V]: the distribution after every token, in a plain numpy softmax."""
    logits = markov_model()(torch.arange(V)[:, None]).logits[:, -1].double().numpy()
    weights = np.exp(logits / sampling.temperature)
    law = weights / weights.sum(axis=1, keepdims=True)
    for row in law:
        order = np.argsort(-row)
        row[order[np.cumsum(row[order]) - row[order] >= sampling.top_p]] = 0
    return law / law.sum(axis=1, keepdims=True)


def transitions(pair, spec, sampling, draws=DRAWS):
    """int64 [V, V]: how often each token followed each token, and accepted tokens in all."""
    prompts = [[number % V] for number in range(NUM_REQUESTS)]
    asked = requests(prompts, draws // NUM_REQUESTS, seed=20)
    engine = make_engine(pair, spec, asked, batch=NUM_REQUESTS, k_max=1200, sampling=sampling)
    assert serve_all(engine, asked)
    found = outputs(engine)
    counts = np.zeros((V, V), dtype=np.int64)
    for request in asked:
        text = [*request.prompt, *found[request.number]]
        np.add.at(counts, (text[:-1], text[1:]), 1)
    assert counts.sum() == draws
    return counts, engine.log.freeze().accepted_SB.sum()


def p_value(counts_VV, law_VV):
    """Of all rows together; 0 if something impossible was emitted."""
    expected_VV = law_VV * counts_VV.sum(axis=1, keepdims=True)
    possible = law_VV > 0
    if counts_VV[~possible].any():
        return 0.0
    statistic = ((counts_VV - expected_VV)[possible] ** 2 / expected_VV[possible]).sum()
    return stats.chi2.sf(statistic, possible.sum() - len(law_VV))


@pytest.mark.parametrize(
    ("spec", "sampling"),
    [
        (TREE, Sampling(temperature=1.0)),
        ("echo:levels=2,top_k=2", Sampling(temperature=0.7, top_p=0.9)),
    ],
)
def test_sampled_output_has_the_targets_distribution(pair, spec, sampling):
    """Kind: a biased accept rule; a verifier that is silently greedy where it should sample."""
    law = warped(sampling)
    assert ((law > 0).sum(axis=1) > 1).all()
    counts, accepted = transitions(pair, spec, sampling)
    assert accepted > 0.2 * DRAWS
    assert p_value(counts, law) > ALPHA


def prefers_drafts(patch):
    """Typical acceptance: a token that is likely enough is taken in place of the draw."""
    original = Sampling.choose

    def choose(self, logits_NV, seed, position):
        tokens = original(self, logits_NV, seed, position)
        best = logits_NV.softmax(1).max(1)
        return torch.where((best.values > 0.3) & (position % 2 == 0), best.indices, tokens)

    patch.setattr(Sampling, "choose", choose)


def is_silently_greedy(patch):
    patch.setattr(Sampling, "choose", lambda self, logits, *rest: logits.argmax(1))


@pytest.mark.parametrize("fault", [prefers_drafts, is_silently_greedy])
def test_a_biased_rule_is_noticed(pair, fault, monkeypatch):
    sampling = Sampling(temperature=1.0)
    fault(monkeypatch)
    counts, _ = transitions(pair, TREE, sampling, FEWER_DRAWS)
    assert p_value(counts, warped(sampling)) < ALPHA
