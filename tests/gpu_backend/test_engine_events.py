"""Stops, limits, arrivals and aborts, at every place of an accepted block."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch

from echo_policies.errors import InputError, SignalError
from gpu_backend.model_preparation import prepare_model
from gpu_backend.sampling import Sampling
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest
from tests.gpu_backend.serve import (
    GREEDY,
    Ticks,
    calibrated,
    make_engine,
    make_pair,
    outputs,
    requests,
    serve,
    true_output,
)
from tests.gpu_backend.tiny import VOCAB, tiny_model

PROMPT = [5, 9, 40, 7]
LONG_CHAIN = "chain:levels=6"
TREE = "eagle3:levels=4,top_k=2,nodes=10"
SHARED = "echo:levels=4,top_k=4"


@pytest.fixture(scope="module")
def same():
    """A draft that is the target, so that whole paths are accepted."""
    return make_pair(draft="same")


@pytest.fixture(scope="module")
def close():
    return make_pair(draft="close")


def fresh_prefix(output, count):
    """The first ``count`` tokens of an output whose last one did not occur before."""
    return [i for i in range(count) if output[i] not in output[:i]]


def test_a_stop_token_ends_the_output_wherever_it_is_in_a_block(same):
    """Kind: a stop token inside an accepted block is passed over."""
    sampling = Sampling(temperature=1.0)
    asked = requests([PROMPT], 15)
    free = true_output(tiny_model(seed=1), asked[0], sampling)
    places = fresh_prefix(free, 14)
    assert len({place % 7 for place in places if place}) >= 6  # all places of a block of 7
    for place in places:
        pair = replace(same, stops=frozenset({free[place]}))
        engine = make_engine(pair, LONG_CHAIN, asked, sampling=sampling)
        assert serve(engine, asked)[0] == free[: place + 1]
        assert engine.finished[0].finish_reason == "stop"
        if engine.log.times:
            records = engine.log.freeze()
            assert records.emitted_SB.sum() == place  # the first token comes from prefill
            assert (records.accepted_SB <= records.emitted_SB).all()


def test_the_first_of_several_stop_tokens_ends_the_output(same):
    """Kind: only one of the stop ids is heeded, or the last of a block."""
    sampling = Sampling(temperature=1.0)
    asked = requests([PROMPT], 12)
    free = true_output(tiny_model(seed=1), asked[0], sampling)
    places = fresh_prefix(free, 11)
    for early, late in itertools.pairwise(places[1::2]):
        pair = replace(same, stops=frozenset({free[late], free[early], 96 - free[early]}))
        truth = true_output(tiny_model(seed=1), asked[0], sampling, stops=pair.stops)
        engine = make_engine(pair, LONG_CHAIN, asked, sampling=sampling)
        assert serve(engine, asked)[0] == truth


def test_a_stop_token_that_is_drafted_and_rejected_ends_nothing(close):
    """Kind: a stop token that was only drafted ends the output."""
    asked = requests([PROMPT, [8], [11, 3]], 12)
    truth = {r.number: true_output(tiny_model(seed=1), r) for r in asked}
    drafted = set()

    class Drafts:
        def decided(self, step):
            kept = step.decision.keep_BN.numpy()
            if kept.any():
                drafted.update(engine.drafter.tokens()[kept].tolist())

    engine = make_engine(close, TREE, asked)
    engine.observer = Drafts()
    assert serve(engine, asked) == truth
    stops = drafted - {token for output in truth.values() for token in output}
    assert len(stops) > 5
    engine = make_engine(replace(close, stops=frozenset(stops)), TREE, asked)
    assert serve(engine, asked) == truth
    assert {done.finish_reason for done in engine.finished} == {"length"}


@pytest.mark.parametrize("spec", [LONG_CHAIN, TREE, SHARED])
def test_the_length_limit_is_exact(same, spec):
    """Kind: a block overshoots ``max_new_tokens``, here 1 to 2 D; D is 6 or 4."""
    asked = requests([PROMPT] * 12, range(1, 13))
    engine = make_engine(same, spec, asked, batch=4)
    found = serve(engine, asked)
    whole = true_output(tiny_model(seed=1), asked[-1])
    for request in asked:
        assert found[request.number] == whole[: request.max_new_tokens]
    assert {done.finish_reason for done in engine.finished} == {"length"}


def test_the_earliest_of_stop_and_length_wins(same):
    """Kind: the length limit hides an earlier stop token in the same block."""
    asked = requests([PROMPT], 12)
    free = true_output(tiny_model(seed=1), asked[0])
    place = fresh_prefix(free, 6)[-1]
    for limit, reason in ((place, "length"), (place + 1, "stop"), (place + 2, "stop")):
        if limit < 1:
            continue
        engine = make_engine(
            replace(same, stops=frozenset({free[place]})), LONG_CHAIN, requests([PROMPT], limit)
        )
        found = serve(engine, requests([PROMPT], limit))
        assert found[0] == free[: min(limit, place + 1)]
        assert engine.finished[0].finish_reason == reason


def test_prompt_and_output_up_to_the_last_position(same):
    """Kind: an off-by-one where the position limit is; one token more is refused."""
    pair = make_pair(draft="same", limit=16)
    truth = true_output(tiny_model(seed=1, limit=16), requests([PROMPT], 12)[0])
    for spec, length in itertools.product((LONG_CHAIN, TREE), (15, 16)):
        asked = requests([PROMPT], length - len(PROMPT))
        engine = make_engine(pair, spec, asked)
        assert serve(engine, asked)[0] == truth[: asked[0].max_new_tokens]
        with pytest.raises(InputError, match="target: prompt and output must fit in 16 positions"):
            engine.submit(requests([PROMPT], 13)[0])
        assert not engine.has_work


def test_a_draft_with_fewer_positions_is_asked_for_its_own(same):
    """Kind: generation past what the draft was made for."""
    short = replace(same, draft=make_pair(draft="same", limit=16).draft)
    asked = requests([PROMPT], 12)
    engine = make_engine(short, LONG_CHAIN, asked)
    assert serve(engine, asked)[0] == true_output(tiny_model(seed=1), asked[0])
    with pytest.raises(InputError, match="draft: prompt and output must fit in 16 positions"):
        engine.submit(requests([PROMPT], 13)[0])


def test_padding_of_the_vocabulary_is_never_emitted():
    """Kind: rows of the head beyond the real vocabulary, here the likeliest, are drawn."""
    models = []
    for seed in (1, 2):
        model = tiny_model(seed=seed, vocab=VOCAB + 31)
        with torch.no_grad():
            model.lm_head.weight[VOCAB:] = 3 * model.lm_head.weight[:31]
        prepare_model(model, VOCAB)
        models.append(model)
    pair = ModelPair(*models, VOCAB, frozenset())
    asked = requests([PROMPT, [3], [9, 9]], 8)
    for sampling in (GREEDY, Sampling(temperature=1.0)):
        engine = make_engine(pair, TREE, asked, sampling=sampling)
        assert max(max(output) for output in serve(engine, asked).values()) < VOCAB


def test_a_seed_gives_one_text_under_every_policy(close):
    """Kind: a per-request seed that speculation does not honour."""
    sampling = Sampling(temperature=1.0)
    texts = {}
    for seed in (1, 2):
        asked = [ServeRequest(0, PROMPT, 8, seed)]
        found = [
            serve(make_engine(close, spec, asked, sampling=sampling), asked)[0]
            for spec in ("autoregressive", LONG_CHAIN, TREE, SHARED)
        ]
        assert all(text == found[0] for text in found)
        texts[seed] = found[0]
    assert texts[1] != texts[2]


def test_empty_prompts_and_empty_outputs_are_refused():
    with pytest.raises(InputError, match="at least one token; request 3 has none"):
        ServeRequest(3, [], 4)
    with pytest.raises(InputError, match="max_new_tokens must be at least 1"):
        ServeRequest(3, [1], 0)


def test_policies_that_draft_need_a_draft(same):
    alone = make_pair(draft="same").__class__(same.target, None, same.vocab_size, same.stops)
    with pytest.raises(SignalError, match="there is no draft model; give --draft"):
        make_engine(alone, "chain", requests([PROMPT], 4))


def test_what_never_fits_is_refused_and_what_does_not_fit_yet_waits(close):
    asked = requests([PROMPT] * 5, 6)
    engine = make_engine(close, TREE, asked, batch=4, pool_requests=2)
    with pytest.raises(InputError, match="target: a request must fit in the KV pool"):
        engine.submit(requests([PROMPT * 9], 30)[0])
    found = serve(engine, asked)
    assert len(found) == 5
    assert engine.log.freeze().live_SB.sum(axis=1).max() == 2


def test_a_request_does_not_depend_on_its_batch_mates(close):
    """Kind: seed, acceptance or text change with batch composition."""
    sampling = Sampling(temperature=0.9, top_k=20)
    rng = np.random.default_rng(3)
    prompts = [rng.integers(2, 97, size).tolist() for size in (3, 9, 1, 6)]
    asked = requests(prompts, 8)
    together = make_engine(close, TREE, asked, batch=4, sampling=sampling)
    found = serve(together, asked)
    records = together.log.freeze()
    for request in asked:
        alone = make_engine(close, TREE, [request], batch=1, sampling=sampling)
        assert serve(alone, [request])[request.number] == found[request.number]
        own = alone.log.freeze()
        here = records.request_SB == request.number
        assert own.accepted_SB[own.live_SB].tolist() == records.accepted_SB[here].tolist()


def test_arrivals_in_the_middle(close):
    """Requests that join a running batch leave everybody's text as it is."""
    rng = np.random.default_rng(4)
    asked = requests([rng.integers(2, 97, size).tolist() for size in (3, 12, 1, 6, 8)], 9)
    plain = tiny_model(seed=1)
    engine = make_engine(close, SHARED, asked, batch=3, prefill_chunk=4)
    for request in asked:
        engine.submit(request)
        engine.step()
        engine.step()
    while engine.has_work:
        engine.step()
    assert outputs(engine) == {r.number: true_output(plain, r) for r in asked}


