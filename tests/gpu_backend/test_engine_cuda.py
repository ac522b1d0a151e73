"""On CUDA: outputs are plain decoding's, decisions are the replay's, noise is the CPU's."""

import numpy as np
import pytest
import torch

from gpu_backend.parity import check_parity
from gpu_backend.sampling import Sampling, noise_bits
from gpu_backend.serving import ServeSettings
from tests.gpu_backend.serve import calibrated, make_engine, make_pair, requests, serve

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WARM = Sampling(temperature=0.8, top_p=0.95)


@pytest.fixture(scope="module")
def pair():
    made = make_pair(draft="close")
    for model in (made.target, made.draft):
        model.to("cuda")
    return made


@pytest.fixture(scope="module")
def asked():
    rng = np.random.default_rng(6)
    return requests([rng.integers(2, 97, size).tolist() for size in (3, 9, 1, 6)], 10)


@pytest.mark.parametrize("spec", ["chain:levels=4", "eagle3:levels=3,top_k=3,nodes=8", "echo"])
def test_serves_and_replays(pair, asked, spec):
    plain = serve(make_engine(pair, "autoregressive", asked, sampling=WARM), asked)
    assert serve(make_engine(pair, spec, asked, sampling=WARM), asked) == plain
    settings = ServeSettings(num_slots=3, k_max=12, max_tokens=19, sampling=WARM)
    assert check_parity(pair, calibrated(spec), settings, asked).first is None


def test_noise_is_the_same_on_every_device():
    keys = torch.arange(-500, 500)
    here = noise_bits(keys, keys * 3, keys + 7)
    there = noise_bits(keys.cuda(), keys.cuda() * 3, keys.cuda() + 7)
    assert torch.equal(here, there.cpu())
