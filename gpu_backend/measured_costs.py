"""What steps cost on the machine at hand, as policies may know it: forwards timed by rows.

Curves are numbers, made once before a run. So every step of the run, and its replay, sees the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Final

from gpu_backend.bush_timer import NODES_PER_REQUEST, Bush, head_timer, model_timer
from gpu_backend.curve import Curve
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.serve_results import CostTables, KneeTable
from gpu_backend.stopwatch import Clock

if TYPE_CHECKING:
    from gpu_backend.serving import ModelPair

TIMED_UP_TO: Final = 4.0
"""Times the seconds of all roots alone, beyond which no larger forward is timed: there a machine is
bound by arithmetic, and time goes on in a line."""

CATCH_UP: Final = (7, 31)
"""Nodes of one request for which a draft model is timed too: so it reads up on what it missed."""


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
    attention: AttentionName = "torch",
    up_to: float = TIMED_UP_TO,
) -> MeasuredCosts:
    """Time forwards of target and draft model, from one request's row to whole trees.

    Args:
        pair: the models.
        batch_size: requests, B.
        context: committed tokens of every request.
        most_nodes: nodes per request that a policy verifies.
        most_width: nodes per request that a policy expands in one layer.
        clock: seconds, read when the device is done.
        attention: what reads the sequences.
        up_to: times all roots' seconds, beyond which no larger forward is timed.
    """
    timer = partial(
        model_timer,
        batch_size=batch_size,
        context=context,
        vocab_size=pair.vocab_size,
        clock=clock,
        attention=attention,
    )
    verify = timer(pair.target).curve(_bushes(batch_size, most_nodes), up_to)
    if pair.head is not None:
        draft = head_timer(pair.head, batch_size, context, clock=clock, attention=attention)
    elif pair.draft is not None:
        draft = timer(pair.draft)
    else:
        return MeasuredCosts(verify, None)
    behind = [Bush(1, nodes) for nodes in CATCH_UP]
    by_rows = {bush.rows: bush for bush in [*behind, *_bushes(batch_size, most_width - 1)]}
    return MeasuredCosts(verify, draft.curve([by_rows[rows] for rows in sorted(by_rows)], up_to))


def _bushes(batch_size: int, most_nodes: int) -> list[Bush]:
    """Single rows of ever more requests, then ever larger trees."""
    fewer = [1 << power for power in range(batch_size.bit_length())]
    smaller = [nodes for nodes in NODES_PER_REQUEST if nodes < most_nodes]
    whole = [next((n for n in NODES_PER_REQUEST if n >= most_nodes), NODES_PER_REQUEST[-1])]
    alone = [Bush(requests, 0) for requests in fewer if requests < batch_size]
    return alone + [Bush(batch_size, nodes) for nodes in sorted({*smaller, *whole})]
