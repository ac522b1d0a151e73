"""Times forwards of growing size on the machine at hand, against whatever else disturbs it.

What counts are differences between sizes of a few per cent, and a machine's speed can move by more
within seconds. So sizes take turns in rounds, until the fastest turn of each has come twice.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np

from gpu_backend.curve import Curve
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
"""Tree sizes that are timed."""

MOST_ROUNDS: Final = 8
"""After which the fastest turns count, come again or not."""

SAME: Final = 1.02
"""Times the fastest turn, within which another one is the same."""


class Bush(NamedTuple):
    """What a forward is timed over: a root of each request with some children."""

    requests: int
    nodes: int
    """Children of each root."""

    @property
    def rows(self) -> int:
        """Of the forward."""
        return self.requests * (self.nodes + 1)


class BushTimer:
    """Times forwards over bushes in a pool of its own."""

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

    def curve(self, bushes: Iterable[Bush], up_to: float) -> Curve:
        """Time forwards of growing size.

        Args:
            bushes: ascending by rows.
            up_to: times the seconds of all roots alone; the first bush beyond is the last one.
        """
        turns: dict[Bush, list[float]] = {}
        limit = np.inf
        for bush in bushes:
            self._seconds(bush)  # The first forward of a size also sets up what others reuse.
            turns[bush] = [self._seconds(bush)]
            if bush == (self.batch_size, 0):
                limit = up_to * turns[bush][0]
            if turns[bush][0] > limit:
                break
        for _ in range(MOST_ROUNDS - 1):
            for bush, spent in turns.items():
                spent.append(self._seconds(bush))
            if all(map(_has_come_again, turns.values())):
                break
        monotone = np.maximum.accumulate([min(spent) for spent in turns.values()])
        return Curve(tuple(bush.rows for bush in turns), tuple(monotone.tolist()))

    def _seconds(self, bush: Bush) -> float:
        tree = TreeRows(
            np.zeros(bush.nodes + 1, dtype=np.int64),
            np.array([NO_PARENT, *[0] * bush.nodes]),
            np.array([0, *[1] * bush.nodes]),
        )
        branches = [tree.branches(key) for key in range(bush.requests)]
        start = self._clock()
        self._run(branches)
        return self._clock() - start


def _has_come_again(spent: Sequence[float]) -> bool:
    """Whether the fastest of two or more turns is no accident."""
    fastest, second = sorted(spent)[:2]
    return second <= SAME * fastest


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
