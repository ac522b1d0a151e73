"""How far a head's drafts are from what the target would say.

Shape letters: b sequences, T pairs, D draft vocabulary, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Goals:
    """What the pairs of a batch should say."""

    probs_bTD: Tensor
    """The target's probabilities of the token after next, over the draft vocabulary."""
    best_bT: Tensor
    """int64: the target's most likely token there, as an index of the draft vocabulary; -1 if the
    head cannot say it."""
    weight_bT: Tensor
    """float32: 0 where a pair does not count, because it is padded."""


def unrolled_loss(logits: Iterable[Tensor], goals: Goals, decay: float) -> Tensor:
    """Cross-entropy to the target's distribution, mean over pairs, decayed by draft step.

    Pairs whose token the head cannot say are left out, as no draft of it can be accepted.

    Args:
        logits: ``[b, T, D]`` of every step.
        goals: of the pairs.
        decay: weight of a step over the one before.
    """
    counted_bT = goals.weight_bT * (goals.best_bT >= 0)
    losses, weights = [], []
    for step, logits_bTD in enumerate(logits):
        weight_bT = _with_root(counted_bT, step)
        log_probs_bTD = logits_bTD.float().log_softmax(dim=-1)
        each_bT = -(goals.probs_bTD * log_probs_bTD).sum(-1)
        losses.append((each_bT * weight_bT).sum() / weight_bT.sum().clamp_min(1))
        weights.append(decay**step)
    scale = torch.tensor(weights, device=losses[0].device)
    return (torch.stack(losses) * scale).sum() / scale.sum()


def accepted_steps(logits: Iterable[Tensor], goals: Goals) -> Tensor:
    """int64 ``[2, steps]``: root pairs whose drafts up to each step were right, and that got there.

    The ratio of the two rows is the acceptance at a depth given acceptance before it, of a greedy
    chain against a greedy target.
    """
    right, tried = [], []
    alive_bT = goals.weight_bT > 0
    for step, logits_bTD in enumerate(logits):
        # Row t of step k speaks for the root t-k, so what is alive moves along with it.
        alive_bT = _with_root(alive_bT.roll(1, dims=1) if step else alive_bT, step)
        alive_bT = alive_bT & (goals.weight_bT > 0)
        tried.append(alive_bT.sum())
        alive_bT = alive_bT & (logits_bTD.argmax(-1) == goals.best_bT)
        right.append(alive_bT.sum())
    return torch.stack([torch.stack(right), torch.stack(tried)])


def _with_root(values_bT: Tensor, step: int) -> Tensor:
    """Values with those of rows that have no root at this step set to zero."""
    kept = values_bT.clone()
    kept[:, :step] = 0
    return kept
