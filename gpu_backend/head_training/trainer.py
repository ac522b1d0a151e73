"""The training loop: unrolled steps, AdamW, a checkpoint after every epoch."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch
from torch import Tensor, nn

from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.head_training.batches import Batch, batches, collate, goals
from gpu_backend.head_training.config import TrainConfig
from gpu_backend.head_training.features import Example
from gpu_backend.head_training.loss import Goals, accepted_steps, unrolled_loss
from gpu_backend.head_training.unroll import unroll

WARM_UP: Final = 0.05
"""Share of the training in which the learning rate rises."""

LAST_RATE: Final = 0.05
"""Learning rate at the end, over the highest."""

MAX_GRADIENT: Final = 1.0


@dataclass(frozen=True, slots=True)
class Epoch:
    """What an epoch came to."""

    number: int
    """From 1."""
    loss: float
    """Mean over the epoch's steps."""
    acceptance: tuple[float, ...]
    """Held-out acceptance at every depth, given acceptance at the depths before."""


class Trainer:
    """Trains a head; goes on from its checkpoint where there is one."""

    def __init__(
        self,
        head: Eagle3Head,
        config: TrainConfig,
        train: Sequence[Example],
        held_out: Sequence[Example],
        checkpoint: Path,
    ) -> None:
        """Bind head and data.

        Args:
            head: with the embedding and output layer that it keeps.
            config: settings.
            train: to learn from.
            held_out: to measure on.
            checkpoint: file of the training's state; of this very training, if it exists.
        """
        self._head = head
        self._config = config
        self._train, self._held_out = train, held_out
        self._checkpoint = checkpoint
        self._place_V = torch.full((head.config.vocab_size,), -1)
        self._place_V[head.token_ids] = torch.arange(len(head.token_ids))
        self._learned = [p for p in head.parameters() if p.requires_grad]
        self._optimiser = torch.optim.AdamW(
            self._learned, lr=config.learning_rate, betas=(0.9, 0.95), weight_decay=0.01
        )
        self.epochs: list[Epoch] = []

    def run(self, on_step: Callable[[int, int], None], on_epoch: Callable[[Epoch], None]) -> None:
        """Train to the end.

        Args:
            on_step: called with the pairs learned from, of all epochs, and the pairs in all.
            on_epoch: called after every epoch.
        """
        self._resume()
        per_epoch = sum(len(example.tokens_T) - 1 for example in self._train)
        total = per_epoch * self._config.epochs
        for number in range(len(self.epochs), self._config.epochs):
            order = torch.Generator().manual_seed(self._config.seed + number)
            done, losses = per_epoch * number, []
            for batch in batches(self._train, self._config.batch_tokens, order):
                losses.append(self._step(batch, done / total))
                done += batch.num_pairs
                on_step(done, total)
            accepted = acceptance(self._head, self._held_out, self._config.steps, self._place_V)
            self.epochs.append(Epoch(number + 1, sum(losses) / len(losses), accepted))
            self._save()
            on_epoch(self.epochs[-1])

    def _step(self, batch: Batch, progress: float) -> float:
        for group in self._optimiser.param_groups:
            group["lr"] = self._config.learning_rate * _rate(progress)
        goal = self._goals(batch, answers=False)
        loss = unrolled_loss(
            _logits(self._head, batch, self._config.steps), goal, self._config.step_decay
        )
        self._optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._learned, MAX_GRADIENT)
        self._optimiser.step()
        return float(loss.detach())

    def _goals(self, batch: Batch, *, answers: bool) -> Goals:
        with torch.no_grad():
            return goals(batch, self._head.lm_head.weight, self._place_V, answers=answers)

    def _save(self) -> None:
        state = {
            "head": {n: p for n, p in self._head.named_parameters() if p.requires_grad},
            "optimiser": self._optimiser.state_dict(),
            "epochs": [(e.number, e.loss, e.acceptance) for e in self.epochs],
        }
        temporary = self._checkpoint.with_suffix(".tmp")
        torch.save(state, temporary)
        temporary.replace(self._checkpoint)

    def _resume(self) -> None:
        if not self._checkpoint.exists():
            return
        state = torch.load(self._checkpoint, weights_only=True)
        self._head.load_state_dict(state["head"], strict=False)
        self._optimiser.load_state_dict(state["optimiser"])
        self.epochs = [Epoch(n, loss, tuple(accepted)) for n, loss, accepted in state["epochs"]]


@torch.no_grad()
def acceptance(
    head: Eagle3Head, examples: Sequence[Example], steps: int, place_V: Tensor
) -> tuple[float, ...]:
    """Greedy chain against greedy target in answers: acceptance by depth, given the one before.

    Args:
        head: made for training.
        examples: not learned from.
        steps: depths.
        place_V: int64 ``[V]``, index of every token in the draft vocabulary, -1 outside it.
    """
    counts = torch.zeros((2, steps), dtype=torch.int64)
    for example in examples:
        batch = collate([example])
        goal = goals(batch, head.lm_head.weight, place_V, answers=True)
        counts += accepted_steps(_logits(head, batch, steps), goal)
    right, tried = counts.tolist()
    return tuple(r / max(t, 1) for r, t in zip(right, tried, strict=True))


def _logits(head: Eagle3Head, batch: Batch, steps: int) -> list[Tensor]:
    return list(unroll(head, batch.tokens_bT, batch.features_bTF, batch.is_pair_bT, steps))


def _rate(progress: float) -> float:
    """Learning rate over its highest: a linear rise, then half a cosine down."""
    if progress < WARM_UP:
        return (progress + WARM_UP / 10) / (WARM_UP * 1.1)
    share = (progress - WARM_UP) / (1 - WARM_UP)
    return LAST_RATE + (1 - LAST_RATE) * 0.5 * (1 + math.cos(math.pi * share))
