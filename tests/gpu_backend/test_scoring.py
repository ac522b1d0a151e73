"""Ranks are by (logit descending, token id ascending), ties and all."""

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from gpu_backend.scoring import NO_TOKEN, Softmax, ranked_top_k, score_rows, score_tokens
from traces.schema import OUTSIDE_VOCAB

# Few distinct values, so that ties are everywhere, across the edge of the top k too.
TIED = hnp.arrays(
    np.float32,
    hnp.array_shapes(min_dims=2, max_dims=2, max_side=12),
    elements=st.integers(-3, 3).map(float),
)


@settings(deadline=None)
@given(TIED, st.integers(1, 14))
def test_top_k_is_exact_on_ties(logits, width):
    values, tokens = ranked_top_k(torch.from_numpy(logits), width)
    order = np.argsort(-logits, axis=1, kind="stable")[:, :width]
    assert tokens.tolist() == order.tolist()
    assert np.array_equal(values.numpy(), np.take_along_axis(logits, order, axis=1))


@settings(deadline=None)
@given(TIED, st.data())
def test_given_tokens_rank_as_children_do(logits, data):
    count, size = logits.shape
    tokens = data.draw(st.lists(st.integers(0, size), min_size=count, max_size=count))
    rows = torch.from_numpy(logits)
    softmax = Softmax.of(rows)
    scores = score_rows(rows, softmax, size + 2)
    ranks, logps = score_tokens(rows, softmax, torch.tensor(tokens))
    for i, token in enumerate(tokens):
        if token == size:
            assert (ranks[i], logps[i]) == (OUTSIDE_VOCAB, -np.inf)
        else:
            assert scores.child_token[i, ranks[i]] == token
            assert scores.child_logp[i, ranks[i]] == logps[i]
    assert (scores.child_token[:, size:] == NO_TOKEN).all()
    assert (scores.child_logp[:, size:] == -np.inf).all()


def test_log_probs_and_entropy():
    logits = torch.randn(9, 300, generator=torch.Generator().manual_seed(0)) * 5
    logits[2, 7] = float("-inf")
    softmax = Softmax.of(logits)
    true = torch.log_softmax(logits.double(), dim=1)
    torch.testing.assert_close(softmax.logp(logits).double(), true, rtol=0, atol=1e-5)
    entropy = torch.special.entr(true.exp()).sum(dim=1)
    torch.testing.assert_close(softmax.entropy.double(), entropy, rtol=0, atol=1e-5)


def test_certain_row():
    logits = torch.full((1, 50), -200.0)
    logits[0, 3] = 200.0
    scores = score_rows(logits, Softmax.of(logits), 2)
    assert scores.child_logp.tolist() == [[0.0, -400.0]]
    assert scores.entropy.tolist() == [0.0]
