"""Seconds of a forward by how many rows it has."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True, slots=True)
class Curve:
    """Seconds of a forward by its rows."""

    rows: tuple[int, ...]
    """Ascending, at least one."""
    seconds: tuple[float, ...]
    """Monotone: more rows are never cheaper."""

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
