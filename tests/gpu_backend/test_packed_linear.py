"""Packed layers give what plain ones give, and a row's result is its own."""

import copy

import pytest
import torch
from torch import nn

from gpu_backend import packed_linear
from gpu_backend.half_products import widen_linear_layers
from gpu_backend.model_preparation import prepare_model
from gpu_backend.packed_linear import PackedLinear, can_pack, pack_linear_layers
from tests.gpu_backend.tiny import VOCAB, tiny_model

pytestmark = pytest.mark.skipif(not can_pack(), reason="this build of torch has no oneDNN")

TEXT = torch.tensor([[5, 9, 13, 2, 7, 30, 41]])


class Block(nn.Module):
    """Layers under the names that share one product, and one of its own."""

    def __init__(self, bias):
        super().__init__()
        for name, width in (("q_proj", 48), ("k_proj", 16), ("v_proj", 17), ("o_proj", 33)):
            setattr(self, name, nn.Linear(40, width, bias=bias))


def outputs(block, rows):
    return [getattr(block, name)(rows) for name in ("q_proj", "k_proj", "v_proj", "o_proj")]


@pytest.fixture(params=[False, True], ids=["no bias", "bias"])
def blocks(request):
    torch.manual_seed(0)
    plain = Block(request.param)
    packed = copy.deepcopy(plain)
    assert pack_linear_layers(packed) == 4
    return plain, packed


@torch.inference_mode()
def test_packed_layers_equal_plain_ones_for_any_number_of_rows(blocks):
    plain, packed = blocks
    rows = torch.randn(70, 40)
    for count in range(71):
        for given, expected in zip(
            outputs(packed, rows[:count]), outputs(plain, rows[:count]), strict=True
        ):
            torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_any_strides_and_any_leading_shape(blocks):
    plain, packed = blocks
    for rows in (torch.randn(40, 9).T, torch.randn(9, 80)[:, ::2], torch.randn(2, 3, 4, 40)):
        for given, expected in zip(outputs(packed, rows), outputs(plain, rows), strict=True):
            torch.testing.assert_close(given, expected, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_layers_of_one_product_may_be_called_in_any_order(blocks):
    """Kind: an output kept for one input and given for another."""
    plain, packed = blocks
    first, second = torch.randn(3, 40), torch.randn(3, 40)
    for name, rows in (("q_proj", first), ("k_proj", second), ("q_proj", second), ("v_proj", first),
                       ("k_proj", first), ("v_proj", first), ("v_proj", second)):  # fmt: skip
        expected = getattr(plain, name)(rows)
        torch.testing.assert_close(getattr(packed, name)(rows), expected, atol=1e-6, rtol=1e-5)


@torch.inference_mode()
def test_nothing_is_held_once_the_last_layer_was_called(blocks):
    """Kind: activations of the last forward that stay in memory."""
    _, packed = blocks
    outputs(packed, torch.randn(3, 40))
    assert packed.q_proj.product._input is None
    assert packed.q_proj.product._outputs == ()


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "qwen3_moe"])
@torch.inference_mode()
def test_prepared_models_compute_what_they_did(kind, tied):
    """A tied head and the embedding stay what they were, and the cut head ends at the cut."""
    plain = tiny_model(kind, seed=4, tie_word_embeddings=tied)
    packed = tiny_model(kind, seed=4, tie_word_embeddings=tied)
    prepare_model(packed, VOCAB - 10)
    head = packed.get_output_embeddings()
    assert isinstance(head, PackedLinear)
    assert not list(head.parameters())
    hidden = torch.randn(5, 32)
    expected = plain.get_output_embeddings()(hidden)[:, : VOCAB - 10]
    torch.testing.assert_close(head(hidden), expected, atol=1e-4, rtol=1e-5)
    assert torch.equal(packed.get_input_embeddings()(TEXT), plain.get_input_embeddings()(TEXT))


@torch.inference_mode()
def test_widened_layers_stay_rounded():
    wide, packed = tiny_model(seed=4).bfloat16(), tiny_model(seed=4).bfloat16()
    for model in (wide, packed):
        widen_linear_layers(model)
    assert pack_linear_layers(packed) > 0
    given, expected = packed(TEXT).logits, wide(TEXT).logits
    assert given.dtype == torch.bfloat16
    torch.testing.assert_close(
        given, expected, rtol=2**-5, atol=2**-5 * float(expected.abs().max())
    )


def test_half_precision_is_left_to_the_cpu():
    assert pack_linear_layers(tiny_model().bfloat16()) == 0


def test_without_the_operators_nothing_is_packed_and_reports_say_so(monkeypatch):
    """Kind: a slower path that nobody is told of."""
    assert packed_linear.describe_products() == "linear layers packed"
    monkeypatch.setattr(packed_linear, "can_pack", lambda: False)
    model = tiny_model()
    assert pack_linear_layers(model) == 0
    assert type(model.get_output_embeddings()) is nn.Linear
    assert "not packed" in packed_linear.describe_products()
