"""Linear layers whose weights are laid out once for oneDNN: some rows cost little more than one.

On a CPU a forward over a handful of rows is bound by reading the weights, yet the product that
torch chooses for a plain layer reads them about once per row. oneDNN's layout does not, so a tree
of eight rows costs about as much as two plain steps. A row's result no longer depends on how
many rows stand beside it either, which it does in the plain product.

Every call has a fixed cost, which shows in small models. So layers that a model gives one and the
same input, such as the projections to queries, keys and values, are taken in one product.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import torch
from torch import Tensor, nn

from gpu_backend.half_products import WideLinear

_SIBLINGS: Final = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that transformers' models give the same input, in the order of the calls."""

_ROWS: Final = 16
"""Rows that the layout is chosen for; from 8 to 512 the choice is the same one (x86, AVX2)."""


def can_pack() -> bool:
    """Whether this build of torch has the operators; without them layers stay as they are."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in names)
    return bool(torch.backends.mkldnn.is_available()) and has_operators  # type: ignore[no-untyped-call]


def describe_products() -> str:
    """Say in words how linear layers are multiplied on this machine's CPU, for reports."""
    return "linear layers packed" if can_pack() else "no oneDNN: linear layers not packed, slower"


def pack_linear_layers(model: nn.Module) -> int:
    """Pack every linear layer that lies on the CPU in float32, for good; returns how many.

    - Widened half-precision layers are float32 here and stay rounded as they were.
    - The plain weights are given up, layer by layer. A head that shares them with the embedding
      gets a copy of its own, because an embedding cannot be looked up in the packed layout.
    - Layers of another kind, on a GPU or in half precision that the CPU multiplies by itself stay
      as they are, and so does everything where :func:`can_pack` is False.

    Nothing can be learned and the model cannot change its device or dtype afterwards.
    """
    if not can_pack():
        return 0
    packed = 0
    for layers in [*_sibling_layers(model), *_single_layers(model)]:
        if all(map(_is_packable, layers)):
            _pack(layers)
            packed += len(layers)
    return packed


class PackedLinear(nn.Linear):
    """A linear layer for inference, or a part of one product with others of the same input.

    Its weights are in oneDNN's layout and no parameter.
    """

    product: PackedProduct
    part: int

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Linear
        """Multiply in float32; half-precision input is widened, and the result rounded once."""
        return self.product.output(self.part, input)


class PackedProduct:
    """One product for layers that are called one after the other with the same tensor.

    The first call computes all of them; the outputs are kept until the last one is taken. A call
    with another tensor computes anew, so any order of calls is right.
    """

    def __init__(self, weight: Tensor, bias: Tensor | None, widths: list[int]) -> None:
        """Take a packed weight, and the outputs of every layer."""
        self._weight = weight
        self._bias = bias
        self._widths = widths
        self._input: Tensor | None = None
        self._outputs: tuple[Tensor, ...] = ()

    def output(self, part: int, given: Tensor) -> Tensor:
        """Output of one layer."""
        if self._input is not given:
            self._input, self._outputs = given, self._multiply(given)
        output = self._outputs[part]
        if part == len(self._widths) - 1:
            self._input, self._outputs = None, ()
        return output

    def _multiply(self, given: Tensor) -> tuple[Tensor, ...]:
        if not given.numel():
            return tuple(given.new_zeros((*given.shape[:-1], width)) for width in self._widths)
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            given.float(), self._weight, self._bias, "none", [], ""
        ).to(given.dtype)
        return torch.split(output, self._widths, -1)


def _pack(layers: list[nn.Linear]) -> None:
    """Turn layers of one input into parts of one product."""
    weights = [layer.weight.detach() for layer in layers]
    weight = weights[0] if len(weights) == 1 else torch.cat(weights)
    biases = [layer.bias.detach() for layer in layers if layer.bias is not None]
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
    product = PackedProduct(
        packed, torch.cat(biases) if biases else None, [layer.out_features for layer in layers]
    )
    for part, layer in enumerate(layers):
        del layer.weight
        layer.register_parameter("bias", None)
        layer.__class__ = PackedLinear
        assert isinstance(layer, PackedLinear)
        layer.product, layer.part = product, part


def _sibling_layers(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for parent in model.modules():
        for names in _SIBLINGS:
            found = [getattr(parent, name, None) for name in names]
            layers = [layer for layer in found if isinstance(layer, nn.Linear)]
            kinds = {(layer.in_features, layer.bias is None) for layer in layers}
            if len(layers) == len(names) and len(kinds) == 1:
                yield layers


def _single_layers(model: nn.Module) -> Iterator[list[nn.Linear]]:
    for module in model.modules():
        if isinstance(module, nn.Linear):
            yield [module]


def _is_packable(layer: nn.Linear) -> bool:
    if type(layer) not in {nn.Linear, WideLinear}:
        return False
    return layer.weight.device.type == "cpu" and layer.weight.dtype == torch.float32
