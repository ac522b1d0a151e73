"""Examples in batches of like length, and what the pairs of a batch should say.

Shape letters: b sequences, T pairs, F features side by side, h target width, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from gpu_backend.head_training.features import Example
from gpu_backend.head_training.loss import Goals


@dataclass(frozen=True, slots=True)
class Batch:
    """Pairs of some sequences: feature of position t with token t+1, asked for token t+2."""

    tokens_bT: Tensor
    """int64: token t+1."""
    features_bTF: Tensor
    """float32."""
    next_bTh: Tensor
    """float32: the target's state at t+1, which says token t+2."""
    best_bT: Tensor
    """int64: what the target thinks token t+2 is."""
    is_pair_bT: Tensor
    """bool: False where padded."""
    in_answer_bT: Tensor
    """bool: token t+2 is part of an answer, or is what ends it."""

    @property
    def num_pairs(self) -> int:
        """Pairs, padding left out."""
        return int(self.is_pair_bT.sum())


def collate(examples: Sequence[Example]) -> Batch:
    """Put examples side by side, padded at their ends."""
    longest = max(len(example.tokens_T) for example in examples) - 1
    lengths_b = torch.tensor([len(example.tokens_T) - 1 for example in examples])
    starts_b = torch.tensor([example.answer_start for example in examples])
    index_T = torch.arange(longest)
    is_pair_bT = index_T < lengths_b[:, None]
    return Batch(
        pad_sequence([e.tokens_T[1:] for e in examples], batch_first=True),
        pad_sequence([e.features_TF[:-1].float() for e in examples], batch_first=True),
        pad_sequence([e.last_Th[1:].float() for e in examples], batch_first=True),
        pad_sequence([e.best_T[1:] for e in examples], batch_first=True),
        is_pair_bT,
        is_pair_bT & (index_T + 2 >= starts_b[:, None]),
    )


def batches(
    examples: Sequence[Example], batch_tokens: int, generator: torch.Generator
) -> Iterator[Batch]:
    """All examples once, in random batches of like length.

    Args:
        examples: of any length.
        batch_tokens: of a batch, padding included; an example longer than that is alone.
        generator: decides the order.
    """
    jitter = 1 + 0.1 * torch.rand(len(examples), generator=generator)
    size = torch.tensor([len(example.tokens_T) for example in examples]) * jitter
    groups: list[list[Example]] = [[]]
    for i in size.argsort().tolist():
        if groups[-1] and (len(groups[-1]) + 1) * len(examples[i].tokens_T) > batch_tokens:
            groups.append([])
        groups[-1].append(examples[i])
    for i in torch.randperm(len(groups), generator=generator).tolist():
        yield collate(groups[i])


def goals(batch: Batch, output_Dh: Tensor, place_V: Tensor, *, answers: bool) -> Goals:
    """What the pairs of a batch should say.

    Args:
        batch: the pairs.
        output_Dh: rows of the target's output layer for the draft vocabulary.
        place_V: int64 ``[V]``, index of every token in the draft vocabulary, -1 outside it.
        answers: count the pairs of answers only.
    """
    counted_bT = batch.in_answer_bT if answers else batch.is_pair_bT
    probs_bTD = (batch.next_bTh @ output_Dh.T).softmax(-1)
    return Goals(probs_bTD, place_V[batch.best_bT], counted_bT.float())
