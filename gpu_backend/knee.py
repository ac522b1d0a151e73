"""How many rows a verify forward can have before it gets dear: timed on the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gpu_backend.ragged_model import RaggedModel
from gpu_backend.stopwatch import Clock
from gpu_backend.tree_layout import NO_PARENT, TreeRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

NODES_PER_REQUEST: Final = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Tree sizes that are timed, until one is beyond the knee."""

REPEATS: Final = 3
"""Forwards timed per size, after one that is not; their median counts."""


@dataclass(frozen=True, slots=True)
class Knee:
    """Seconds of a verify forward by rows, and the budget that follows."""

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    """Made monotone: more rows are never cheaper."""
    factor: float

    @property
    def k_max(self) -> int:
        """Most candidate nodes with ``t(k_max + B) <= factor * t(B)``, between timed sizes linear.

        Where even the largest timed size is below the limit, that size.
        """
        limit = self.factor * self.seconds[0]
        # Equal times would make the inverse ambiguous; the last row at a time is the one wanted.
        times, last = np.unique(np.array(self.seconds)[::-1], return_index=True)
        rows = np.array(self.rows)[::-1][last]
        return int(np.floor(np.interp(limit, times, rows))) - self.rows[0]


def measure_knee(
    model: PreTrainedModel,
    *,
    batch_size: int,
    context: int,
    factor: float,
    clock: Clock,
    vocab_size: int,
) -> Knee:
    """Time verify forwards of growing trees in a pool of their own.

    Args:
        model: the target, prepared for tree attention.
        batch_size: requests, B.
        context: committed tokens of every request.
        factor: of the knee rule.
        clock: seconds, read when the device is done.
        vocab_size: real tokens.
    """
    room = context + 1 + NODES_PER_REQUEST[-1]
    ragged = RaggedModel(model, vocab_size=vocab_size, num_slots=batch_size * room, block=room)
    for key in range(batch_size):
        ragged.table.reserve(key, room)
        ragged.table.commit(key, np.arange(context))  # what is in the slots costs the same
    rows, seconds = [], []
    for nodes in NODES_PER_REQUEST:
        rows.append(batch_size * (nodes + 1))
        seconds.append(_time(ragged, batch_size, nodes, clock))
        if seconds[-1] > factor * seconds[0]:
            break
    return Knee(tuple(rows), tuple(np.maximum.accumulate(seconds).tolist()), factor)


def _time(ragged: RaggedModel, batch_size: int, nodes: int, clock: Clock) -> float:
    """Median seconds of a forward over a root and a bush of ``nodes`` per request."""
    tree = TreeRows(
        np.zeros(nodes + 1, dtype=np.int64),
        np.array([NO_PARENT, *[0] * nodes]),
        np.array([0, *[1] * nodes]),
    )
    branches = [tree.branches(key) for key in range(batch_size)]
    spent: Sequence[float] = []
    for _ in range(REPEATS + 1):
        start = clock()
        ragged.branch(branches)
        spent = [*spent, clock() - start]
    return statistics.median(spent[1:])
