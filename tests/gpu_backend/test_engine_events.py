"""Stops, limits, arrivals and aborts, at every place of an accepted block."""

from dataclasses import replace

import numpy as np
import pytest

from echo_policies.errors import InputError, SignalError
from gpu_backend.sampling import Sampling
from gpu_backend.serving import ServeSettings, build_engine
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
from tests.gpu_backend.tiny import tiny_model

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
        pair = make_pair(draft="same", stops={free[place]})
        engine = make_engine(pair, LONG_CHAIN, asked, sampling=sampling)
        assert serve(engine, asked)[0] == free[: place + 1]
        assert engine.finished[0].finish_reason == "stop"
        if engine.log.times:
            records = engine.log.freeze()
            assert records.emitted_SB.sum() == place  # the first token comes from prefill
            assert (records.accepted_SB <= records.emitted_SB).all()


@pytest.mark.parametrize("spec", [LONG_CHAIN, TREE, SHARED])
def test_the_length_limit_is_exact(same, spec):
    """Kind: a block overshoots ``max_new_tokens``; D is 6 or 4."""
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
            make_pair(draft="same", stops={free[place]}), LONG_CHAIN, requests([PROMPT], limit)
        )
        found = serve(engine, requests([PROMPT], limit))
        assert found[0] == free[: min(limit, place + 1)]
        assert engine.finished[0].finish_reason == reason


def test_prompt_and_output_up_to_the_last_position(same):
    """Kind: an off-by-one where the position limit is; one token more is refused."""
    pair = make_pair(draft="same", limit=16)
    asked = requests([PROMPT], 12)
    assert asked[0].num_tokens == 16
    for spec in (LONG_CHAIN, TREE):
        engine = make_engine(pair, spec, asked)
        assert serve(engine, asked)[0] == true_output(tiny_model(seed=1, limit=16), asked[0])
        with pytest.raises(InputError, match="target: prompt and output must fit in 16 positions"):
            engine.submit(requests([PROMPT], 13)[0])
        assert not engine.has_work


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


@pytest.mark.parametrize(("spec", "num_requests"), [(SHARED, 120), (TREE, 60)])
def test_no_slot_leaks_over_random_arrivals_and_aborts(close, spec, num_requests):
    """Kind: a slot kept by a request that was aborted, stopped or cut by length."""
    lifecycle(close, spec, num_requests)


def test_no_text_leaks_with_prompt_lookup():
    lifecycle(make_pair(draft="lookup"), SHARED, 60)


@pytest.mark.slow
def test_no_slot_leaks_over_500_requests(close):
    lifecycle(close, SHARED, 500)


def lifecycle(pair, spec, num_requests):
    rng = np.random.default_rng(5)
    prompts = [rng.integers(2, 97, rng.integers(1, 9)).tolist() for _ in range(num_requests)]
    asked = requests(prompts, [int(limit) for limit in rng.integers(1, 8, num_requests)])
    stops = frozenset(range(2, 20))
    settings = ServeSettings(
        num_slots=4, k_max=10, max_tokens=16, sampling=GREEDY, prefill_chunk=5, pool_requests=3
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
            number = int(rng.integers(num_requests))
            if engine.abort(number):
                aborted.add(number)
        engine.step()
        engine.check_integrity()
    assert sorted(done.request.number for done in engine.finished) == list(range(num_requests))
    reasons = {done.finish_reason for done in engine.finished}
    assert reasons == {"stop", "length", "abort"}
    assert {d.request.number for d in engine.finished if d.finish_reason == "abort"} == aborted
