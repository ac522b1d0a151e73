"""Half precision on a CPU that has no instructions for it.

Such a CPU multiplies bfloat16 matrices many times slower than float32 ones. A half-precision
matrix product on any other device accumulates in float32 and rounds the result once, so the same
values come out, up to the order of summation, if operands are widened, multiplied and rounded.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn

HALF: Final = (torch.bfloat16, torch.float16)


def needs_widening(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether products of this kind are slow here and are better taken in float32."""
    if device.type != "cpu" or dtype not in HALF:
        return False
    native = "bf16" if dtype == torch.bfloat16 else "fp16"
    return not bool(getattr(torch.ops.mkldnn, f"_is_mkldnn_{native}_supported")())


def widen_linear_layers(model: nn.Module) -> None:
    """Let every linear layer hold its rounded weights in float32 and round its result.

    What the layers compute with is unchanged: the weights are the half-precision ones. A head
    that shares its weights with the embedding gets a copy of its own.
    """
    for module in list(model.modules()):
        if isinstance(module, nn.Linear):
            module.__class__ = WideLinear
            for name, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, name, nn.Parameter(parameter.float(), requires_grad=False))


def product(left: Tensor, right: Tensor) -> Tensor:
    """Matrix product of two tensors of one dtype, in the way that is fast on their device."""
    if not needs_widening(left.dtype, left.device):
        return torch.matmul(left, right)
    return torch.matmul(left.float(), right.float()).to(left.dtype)


class WideLinear(nn.Linear):
    """A linear layer with float32 weights for half-precision input and output."""

    def forward(self, input: Tensor) -> Tensor:  # noqa: A002 - the name of nn.Linear
        return nn.functional.linear(input.float(), self.weight, self.bias).to(input.dtype)
