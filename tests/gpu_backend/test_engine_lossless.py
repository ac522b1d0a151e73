"""Whatever the policy, the output is what one plain forward per token gives, token for token."""

import functools
import itertools

import numpy as np
import pytest

from echo_policies.presets import PRESETS
from gpu_backend.sampling import Sampling
from tests.gpu_backend.serve import GREEDY, make_engine, make_pair, requests, serve, true_output
from tests.gpu_backend.tiny import tiny_model

SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=0.7),
    "top-p": Sampling(temperature=1.0, top_p=0.9),
}
LENGTHS = (1, 5, 12, 3, 8)
LIMITS = (7, 10, 1, 9, 6)
CHUNKS = {"one": 1, "seven": 7, "all": None}


@functools.cache
def pair(draft):
    return make_pair(draft=draft)


@functools.cache
def asked():
    rng = np.random.default_rng(0)
    return requests([rng.integers(2, 97, length).tolist() for length in LENGTHS], LIMITS)


@functools.cache
def truth(sampling):
    plain = tiny_model(seed=1)
    return {r.number: true_output(plain, r, SAMPLINGS[sampling]) for r in asked()}


# Every policy meets every draft, and every other pair of settings is met by some policy.
MATRIX = [
    (policy, draft, sampling, batch, chunk)
    for number, (policy, draft) in enumerate(
        itertools.product(PRESETS, ("different", "close", "same"))
    )
    for sampling, batch, chunk in [
        (
            list(SAMPLINGS)[number % 3],
            (1, 3, 8)[(number // 3 + number) % 3],
            list(CHUNKS)[(number // 9 + number) % 3],
        )
    ]
]


@pytest.mark.parametrize(("policy", "draft", "sampling", "batch", "chunk"), MATRIX)
def test_output_is_the_targets_own(policy, draft, sampling, batch, chunk):
    engine = make_engine(
        pair(draft),
        policy,
        asked(),
        batch=batch,
        sampling=SAMPLINGS[sampling],
        prefill_chunk=CHUNKS[chunk],
        pool_requests=max(1, batch - 1),  # less memory than slots, so admission waits
    )
    assert serve(engine, asked()) == truth(sampling)
    log = engine.log.freeze()
    if policy != "autoregressive" and draft != "different":
        assert log.accepted_SB.sum() > 0, "nothing accepted, so nothing was tested"
    if policy == "autoregressive":
        assert (log.emitted_SB[log.live_SB] == 1).all()
