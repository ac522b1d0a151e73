"""Whatever the policy, the output is what one plain forward per token gives, token for token.

The whole product of settings would be 12,960 runs. Here every two values of every two settings
meet in some run (pairwise covering), so a fault that needs two settings to show is found; one that
needs three may not be.
"""

import functools
import itertools

import numpy as np
import pytest

from echo_policies.presets import PRESETS
from gpu_backend.sampling import Sampling
from tests.gpu_backend.covering import pairs_of, pairwise_rows
from tests.gpu_backend.serve import (
    GREEDY,
    make_engine,
    make_pair,
    outputs,
    requests,
    serve,
    true_output,
)
from tests.gpu_backend.tiny import tiny_model

SAMPLINGS = {
    "greedy": GREEDY,
    "warm": Sampling(temperature=0.7),
    "top-p": Sampling(temperature=1.0, top_p=0.9),
}
LENGTHS = (1, 5, 12, 3, 8)
LIMITS = (7, 10, 1, 9, 6)
CHUNKS = {"chunk 1": 1, "chunk 7": 7, "whole": None}
FACTORS = {
    "policy": tuple(PRESETS),
    "kind": ("qwen2", "llama", "qwen3", "qwen3_moe"),
    "draft": ("different", "close", "same"),
    "sampling": tuple(SAMPLINGS),
    "batch": (1, 3, 8),
    "chunk": tuple(CHUNKS),
    "mode": ("staged", "masked"),
    "arrivals": ("at once", "later"),
}
ROWS = pairwise_rows(FACTORS)


@functools.cache
def pair(kind, draft):
    return make_pair(kind, draft=draft)


@functools.cache
def asked():
    rng = np.random.default_rng(0)
    return requests([rng.integers(2, 97, length).tolist() for length in LENGTHS], LIMITS)


@functools.cache
def truth(kind, sampling):
    plain = tiny_model(kind, seed=1)
    return {r.number: true_output(plain, r, SAMPLINGS[sampling]) for r in asked()}


def test_every_two_values_meet():
    """The covering itself: all pairs of values of all pairs of settings."""
    met = {frozenset(pair) for row in ROWS for pair in pairs_of(row, FACTORS)}
    for one, other in itertools.combinations(FACTORS, 2):
        for x, y in itertools.product(FACTORS[one], FACTORS[other]):
            assert frozenset({(one, x), (other, y)}) in met
    assert len(ROWS) <= 50


def serve_later(engine):
    """A request joins whenever the others have made two steps."""
    for request in asked():
        engine.submit(request)
        for _ in range(2):
            engine.step()
            engine.check_integrity()
    return serve(engine, [])


@pytest.mark.parametrize("row", ROWS, ids=lambda row: "-".join(map(str, row.values())))
def test_output_is_the_targets_own(row):
    engine = make_engine(
        pair(row["kind"], row["draft"]),
        row["policy"],
        asked(),
        batch=row["batch"],
        sampling=SAMPLINGS[row["sampling"]],
        prefill_chunk=CHUNKS[row["chunk"]],
        is_staged=row["mode"] == "staged",
        pool_requests=max(1, row["batch"] - 1),  # less memory than slots, so admission waits
    )
    found = serve(engine, asked()) if row["arrivals"] == "at once" else serve_later(engine)
    assert found == truth(row["kind"], row["sampling"])
    log = engine.log.freeze()
    if row["policy"] != "autoregressive" and row["draft"] == "same":
        assert log.accepted_SB.sum() > 0, "nothing accepted, so nothing was tested"
    if row["policy"] == "autoregressive":
        assert (log.emitted_SB[log.live_SB] == 1).all()


@pytest.mark.parametrize("top_k", [1, 2, 4, 8])
@pytest.mark.parametrize("is_staged", [True, False])
def test_any_number_of_children(top_k, is_staged):
    """Kind: shapes that only work for one k."""
    engine = make_engine(
        pair("qwen2", "close"),
        f"eagle3:levels=3,top_k={top_k},nodes=9",
        asked()[:3],
        sampling=SAMPLINGS["warm"],
        is_staged=is_staged,
    )
    found = serve(engine, asked()[:3])
    assert found == {number: truth("qwen2", "warm")[number] for number in found}
    assert len(found) == 3


@pytest.mark.parametrize("policy", PRESETS)
def test_both_modes_accept_the_same(policy):
    """Kind: drafting that ends early at a check changes a plan or what is accepted."""

    def run(*, is_staged):
        engine = make_engine(
            pair("qwen2", "close"),
            policy,
            asked()[:4],
            batch=3,
            sampling=SAMPLINGS["warm"],
            is_staged=is_staged,
        )
        serve(engine, asked()[:4])
        return outputs(engine), engine.log.freeze()

    (found, staged), (other, masked) = run(is_staged=True), run(is_staged=False)
    assert found == other
    assert policy == "autoregressive" or staged.accepted_SB.sum() > 0
    for name in ("request_SB", "verified_SB", "accepted_SB", "emitted_SB", "expanded_SB"):
        assert getattr(staged, name).tolist() == getattr(masked, name).tolist(), name
    assert not masked.checks_S.any()
    if policy in {"echo", "dense", "fixed"}:
        assert staged.checks_S.any()
        assert staged.levels_S.sum() < masked.levels_S.sum()