@pytest.mark.parametrize(
    ("spec", "num_requests", "pool_requests"), [(SHARED, 60, 3), (TREE, 60, 3), (TREE, 40, 1)]
)
def test_no_slot_leaks_over_random_arrivals_and_aborts(close, spec, num_requests, pool_requests):
    """Kind: a slot kept by a request that was aborted, stopped or cut by length.

    The smallest pool holds one request of the greatest length, or a few short ones.
    """
    lifecycle(close, spec, num_requests, pool_requests)


def test_no_text_leaks_with_prompt_lookup():
    lifecycle(make_pair(draft="lookup"), SHARED, 60, 3)


@pytest.mark.slow
def test_no_slot_leaks_over_500_requests(close):
    lifecycle(close, SHARED, 500, 1)


def lifecycle(pair, spec, num_requests, pool_requests):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 97, rng.integers(1, 9)).tolist() for _ in range(num_requests)]
    asked = requests(prompts, [int(limit) for limit in rng.integers(1, 8, num_requests)])
    stops = frozenset(range(2, 20))
    settings = ServeSettings(
        num_slots=4,
        k_max=10,
        max_tokens=max(request.num_tokens for request in asked),
        sampling=GREEDY,
        prefill_chunk=5,
        pool_requests=pool_requests,
    )
    stopping = replace(pair, stops=stops)
    engine = build_engine(stopping, calibrated(spec), settings, Ticks())
    aborted = set()
    coming = list(asked)
    while coming or engine.has_work:
        for _ in range(int(rng.integers(0, 4))):
            if coming:
                engine.submit(coming.pop(0))
        if rng.random() < 0.2:
            gone = {done.request.number for done in engine.finished}
            here = [n for n in range(num_requests - len(coming)) if n not in gone]
            number = int(rng.choice(here)) if here else num_requests
            assert engine.abort(number) == bool(here)
            aborted |= {number} if here else set()
        engine.step()
        engine.check_integrity()
    assert sorted(done.request.number for done in engine.finished) == list(range(num_requests))
    reasons = {done.finish_reason for done in engine.finished}
    assert reasons == {"stop", "length", "abort"}
    assert {d.request.number for d in engine.finished if d.finish_reason == "abort"} == aborted
