"""Seconds of a draft model's forward by its rows, from measured ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from simulator.cost.step_rows import StepRow


@dataclass(frozen=True, slots=True)
class DraftTimes:
    """Times by rows, over whatever requests and contexts they were measured at.

    Linear between measured sizes, constant below them, and on at the last slope beyond: a draft
    that reads what it is behind may have any number of rows.
    """

    rows: tuple[int, ...]
    seconds: tuple[float, ...]
    """Made monotone."""

    def at(self, rows: int) -> float:
        """Return the seconds of a forward; 0 for no rows."""
        if rows <= 0:
            return 0.0
        last = self.rows[-1]
        if rows > last and len(self.rows) > 1:
            slope = (self.seconds[-1] - self.seconds[-2]) / (last - self.rows[-2])
            return self.seconds[-1] + slope * (rows - last)
        return float(np.interp(rows, self.rows, self.seconds))


def draft_times(rows: Sequence[StepRow]) -> DraftTimes:
    """Take the median of the measured rows at every number of rows; at least one is needed."""
    found: dict[int, list[float]] = {}
    for row in rows:
        found.setdefault(round(row.batch * row.tokens), []).append(row.step_s)
    sizes = sorted(found)
    seconds = np.maximum.accumulate([median(found[size]) for size in sizes])
    return DraftTimes(tuple(sizes), tuple(seconds.tolist()))
