"""Training-time test: every row of every step is the draft that serving would make there."""

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.head_config import HeadConfig
from gpu_backend.head_training.loss import Goals, accepted_steps, unrolled_loss
from gpu_backend.head_training.unroll import ATTENTION_NAME, register_unrolled_attention, unroll

STEPS = 4
SIZE = 16


@pytest.fixture(scope="module")
def head():
    register_unrolled_attention()
    torch.manual_seed(0)
    config = HeadConfig(SIZE, 24, 4, 2, 6, 1e-5, 40, 23, SIZE, (2, 4, 5))
    return Eagle3Head(config, ATTENTION_NAME).eval()


def texts(lengths, seed=0):
    """Tokens, features and which of them are real; padding holds noise that must not matter."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(lengths), max(lengths))
    tokens = torch.randint(0, 40, shape, generator=generator)
    features = torch.randn((*shape, 3 * SIZE), generator=generator)
    return tokens, features, torch.arange(shape[1]) < torch.tensor(lengths)[:, None]


def slow_drafts(head, tokens_T, features_TF, root, steps):
    """Logits of every draft step behind one root: the whole branch as one causal sequence."""
    hidden = list(head.fuse(features_TF[: root + 1]))
    logits = []
    for step in range(steps):
        count = root + step + 1
        out = causal(head, tokens_T[None, :count], torch.stack(hidden)[None])
        logits.append(head.logits(out.normed)[0, -1])
        hidden.append(out.fed[0, -1])
    return torch.stack(logits)


def causal(head, tokens_1T, hidden_1Th):
    """The head over one sequence, every row seeing all rows before it."""

    class Dense:
        def attend(self, query, key, value):
            batch, heads, groups, length, dim = query.shape
            out = scaled_dot_product_attention(
                query.flatten(1, 2),
                key.repeat_interleave(groups, 1),
                value.repeat_interleave(groups, 1),
                is_causal=True,
                scale=1.0,
            )
            return out.view(batch, heads, groups, length, dim)

    positions = torch.arange(tokens_1T.shape[1])[None]
    return head(tokens_1T, hidden_1Th, positions, attention_mask=None, unrolled=Dense())


@torch.no_grad()
def test_every_row_is_the_draft_behind_its_root(head):
    """Kind: a draft step that sees the wrong keys, hidden state or position in training."""
    tokens, features, real = texts([9, 6])
    steps = list(unroll(head, tokens, features, real, STEPS))
    for sequence, length in enumerate((9, 6)):
        for root in range(length):
            count = min(STEPS, length - root)
            expected = slow_drafts(head, tokens[sequence], features[sequence], root, count)
            actual = torch.stack([steps[k][sequence, root + k] for k in range(count)])
            torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_padding_and_neighbours_change_nothing(head):
    """Kind: a sequence that sees another one or its own padding."""
    tokens, features, real = texts([9, 5, 7])
    together = list(unroll(head, tokens, features, real, STEPS))
    for i, length in enumerate((9, 5, 7)):
        part = (tokens[i : i + 1, :length], features[i : i + 1, :length], real[i : i + 1, :length])
        for step, alone in enumerate(unroll(head, *part, STEPS)):
            rows = slice(step, length)
            torch.testing.assert_close(
                together[step][i, rows], alone[0, rows], rtol=1e-4, atol=1e-5
            )


def test_gradients_flow_back_through_all_steps(head):
    """Kind: a step trained on states that are cut off from the steps before."""
    tokens, features, real = texts([6])
    features.requires_grad_()
    last = list(unroll(head, tokens, features, real, STEPS))[-1]
    last[0, -1].sum().backward()
    reaches = features.grad[0].abs().sum(-1) > 0
    assert reaches.tolist() == [True, True, True, False, False, False]


def one_hot_goals(best, weight, size=5):
    best_bT = torch.tensor(best)
    probs = torch.nn.functional.one_hot(best_bT.clamp_min(0), size).float()
    return Goals(probs, best_bT, torch.tensor(weight, dtype=torch.float32))


def test_loss_is_the_decayed_mean_cross_entropy_of_pairs_that_count():
    goals = one_hot_goals([[1, -1, 2]], [[1, 1, 1]])
    even, sure = torch.zeros(1, 3, 5), torch.zeros(1, 3, 5)
    sure[..., 2] = 100.0
    # Step 0 counts pairs 0 and 2, step 1 only pair 2: log 5 each, then log 5 and nothing.
    expected = (torch.log(torch.tensor(5.0)) + 0.5 * 0.0) / 1.5
    torch.testing.assert_close(unrolled_loss([even, sure], goals, 0.5), expected)


def test_acceptance_follows_each_root_along_its_branch():
    """Kind: acceptance at a depth counted without acceptance before it."""
    goals = one_hot_goals([[0, 1, 2, 3]], [[1, 1, 1, 1]])

    def says(tokens):
        return torch.nn.functional.one_hot(torch.tensor([tokens]), 5).float()

    # Step 0 is right at pairs 0, 1 and 3; step 1 tries pairs 1 and 2, whose roots were right.
    right, tried = accepted_steps([says([0, 1, 4, 3]), says([4, 1, 4, 4])], goals).tolist()
    assert (right, tried) == ([3, 1], [4, 2])


def test_pairs_outside_answers_are_no_roots():
    goals = one_hot_goals([[0, 1, 2]], [[0, 1, 1]])
    says = torch.nn.functional.one_hot(torch.tensor([[0, 1, 2]]), 5).float()
    right, tried = accepted_steps([says, says], goals).tolist()
    assert (right, tried) == ([2, 1], [2, 1])
