"""How many rows a verify forward can have before it gets dear: timed on the machine at hand."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from gpu_backend.eagle3.ragged_head import RaggedHead
from gpu_backend.kv_slots import SlotTable
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.ragged_model import RaggedModel
from gpu_backend.ragged_pool import Branches
from gpu_backend.stopwatch import Clock
from gpu_backend.tree_layout import NO_PARENT, TreeRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gpu_backend.eagle3.head import Eagle3Head

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
    attention: AttentionName = "torch",
) -> Knee:
    """Time verify forwards of growing trees in a pool of their own.

    Args:
        model: the target, prepared for tree attention.
        batch_size: requests, B.
        context: committed tokens of every request.
        factor: of the knee rule.
        clock: seconds, read when the device is done.
        vocab_size: real tokens.
        attention: what reads the sequences.
    """
    timer = model_timer(
        model, batch_size, context, vocab_size=vocab_size, clock=clock, attention=attention
    )
    rows, seconds = [], []
    for nodes in NODES_PER_REQUEST:
        rows.append(batch_size * (nodes + 1))
        seconds.append(timer.seconds(batch_size, nodes))
        if seconds[-1] > factor * seconds[0]:
            break
    return Knee(tuple(rows), tuple(np.maximum.accumulate(seconds).tolist()), factor)


class BushTimer:
    """Times forwards over bushes, each a root with some children, in a pool of its own."""

    def __init__(
        self,
        table: SlotTable,
        run: Callable[[Sequence[Branches]], object],
        batch_size: int,
        context: int,
        clock: Clock,
    ) -> None:
        """Reserve the pool; nothing is computed.

        Args:
            table: of a pool for bushes of :func:`bush_room` slots.
            run: a forward over tree rows.
            batch_size: most requests.
            context: committed tokens of every request.
            clock: seconds, read when the device is done.
        """
        self.batch_size = batch_size
        self._run = run
        self._clock = clock
        for key in range(batch_size):
            table.reserve(key, bush_room(context))
            # What is in the slots costs the same.
            table.commit(key, np.arange(context))

    def seconds(self, requests: int, nodes: int) -> float:
        """Median seconds of a forward over a root and ``nodes`` children of each request."""
        tree = TreeRows(
            np.zeros(nodes + 1, dtype=np.int64),
            np.array([NO_PARENT, *[0] * nodes]),
            np.array([0, *[1] * nodes]),
        )
        branches = [tree.branches(key) for key in range(requests)]
        spent = []
        for _ in range(REPEATS + 1):
            start = self._clock()
            self._run(branches)
            spent.append(self._clock() - start)
        return statistics.median(spent[1:])


def bush_room(context: int) -> int:
    """Slots of a request with so many committed tokens and the largest bush."""
    return context + 1 + NODES_PER_REQUEST[-1]


def model_timer(
    model: PreTrainedModel,
    batch_size: int,
    context: int,
    *,
    vocab_size: int,
    clock: Clock,
    attention: AttentionName = "torch",
) -> BushTimer:
    """Timer of a model that reads tokens.

    Args:
        model: prepared for tree attention.
        batch_size: most requests.
        context: committed tokens of every request.
        vocab_size: real tokens.
        clock: seconds, read when the device is done.
        attention: what reads the sequences.
    """
    room = bush_room(context)
    ragged = RaggedModel(
        model,
        vocab_size=vocab_size,
        num_slots=batch_size * room,
        block=room,
        attention=attention,
    )
    return BushTimer(ragged.table, ragged.branch, batch_size, context, clock)


def head_timer(
    head: Eagle3Head,
    batch_size: int,
    context: int,
    *,
    clock: Clock,
    attention: AttentionName = "torch",
) -> BushTimer:
    """Timer of an EAGLE-3 head; likewise."""
    room = bush_room(context)
    ragged = RaggedHead(head, num_slots=batch_size * room, block=room, attention=attention)
    return BushTimer(ragged.table, ragged.branch_of_nothing, batch_size, context, clock)
