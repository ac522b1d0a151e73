"""A live run and its replay take the same decisions; a planted difference is named."""

import numpy as np
import pytest
import torch

from echo_policies.testing.play import LinearCosts
from gpu_backend.capture import Capture
from gpu_backend.parity import check_parity, differences
from gpu_backend.sampling import Sampling
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving import ServeSettings, build_engine
from tests.gpu_backend.serve import calibrated, make_pair, requests

POLICIES = [
    "chain:levels=5",
    "static:tree=0/1/2/00/01/10/000/001/0000",
    "eagle3:levels=4,top_k=3,nodes=8",
    "echo:levels=4,top_k=4",
    "echo:levels=4,top_k=4,w_topk=3,widen=truncated_and_complete,widen_depths=up_to_cut",
    "dense:levels=4,top_k=4,w_topk=1,budget_order=round_robin",
    "price:levels=5",
    "price:levels=4,top_k=2,width=2,margin=0",
]
WARM = Sampling(temperature=0.3)
LIMITS = [9, 12, 4, 10, 7]


@pytest.fixture(scope="module")
def close():
    return make_pair(draft="close")


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(2)
    return requests(
        [rng.integers(2, 97, size).tolist() for size in (3, 9, 1, 6, 4)], [9, 12, 4, 10, 7]
    )


def settings(**changes):
    given = {"num_slots": 3, "k_max": 10, "max_tokens": 21, "sampling": WARM}
    return ServeSettings(**given | {"costs": LinearCosts()} | changes)


@pytest.mark.parametrize("spec", POLICIES)
@pytest.mark.parametrize("changes", [{}, {"is_staged": False, "caps_all": True, "k_max": 4}])
def test_replay_takes_the_same_decisions(close, asked, spec, changes):
    report = check_parity(close, calibrated(spec), settings(**changes), asked)
    assert report.differences == 0
    assert report.drafts >= 15
    assert report.accepted >= 4


def test_half_precision_is_no_excuse(asked):
    pair = make_pair(draft="close", dtype=torch.bfloat16)
    report = check_parity(pair, calibrated("echo:levels=4,top_k=4"), settings(), asked)
    assert report.differences == 0
    assert report.accepted >= 4


def captured(pair, asked, spec):
    policy = calibrated(spec)
    engine = build_engine(pair, policy, settings())
    engine.observer = capture = Capture(engine.drafter)
    serve_all(engine, asked)
    outputs = {done.request.number: list(done.output) for done in engine.finished}
    return policy, capture.steps, outputs, engine.log.freeze()


def test_differences_are_found_and_named(close, asked):
    """Kind: a comparison that cannot fail."""
    policy, steps, outputs, records = captured(close, asked, "eagle3:levels=4,top_k=3,nodes=8")
    other = calibrated("eagle3:levels=4,top_k=3,nodes=7")
    said, *_ = differences(other, settings(), steps, outputs, records)
    assert "verified nodes: live 8, replayed 7" in said
    assert "(request " in said
    number, slot = np.argwhere(records.accepted_SB > 0)[0]
    records.accepted_SB[number, slot] -= 1
    said, *_ = differences(policy, settings(), steps, outputs, records)
    assert said.startswith(f"step {number}, slot {slot}, accepted tokens: live ")


def test_another_output_is_another_acceptance(close, asked):
    """The replay decides by the output's tokens alone, so a changed token shows."""
    policy, steps, outputs, records = captured(close, asked, "chain:levels=5")
    number, slot = np.argwhere(records.accepted_SB > 0)[0]
    request, length = steps[number].where[slot]
    outputs[request][length] += 1
    assert "accepted tokens" in next(differences(policy, settings(), steps, outputs, records))


def test_plain_decoding_has_nothing_to_compare(close, asked):
    report = check_parity(close, calibrated("autoregressive"), settings(), asked[:1])
    assert report.differences == 0
    assert report.steps == 0
