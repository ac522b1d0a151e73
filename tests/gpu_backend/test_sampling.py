"""Noise is a good hash of its key, and tokens follow the warped distribution."""

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from gpu_backend.sampling import Sampling, choose, gumbel, noise_bits, request_seed
from tests.gpu_backend.serve import make_engine, make_pair, requests, serve
from tests.gpu_backend.tiny import VOCAB

MASK = 2**64 - 1


def mix(value):
    """splitmix64 in Python's own integers."""
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


@pytest.mark.parametrize("key", [(0, 0, 0), (1, 2, 3), (2**62, 40_000, 151_935), (-5, 7, 9)])
def test_hash_is_splitmix64(key):
    """A known answer, so that every device can be held against the same numbers."""
    seed, position, token = key
    expected = mix((mix((mix(seed & MASK) + position) & MASK) + token) & MASK)
    assert int(noise_bits(*map(torch.tensor, key))) & MASK == expected
    assert mix(0) == 0xE220A8397B1DCDAF  # first output of the published generator at seed 0


def test_noise_is_gumbel_whatever_varies():
    keys = torch.arange(20_000)
    one = torch.tensor(3)
    for noise in (gumbel(keys, one, one), gumbel(one, keys, one), gumbel(one, one, keys)):
        assert stats.kstest(noise.numpy(), "gumbel_r").pvalue > 1e-4


def top_bits(keys, count):
    """int64 [keys]: the first ``count`` hashed bits."""
    return (noise_bits(*keys) >> (64 - count)) & ((1 << count) - 1)


@pytest.mark.parametrize("varied", [0, 1, 2])
def test_noise_is_uniform_and_neighbours_are_independent(varied):
    """Kind: noise that takes few values, or that is the same for neighbouring keys.

    Chi-square over 64 cells of one key, and over 8 x 8 cells of a key and its neighbour in each of
    seed, position and token.
    """
    base = [torch.tensor(request_seed(1, 2)), torch.tensor(57), torch.tensor(11)]
    keys = [key + torch.arange(40_000) if i == varied else key for i, key in enumerate(base)]
    counts = np.bincount(top_bits(keys, 6).numpy(), minlength=64)
    assert stats.chisquare(counts).pvalue > 1e-4
    for other in range(3):
        beside = [key + 1 if i == other else key for i, key in enumerate(keys)]
        cells = top_bits(keys, 3) * 8 + top_bits(beside, 3)
        assert stats.chisquare(np.bincount(cells.numpy(), minlength=64)).pvalue > 1e-4


def test_every_bit_of_the_noise_is_fair():
    """Each of the 52 bits that are used, over 40,000 keys: a two-sided 1e-4 over all of them."""
    bits = noise_bits(torch.tensor(5), torch.arange(40_000), torch.tensor(3)).numpy()
    ones = ((bits[:, None] >> np.arange(12, 64)) & 1).sum(axis=0)
    limit = stats.norm.isf(1e-4 / 2 / 52)
    assert (np.abs(ones - 20_000) < limit * 100).all()


def test_requests_have_seeds_of_their_own():
    seeds = {request_seed(run, request) for run in range(10) for request in range(100)}
    assert len(seeds) == 1000


def draw(logits, sampling, count):
    seeds = torch.full((count,), 11)
    rows = torch.tensor(logits).expand(count, -1)
    return choose(rows, seeds, torch.arange(count), sampling).numpy()


@pytest.mark.parametrize(
    ("sampling", "expected"),
    [
        (Sampling(temperature=1.0), [0.4, 0.3, 0.2, 0.1]),
        (Sampling(temperature=0.5), np.array([16, 9, 4, 1]) / 30),
        (Sampling(temperature=1.0, top_k=2), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.6), [4 / 7, 3 / 7, 0, 0]),
        (Sampling(temperature=1.0, top_p=0.75), [4 / 9, 3 / 9, 2 / 9, 0]),
        (Sampling(temperature=1.0, top_p=1e-6), [1, 0, 0, 0]),
        # top-p acts on what top-k leaves: 4/7 of two tokens exceed one half
        (Sampling(temperature=1.0, top_k=2, top_p=0.55), [1, 0, 0, 0]),
    ],
)
def test_tokens_follow_the_warped_distribution(sampling, expected):
    count = 20_000
    found = np.bincount(draw(np.log([0.4, 0.3, 0.2, 0.1]), sampling, count), minlength=4)
    expected = np.asarray(expected) * count
    assert found[expected == 0].sum() == 0
    held = expected > 0
    assert stats.chisquare(found[held], expected[held]).pvalue > 1e-4 or held.sum() == 1


class Sorts(TorchDispatchMode):
    """Counts sorts of whole rows."""

    def __init__(self, width):
        super().__init__()
        self.width = width
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name in {"sort", "argsort", "msort"} and args[0].shape[-1] == self.width:
            self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("sampling", "sorts"),
    [
        (Sampling(), False),
        (Sampling(temperature=0.7), False),
        (Sampling(temperature=0.7, top_k=5), False),
        (Sampling(temperature=0.7, top_k=5, top_p=0.9), False),
        (Sampling(temperature=0.7, top_p=0.9), True),
    ],
)
def test_the_vocabulary_is_sorted_only_for_top_p(sampling, sorts):
    """Kind: renormalising for top-p although top_p is 1; in ``choose`` and in a whole run."""
    with Sorts(1000) as seen:
        choose(torch.randn(3, 1000), torch.arange(3), torch.arange(3), sampling)
    assert (seen.count > 0) == sorts
    asked = requests([[5, 9, 40], [7]], 5)
    engine = make_engine(
        make_pair(draft="same"), "eagle3:levels=2,top_k=2,nodes=4", asked, sampling=sampling
    )
    with Sorts(VOCAB) as seen:
        serve(engine, asked)
    assert (seen.count > 0) == sorts


def test_keys_and_tokens_are_64_bits_wide():
    """Kind: row times vocabulary overflows 32 bits; with 10,000 rows of 250,000 tokens it does."""
    with FakeTensorMode():
        rows = torch.arange(10_000)
        logits = torch.empty(10_000, 250_000)
        for sampling in (Sampling(), Sampling(temperature=1.0)):
            tokens = choose(logits, rows, rows, sampling)
            assert (tokens.dtype, tuple(tokens.shape)) == (torch.int64, (10_000,))
        assert noise_bits(rows, rows, rows).dtype == torch.int64


def test_greedy_takes_the_lowest_of_equal_tokens():
    tokens = draw([0.0, 2.0, 1.0, 2.0], Sampling(), 3)
    assert tokens.tolist() == [1, 1, 1]


def test_ties_at_the_edge_of_top_k_go_to_the_lowest_token():
    assert set(draw([1.0, 0.0, 1.0, 1.0], Sampling(temperature=1.0, top_k=2), 200)) == {0, 2}


def test_a_row_does_not_depend_on_its_neighbours():
    logits = torch.randn(6, 50, generator=torch.Generator().manual_seed(0))
    seeds, positions = torch.arange(6), torch.arange(6) * 3
    sampling = Sampling(temperature=0.8, top_p=0.9)
    together = choose(logits, seeds, positions, sampling)
    for row in range(6):
        one = slice(row, row + 1)
        assert choose(logits[one], seeds[one], positions[one], sampling) == together[row]


def test_repetition_penalty_is_refused_by_name():
    with pytest.raises(ValidationError, match="repetition_penalty must be 1"):
        Sampling(repetition_penalty=1.1)
