"""The law of one node, exactly: what is emitted follows the warped target, whatever is drafted.

A token is the argmax of warped logits plus noise, and the noise of every token is a monotone
function of 52 hashed bits. Here the bits are given instead of hashed, so that the code itself is
measured: token i wins against token j for exactly the first ``t`` of the 2**52 values of j's bits,
and bisection over calls of the code finds ``t``. For independent uniform bits the probability that
i is emitted is then the integral over i's own bits of the product of t / 2**52 over all others,
taken by Gauss-Legendre quadrature. The result is compared with a softmax computed independently.
That real bits are uniform and independent is a matter of the hash, tested in test_sampling.py.
"""

import functools
import itertools

import numpy as np
import pytest
import torch

from gpu_backend import sampling as sampling_module
from gpu_backend.acceptance import accept
from gpu_backend.sampling import Sampling, choose
from gpu_backend.tree_layout import NO_PARENT, TreeRows

LOGITS = torch.log(torch.tensor([0.31, 0.07, 0.4, 0.22], dtype=torch.float64)) + 3.0
V = len(LOGITS)
BITS = 52
LIMIT = 1e-12

CASES = [
    (Sampling(temperature=1.0), [0.31, 0.07, 0.4, 0.22]),
    (Sampling(temperature=0.7), np.array([0.31, 0.07, 0.4, 0.22]) ** (1 / 0.7)),
    (Sampling(temperature=1.3), np.array([0.31, 0.07, 0.4, 0.22]) ** (1 / 1.3)),
    (Sampling(temperature=1.0, top_k=3), [0.31, 0, 0.4, 0.22]),
    (Sampling(temperature=1.0, top_p=0.9), [0.31, 0, 0.4, 0.22]),
    (Sampling(temperature=1.0, top_p=0.6), [0.31, 0, 0.4, 0]),
    (Sampling(temperature=0.5, top_k=2, top_p=0.6), [0, 0, 1, 0]),
]


@pytest.fixture(autouse=True)
def given_bits(monkeypatch):
    """Rows are keyed by "seed", an index into a table of bits per row and token."""
    table = []

    def noise_bits(seed, position, token):
        del position
        rows, tokens = torch.broadcast_tensors(seed, token)
        return table[0][rows, tokens] << (64 - BITS)

    monkeypatch.setattr(sampling_module, "noise_bits", noise_bits)
    return table


def chosen(table, bits_NV, sampling):
    """What the code chooses for given bits of every token, int64 [N]."""
    table[:] = [bits_NV]
    rows = torch.arange(len(bits_NV))
    return choose(LOGITS.expand(len(rows), -1), rows, torch.zeros_like(rows), sampling)


@functools.cache
def nodes():
    """Bits and weights of the quadrature over one token's uniform number.

    The integrand is a power of it, smooth in its eighth root.
    """
    place, weight = np.polynomial.legendre.leggauss(160)
    root = (place + 1) / 2
    bits = torch.from_numpy(np.floor(root**8 * 2.0**BITS).astype(np.int64))
    return bits, weight / 2 * 8 * root**7


def thresholds(table, winner, sampling):
    """int64 [nodes, V]: how many values of each other token's bits leave the winner winning."""
    bits_n, _ = nodes()
    result = torch.full((len(bits_n), V), 2**BITS)
    for other in range(V):
        if other == winner:
            continue
        low, high = torch.zeros_like(bits_n), torch.full_like(bits_n, 2**BITS)
        while (low < high).any():
            middle = (low + high) // 2
            bits_nV = torch.zeros(len(bits_n), V, dtype=torch.int64)
            bits_nV[:, winner], bits_nV[:, other] = bits_n, middle.clamp(max=2**BITS - 1)
            wins = chosen(table, bits_nV, sampling) == winner
            is_open = low < high
            low = torch.where(is_open & wins, middle + 1, low)
            high = torch.where(is_open & ~wins, middle, high)
        result[:, other] = low
    return result


def law(table, sampling):
    """float64 [V]: probability of every token."""
    _, weights = nodes()
    shares = []
    for winner in range(V):
        share_nV = thresholds(table, winner, sampling).double() * 2.0**-BITS
        shares.append(float(share_nV.prod(1).numpy() @ weights))
    return np.array(shares)


@pytest.mark.parametrize(("sampling", "expected"), CASES)
def test_the_law_is_the_warped_distribution(given_bits, sampling, expected):
    expected = np.asarray(expected) / np.sum(expected)
    assert np.abs(law(given_bits, sampling) - expected).max() < LIMIT


@pytest.mark.parametrize("sampling", [case[0] for case in CASES[::3]])
def test_drafted_children_change_nothing(given_bits, sampling):
    """Kind: a biased accept rule.

    On both sides of every edge between two outcomes, and for every set of children: the token
    emitted is the one that is chosen without a draft, and a draft is accepted exactly if the
    chosen token is among the children. So the law above is the law of what is emitted, and the
    acceptance probability is the sum of it over the children.
    """
    step = 20
    bits_n = nodes()[0][::step]
    edges = []
    for winner in range(V):
        edge_nV = thresholds(given_bits, winner, sampling)[::step]
        for other, side in itertools.product(set(range(V)) - {winner}, (0, 1)):
            bits_nV = torch.zeros(len(bits_n), V, dtype=torch.int64)
            bits_nV[:, winner] = bits_n
            bits_nV[:, other] = (edge_nV[:, other] - side).clamp(0, 2**BITS - 1)
            edges.append(bits_nV)
    bits_NV = torch.cat(edges)
    possible = set(np.flatnonzero(law(given_bits, sampling) > 0).tolist())
    plain = chosen(given_bits, bits_NV, sampling).tolist()
    assert set(plain) == possible
    for size in range(V + 1):
        for children in itertools.combinations(range(V), size):
            tree = tree_of(children)
            outcome = accept(
                LOGITS.expand(len(plain) * tree.num_rows, -1),
                [tree] * len(plain),
                list(range(len(plain))),
                [0] * len(plain),
                sampling,
            )
            assert [part.tokens[0] for part in outcome] == plain
            assert [part.num_drafts for part in outcome] == [int(t in children) for t in plain]


def test_the_measure_notices_a_biased_rule(given_bits, monkeypatch):
    """Noise in single precision, or a wrong temperature, is far outside the limit."""
    sampling, exact = CASES[0]
    original = sampling_module.gumbel
    monkeypatch.setattr(sampling_module, "gumbel", lambda *key: original(*key).float().double())
    assert np.abs(law(given_bits, sampling) - exact).max() > 10 * LIMIT
    monkeypatch.setattr(sampling_module, "gumbel", lambda *key: original(*key) * 1.001)
    assert np.abs(law(given_bits, sampling) - exact).max() > 1e-5


def test_mass_entirely_on_rejected_children(given_bits):
    """Kind: a residual of zero mass gives NaN. There is no residual to begin with."""
    given_bits[:] = [torch.zeros(3, V, dtype=torch.int64)]
    logits_RV = torch.tensor([[-torch.inf, 0.0, -torch.inf, -torch.inf]]).expand(9, -1)
    outcome = accept(
        logits_RV, [tree_of((0, 2))] * 3, [0, 1, 2], [0] * 3, Sampling(temperature=1.0)
    )
    assert [(part.tokens, part.num_drafts) for part in outcome] == [([1], 0)] * 3


def tree_of(children):
    """A root with some children, which are leaves."""
    count = len(children)
    return TreeRows(
        np.array([0, *children], dtype=np.int64),
        np.array([NO_PARENT, *[0] * count], dtype=np.int64),
        np.array([0, *[1] * count], dtype=np.int64),
    )
