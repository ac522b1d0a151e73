"""How many rows a verify forward can have before it gets dear, by timed forwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import numpy as np

from gpu_backend.bush_timer import NODES_PER_REQUEST, Bush, BushTimer
from gpu_backend.curve import Curve


@dataclass(frozen=True, slots=True)
class Knee:
    """Seconds of a verify forward by rows, and the budget that follows."""

    rows: tuple[int, ...]
    """All roots first."""
    seconds: tuple[float, ...]
    """Monotone: more rows are never cheaper."""
    factor: float

    @classmethod
    def of(cls, verify: Curve, batch_size: int, factor: float) -> Self:
        """Knee of a curve, from all roots to the first size beyond it.

        Args:
            verify: timed for ``batch_size`` rows, and more.
            batch_size: requests, B.
            factor: of the knee rule.
        """
        first = verify.rows.index(batch_size)
        rows, seconds = verify.rows[first:], verify.seconds[first:]
        end = 1 + sum(spent <= factor * seconds[0] for spent in seconds)
        return cls(rows[:end], seconds[:end], factor)

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


def measure_knee(timer: BushTimer, factor: float) -> Knee:
    """Time verify forwards of growing trees.

    Args:
        timer: of the target at the batch size.
        factor: of the knee rule.
    """
    bushes = (Bush(timer.batch_size, nodes) for nodes in NODES_PER_REQUEST)
    return Knee.of(timer.curve(bushes, factor), timer.batch_size, factor)
