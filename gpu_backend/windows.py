"""Windows of a KV pool, and which requests can share one view of it.

Shape letters: n rows of one request, W slots of a window, B windows of a view.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gpu_backend.sight import Sight

IntArray = npt.NDArray[np.int64]

_SPARSE: Final = 2
"""Slots of a window per slot seen, beyond which the seen ones are gathered instead."""

_PER_SLOT: Final = 2
"""Rows that cost as much to score against a slot as the slot costs to be read."""

_PER_PRODUCT: Final = 1200
"""What a product costs whatever its size, in rows scored against a slot (measured)."""


@dataclass(frozen=True, slots=True)
class Window:
    """The slots around everything that one request's rows see."""

    sight: Sight
    first: int
    size: int
    """Slots, W."""
    gathered: IntArray | None
    """The seen slots, ascending, where they lie too far apart to be read in place."""

    @classmethod
    def of(cls, sight: Sight) -> Window:
        """Find a request's window."""
        first = int(sight.slots.min())
        size = int(sight.slots.max()) + 1 - first
        if size > _SPARSE * len(sight.slots):
            return cls(sight, 0, len(sight.slots), np.sort(sight.slots))
        return cls(sight, first, size, None)

    @property
    def num_rows(self) -> int:
        """Rows of the request, n."""
        return self.sight.num_rows

    def shows_everything(self, size: int) -> bool:
        """Whether every row sees all of the first ``size`` slots."""
        sight = self.sight
        return sight.is_causal and sight.num_rows == 1 and len(sight.slots) == size

    def sees(self, size: int) -> npt.NDArray[np.bool_]:
        """Which row sees which of the first ``size`` slots: bool [n, size]."""
        sight = self.sight
        sees_nW = np.zeros((sight.num_rows, size), dtype=bool)
        sees_nW[:, self._columns(sight.slots[: sight.num_committed])] = sight.sees_sequence
        if sight.branch_nA is None:
            own = self._columns(sight.slots[sight.num_committed :])
            sees_nW[:, own] = np.tri(sight.num_rows, len(own), len(own) - sight.num_rows)
        else:
            rows, places = np.nonzero(sight.branch_nA >= 0)
            sees_nW[rows, self._columns(sight.branch_nA[rows, places])] = True
        return sees_nW

    def _columns(self, slots: IntArray) -> IntArray:
        if self.gathered is None:
            return slots - self.first
        return np.searchsorted(self.gathered, slots)


@dataclass(frozen=True, slots=True)
class View:
    """Evenly spaced windows of one size; some may be nobody's."""

    windows: tuple[Window, ...]
    """Those that are somebody's, in the order of their rows and of the pool."""
    spacing: int
    """Slots from one window's first to the next one's; 0 for a single window."""

    @property
    def num_rows(self) -> int:
        """Rows that every window has room for, n."""
        return max(window.num_rows for window in self.windows)

    @property
    def size(self) -> int:
        """Slots of every window, W."""
        return max(window.size for window in self.windows)

    @property
    def first(self) -> int:
        """First slot of the first window."""
        return self.windows[0].first

    @property
    def places(self) -> list[int]:
        """Which window of the view is whose."""
        spacing = max(self.spacing, 1)
        return [(window.first - self.first) // spacing for window in self.windows]

    @property
    def num_windows(self) -> int:
        """Windows, nobody's included, B."""
        return self.places[-1] + 1

    @property
    def cost(self) -> int:
        """Time of its product, in rows scored against a slot."""
        return _PER_PRODUCT + self.num_windows * self.size * (self.num_rows + _PER_SLOT)

    def with_next(self, window: Window, num_slots: int) -> View | None:
        """Take in one more window; None where one view cannot hold it."""
        head, last = self.windows[0], self.windows[-1]
        if head.gathered is not None or window.gathered is not None:
            return None
        if window.first <= last.first:
            return None
        spacing = math.gcd(self.spacing, window.first - last.first)
        wider = View((*self.windows, window), spacing)
        return wider if window.first + wider.size <= num_slots else None


def grouped(windows: Sequence[Window], num_slots: int) -> Iterator[View]:
    """Cut requests into runs that share a view where one product is cheaper than two.

    Args:
        windows: of all requests, in the order of their rows.
        num_slots: of the pool, which no view may leave.
    """
    view: View | None = None
    for window in windows:
        alone = View((window,), 0)
        wider = None if view is None else view.with_next(window, num_slots)
        if view is not None and (wider is None or wider.cost > view.cost + alone.cost):
            yield view
            wider = None
        view = wider or alone
    if view is not None:
        yield view
