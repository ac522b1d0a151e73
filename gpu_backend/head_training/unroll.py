"""Draft steps unrolled over a whole text: training-time test (arXiv 2503.01840, section 3.2).

Pair t is (feature of position t, token t+1) and is asked for token t+2. At step 0 every pair has
the target's feature; at step k its hidden state is the head's own output of step k-1 for pair t-1,
so row t of step k stands for the k-th draft behind the root pair t-k. What such a row may attend
to: real pairs up to its root, then the rows of its own branch, which lie on diagonals.

Shape letters: b sequences, T pairs, h kv heads, g query heads per kv head, d head dimension,
F features side by side, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor, nn

from gpu_backend.eagle3.head import Eagle3Head

ATTENTION_NAME: Final = "echo_unrolled"
"""Name under which transformers finds :func:`unrolled_attention`."""


@dataclass(slots=True)
class UnrolledSteps:
    """Keys and values of the steps so far; step k is ``len(keys)`` while it attends."""

    is_pair_bT: Tensor
    """bool: False where a sequence is padded at its end."""
    keys: list[Tensor] = field(default_factory=list)
    """``[b, h, T, d]`` of every step."""
    values: list[Tensor] = field(default_factory=list)

    def attend(self, query_bhgTd: Tensor, key_bhTd: Tensor, value_bhTd: Tensor) -> Tensor:
        """Add a step and attend from it; output ``[b, h, g, T, d]``."""
        self.keys.append(key_bhTd)
        self.values.append(value_bhTd)
        step, length = len(self.keys) - 1, query_bhgTd.shape[3]
        real_TT = _before_root(length, step, query_bhgTd.device)
        hidden = ~(real_TT & self.is_pair_bT[:, None, :])[:, None, None]
        scores = torch.matmul(query_bhgTd, self.keys[0][:, :, None].transpose(3, 4))
        scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
        own = [
            (query_bhgTd * _shifted(key, step - i)[:, :, None]).sum(-1, keepdim=True)
            for i, key in enumerate(self.keys[1:], start=1)
        ]
        weights = torch.cat([scores, *own], dim=-1).softmax(dim=-1)
        out = torch.matmul(weights[..., :length], self.values[0][:, :, None])
        for i, value in enumerate(self.values[1:], start=1):
            share = weights[..., length + i - 1, None]
            out = out + share * _shifted(value, step - i)[:, :, None]
        return out


def register_unrolled_attention() -> None:
    """Make :data:`ATTENTION_NAME` known to transformers; doing it again changes nothing."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, unrolled_attention)


def unrolled_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    unrolled: UnrolledSteps,
    **others: Any,
) -> tuple[Tensor, None]:
    """Attention function of a head in training; see :class:`UnrolledSteps`.

    Args:
        module: the attention layer.
        query: ``[b, h * g, T, d]`` after rope.
        key: ``[b, h, T, d]`` after rope, not repeated.
        value: ``[b, h, T, d]``.
        attention_mask: always None.
        scaling: factor on the scores.
        unrolled: the steps before, which this one is added to.
        others: nothing that changes the result.

    Returns:
        ``[b, T, h * g, d]`` and None.
    """
    del module, others
    assert attention_mask is None
    query_bhgTd = torch.unflatten(query, 1, (key.shape[1], -1)) * scaling
    out = unrolled.attend(query_bhgTd, key, value)
    return out.flatten(1, 2).transpose(1, 2), None


def unroll(
    head: Eagle3Head, tokens_bT: Tensor, features_bTF: Tensor, is_pair_bT: Tensor, steps: int
) -> Iterator[Tensor]:
    """Logits ``[b, T, D]`` of every draft step; row t of step k is defined for t >= k.

    Args:
        head: made with :data:`ATTENTION_NAME`.
        tokens_bT: int64, token t+1 of pair t.
        features_bTF: the target's features of position t.
        is_pair_bT: bool, False where padded; padding stands at the end.
        steps: how many.
    """
    unrolled = UnrolledSteps(is_pair_bT)
    positions_bT = torch.arange(tokens_bT.shape[1], device=tokens_bT.device).expand_as(tokens_bT)
    hidden = head.fuse(features_bTF)
    for _ in range(steps):
        out = head(tokens_bT, hidden, positions_bT, attention_mask=None, unrolled=unrolled)
        yield head.logits(out.normed)
        hidden = _shifted(out.fed, 1)


def _before_root(length: int, step: int, device: torch.device) -> Tensor:
    """bool ``[T, T]``: real pairs that a row of this step sees, which end with its root."""
    index = torch.arange(length, device=device)
    # Rows without a root see the first pair, so that no softmax is over nothing.
    root_T = (index - step).clamp_min(0)
    return index <= root_T[:, None]


def _shifted(values: Tensor, by: int) -> Tensor:
    """Values ``[..., T, n]`` moved ``by`` places towards the end; what comes in is any."""
    return values.roll(by, dims=-2) if by else values
