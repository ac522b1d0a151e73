"""What an engine writes down adds up: tokens, times, budgets; every kind of model serves."""

import dataclasses

import numpy as np
import pytest
import torch

from gpu_backend.sampling import Sampling
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving_batch import ServeRequest
from tests.gpu_backend.serve import make_engine, make_pair, requests, serve, true_output
from tests.gpu_backend.tiny import tiny_model
from traces.metrics import summarise
from traces.records import SPLIT

PROMPTS = [[5, 9, 40, 7], [11, 3], [60, 61, 62, 63, 64, 65, 66, 67], [8]]
POLICIES = ["chain:levels=3", "eagle3:levels=3,top_k=3,nodes=6", "echo:levels=4", "autoregressive"]


@pytest.fixture(scope="module")
def close():
    return make_pair(draft="close")


@pytest.mark.parametrize("spec", POLICIES)
def test_tokens_and_budgets_add_up(close, spec):
    asked = requests(PROMPTS, [9, 6, 8, 7])
    engine = make_engine(close, spec, asked, k_max=5)
    found = serve(engine, asked)
    log = engine.log.freeze()
    emitted = {r.number: int(log.emitted_SB[log.request_SB == r.number].sum()) for r in asked}
    assert emitted == {number: len(output) - 1 for number, output in found.items()}
    live = log.live_SB
    cut = log.emitted_SB < log.accepted_SB + 1
    assert (log.emitted_SB[live & ~cut] == log.accepted_SB[live & ~cut] + 1).all()
    assert (log.accepted_SB <= log.verified_SB).all()
    assert (log.verified_SB <= log.drafted_SB).all()
    assert not log.verified_SB[~live].any()
    if spec.startswith("echo"):
        assert (log.verified_SB.sum(axis=1) <= 5).all()
    assert [r.tokens for r in sorted(log.requests, key=lambda r: r.recorded)] == [9, 6, 8, 7]
    assert summarise(log).mat == pytest.approx(log.emitted_SB.sum() / live.sum())


@pytest.mark.parametrize("spec", POLICIES)
def test_parts_of_the_time_are_all_of_it(close, spec):
    """With a clock that ticks at every look, nothing is counted twice and little is left out."""
    asked = requests(PROMPTS, 6)
    engine = make_engine(close, spec, asked)
    start = engine.now()
    assert serve_all(engine, asked)
    total = engine.now() - start
    log = engine.log.freeze()
    times = dict(zip(SPLIT, log.times_SX.sum(axis=0), strict=True))
    assert 0 < log.times_SX.sum() <= total
    assert (log.times_SX >= 0).all()
    assert times["verify_s"] == log.levels_S.size  # one tick per step
    # A draft layer ticks once, and so does catching up, which gives the first layer.
    assert (times["draft_s"] > 0) == (spec != "autoregressive")
    assert (times["check_s"] > 0) == spec.startswith("echo")


def test_first_token_and_finish_are_in_order(close):
    asked = requests(PROMPTS, 6)
    engine = make_engine(close, "chain:levels=3", asked)
    serve(engine, asked)
    for done in engine.finished:
        assert 0 < done.first_token_s < done.finish_s


def test_arrivals_wait_for_their_time(close):
    """An idle engine sleeps until the next arrival and says how long."""
    asked = [
        dataclasses.replace(request, arrival_s=arrival)
        for request, arrival in zip(requests(PROMPTS, 3), (0.0, 5e3, 5e3, 2e4), strict=True)
    ]
    engine = make_engine(close, "chain:levels=3", asked)
    clock = engine._watch._clock

    def sleep(seconds):
        clock.seconds += seconds

    assert serve_all(engine, asked, sleep=sleep)
    records = {r.recorded: r for r in engine.log.freeze().requests}
    for request in asked:
        assert records[request.number].first_token_s > request.arrival_s
        assert records[request.number].ttft_s < 1e3
    assert engine.log.idle_s > 1.5e4


def test_a_stopped_run_keeps_what_is_finished(close):
    asked = requests(PROMPTS, 6)
    engine = make_engine(close, "chain:levels=3", asked, batch=1)
    whole = serve(make_engine(close, "chain:levels=3", asked, batch=1), asked)
    assert not serve_all(engine, asked, should_stop=lambda: len(engine.finished) == 2)
    assert {d.request.number: list(d.output) for d in engine.finished} == {
        number: whole[number] for number in (0, 1)
    }
    assert len(engine.log.freeze().requests) == 2


@pytest.mark.parametrize("kind", ["llama", "qwen3", "qwen3_moe"])
def test_every_kind_of_model_serves(kind):
    pair = make_pair(kind, draft="close")
    sampling = Sampling(temperature=0.8)
    asked = requests(PROMPTS, 7)
    plain = tiny_model(kind, seed=1)
    for spec in ("eagle3:levels=3,top_k=3,nodes=6", "echo:levels=4"):
        found = serve(make_engine(pair, spec, asked, sampling=sampling), asked)
        assert found == {r.number: true_output(plain, r, sampling) for r in asked}


def test_bfloat16_serves(close):
    """Half precision runs; near-ties may change tokens, so only lengths are certain."""
    pair = make_pair(draft="close", dtype=torch.bfloat16)
    asked = requests(PROMPTS, 7)
    engine = make_engine(pair, "eagle3:levels=3,top_k=3,nodes=6", asked)
    found = serve(engine, asked)
    assert [len(found[number]) for number in range(4)] == [7] * 4
    assert engine.log.freeze().accepted_SB.sum() > 0


def test_long_prompts_do_not_starve_running_requests(close):
    """A prompt longer than any chunk is read beside the others' steps, and is read right."""
    rng = np.random.default_rng(0)
    asked = [
        ServeRequest(0, [5, 6], 12),
        ServeRequest(1, rng.integers(2, 97, 40).tolist(), 4),
    ]
    engine = make_engine(close, "chain:levels=2", asked, prefill_chunk=3)
    found = serve(engine, asked)
    plain = tiny_model(seed=1)
    assert found == {r.number: true_output(plain, r) for r in asked}
    log = engine.log.freeze()
    first_of_long = int(np.argmax((log.request_SB == 1).any(axis=1)))
    assert first_of_long > 2
