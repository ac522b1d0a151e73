"""Linear layers whose weights are laid out once for oneDNN: few rows then cost little more than one.

On a CPU a forward over a handful of rows is bound by reading the weights, yet the product that
torch chooses for a plain layer reads them about once per row. oneDNN's layout does not, so a tree
of eight rows costs about as much as two plain steps. A row's result no longer depends on how
many rows stand beside it either, which it does in the plain product.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

from gpu_backend.half_products import WideLinear

_LAYERS: Final = (nn.Linear, WideLinear)

_ROWS: Final = 16
"""Rows that the layout is chosen for; from 8 to 512 the choice is the same one (x86, AVX2)."""


def can_pack() -> bool:
    """Whether this build of torch has the operators; without them layers stay as they are."""
    names = ("_reorder_linear_weight", "_linear_pointwise")
    has_operators = all(hasattr(torch.ops.mkldnn, name) for name in names)
    return torch.backends.mkldnn.is_available() and has_operators


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
    layers = [module for module in model.modules() if type(module) in _LAYERS]
    chosen = [layer for layer in layers if isinstance(layer, nn.Linear) and _is_packable(layer)]
    for layer in chosen:
        packed = torch.ops.mkldnn._reorder_linear_weight(layer.weight.detach(), _ROWS)
        del layer.weight
        layer.__class__ = PackedLinear
        assert isinstance(layer, PackedLinear)
        layer.packed = packed
    return len(chosen)


class PackedLinear(nn.Linear):
    """A linear layer for inference over weights in oneDNN's layout, which are no parameter."""

    packed: Tensor

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Linear
        if not input.numel():
            return input.new_zeros((*input.shape[:-1], self.out_features))
        output: Tensor = torch.ops.mkldnn._linear_pointwise.default(
            input.float(), self.packed, self.bias, "none", [], ""
        )
        return output.to(input.dtype)


def _is_packable(layer: nn.Linear) -> bool:
    weight = layer.weight
    return weight.device.type == "cpu" and weight.dtype == torch.float32
