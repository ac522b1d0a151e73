"""What steps cost on the machine at hand, as policies may know it: forwards timed by rows.

Curves are numbers, made once before a run. So every step of the run, and its replay, sees the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

import numpy as np

from gpu_backend.knee import NODES_PER_REQUEST, BushTimer, Knee, head_timer, model_timer
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.serve_results import CostTables, KneeTable
from gpu_backend.stopwatch import Clock

if TYPE_CHECKING:
    from gpu_backend.serving import ModelPair

TIMED_UP_TO: Final = 4.0
"""Times the smallest batch's seconds, beyond which no larger forward is timed: there a machine is
bound by arithmetic, and time goes on in a line."""


CATCH_UP: Final = (7, 31)
"""Nodes of one request for which a draft model is timed too: so it reads up on what it missed."""


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a forward by its rows."""

    rows: tuple[int, ...]
    """Ascending, at least one."""
    seconds: tuple[float, ...]
    """Made monotone: more rows are never cheaper."""

    def at(self, rows: int) -> float:
        """Seconds over so many rows; 0 for none.

        Linear between timed sizes, the smallest size's below them, the last slope beyond.
        """
        if rows <= 0:
            return 0.0
        last = self.rows[-1]
        if rows > last and len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (last - self.rows[-2])
            return self.seconds[-1] + slope * (rows - last)
        return float(np.interp(rows, self.rows, self.seconds))


@dataclass(frozen=True, slots=True)
class MeasuredCosts:
    """A CostView of timed forwards at the run's mean context."""

    verify: Curve
    draft: Curve | None
    """Of the draft model; None where it has none, as prompt lookup does."""

    def verify_s(self, rows: int) -> float:
        """Seconds of a verify forward."""
        return self.verify.at(rows)

    def draft_layer_s(self, rows: int) -> float:
        """Seconds of a draft layer, its head included."""
        return 0.0 if self.draft is None else self.draft.at(rows)

    def tables(self) -> CostTables:
        """As a run's results hold them."""
        draft = self.draft and KneeTable(rows=self.draft.rows, seconds=self.draft.seconds)
        verify = KneeTable(rows=self.verify.rows, seconds=self.verify.seconds)
        return CostTables(verify=verify, draft=draft)


def measure_costs(
    pair: ModelPair,
    *,
    batch_size: int,
    context: int,
    most_nodes: int,
    most_width: int,
    clock: Clock,
    knee: Knee | None = None,
    attention: AttentionName = "torch",
) -> MeasuredCosts:
    """Time forwards of target and draft model, from one request's row to whole trees.

    Args:
        pair: the models.
        batch_size: requests, B.
        context: committed tokens of every request.
        most_nodes: nodes per request that a policy verifies.
        most_width: nodes per request that a policy expands in one layer.
        clock: seconds, read when the device is done.
        knee: of the same batch and context; what it has timed is not timed again.
        attention: what reads the sequences.
    """
    known = {} if knee is None else dict(zip(knee.rows, knee.seconds, strict=True))
    tokens = partial(
        model_timer,
        batch_size=batch_size,
        context=context,
        vocab_size=pair.vocab_size,
        clock=clock,
        attention=attention,
    )
    target = tokens(pair.target)
    verify = _curve(target, _sizes(batch_size, most_nodes), known)
    if pair.head is not None:
        draft = head_timer(pair.head, batch_size, context, clock=clock, attention=attention)
    elif pair.draft is not None:
        draft = tokens(pair.draft)
    else:
        return MeasuredCosts(verify, None)
    layers = _sizes(batch_size, most_width - 1)
    sizes = {_num_rows(size): size for size in [*((1, nodes) for nodes in CATCH_UP), *layers]}
    return MeasuredCosts(verify, _curve(draft, [sizes[rows] for rows in sorted(sizes)], {}))


def _sizes(batch_size: int, most_nodes: int) -> list[tuple[int, int]]:
    """Requests and nodes of each: single rows of ever more requests, then ever larger trees."""
    fewer = [(1 << power, 0) for power in range(batch_size.bit_length())]
    smaller = [nodes for nodes in NODES_PER_REQUEST if nodes < most_nodes]
    whole = [next((n for n in NODES_PER_REQUEST if n >= most_nodes), NODES_PER_REQUEST[-1])]
    trees = [(batch_size, nodes) for nodes in sorted({*smaller, *whole})]
    return [size for size in fewer if size[0] < batch_size] + trees


def _num_rows(size: tuple[int, int]) -> int:
    return size[0] * (size[1] + 1)


def _curve(timer: BushTimer, sizes: Sequence[tuple[int, int]], known: dict[int, float]) -> Curve:
    rows: list[int] = []
    seconds: list[float] = []
    whole_s = np.inf
    for requests, nodes in sizes:
        rows.append(_num_rows((requests, nodes)))
        spent = known.get(rows[-1]) or timer.seconds(requests, nodes)
        seconds.append(spent)
        if (requests, nodes) == (timer.batch_size, 0):
            whole_s = spent
        if spent > TIMED_UP_TO * whole_s:
            break
    return Curve(tuple(rows), tuple(np.maximum.accumulate(seconds).tolist()))
