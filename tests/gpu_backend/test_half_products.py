"""Half precision through float32 products gives what half-precision products give."""

import pytest
import torch

from gpu_backend import half_products
from gpu_backend.draft_tree import DraftTree
from gpu_backend.half_products import product, widen_linear_layers
from gpu_backend.model_preparation import prepare_model
from tests.gpu_backend.tiny import VOCAB, tiny_model

TEXT = torch.tensor([[5, 9, 13, 2, 7, 30, 41]])


@pytest.mark.parametrize("tied", [False, True])
@torch.inference_mode()
def test_widened_model_equals_the_half_precision_one(tied):
    plain = tiny_model(seed=4, tie_word_embeddings=tied).bfloat16()
    wide = tiny_model(seed=4, tie_word_embeddings=tied).bfloat16()
    widen_linear_layers(wide)
    assert wide.dtype == torch.bfloat16
    expected, given = plain(TEXT).logits, wide(TEXT).logits
    assert given.dtype == torch.bfloat16
    # The order of summation may move a result to the next representable value, and its followers.
    torch.testing.assert_close(
        given, expected, rtol=2**-5, atol=2**-5 * float(expected.abs().max())
    )
    exact = tiny_model(seed=4, tie_word_embeddings=tied)(TEXT).logits
    assert not torch.equal(given.float(), exact)


def test_products_round_once(monkeypatch):
    """Guards against rounding the operands' sum at every step, or not at all."""
    monkeypatch.setattr(half_products, "needs_widening", lambda *_: True)
    generator = torch.Generator().manual_seed(0)
    left, right = (torch.randn(6, 64, generator=generator).bfloat16() for _ in range(2))
    got = product(left, right.T)
    assert torch.equal(got, (left.double() @ right.double().T).bfloat16())


def test_draft_tree_runs_widened():
    model = tiny_model(seed=4).bfloat16()
    widen_linear_layers(model)
    prepare_model(model, VOCAB)
    tree = DraftTree(model, prefix_capacity=16, width=4)
    scores, _, _ = tree.prefill(TEXT[0].tolist(), 0)
    plain = tiny_model(seed=4).bfloat16()(TEXT).logits[0].float().log_softmax(-1)
    best = plain.topk(4, dim=1).values
    torch.testing.assert_close(torch.tensor(scores.child_logp).float(), best, rtol=0.1, atol=0.3)
