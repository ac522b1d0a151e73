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
class Extent:
    """Evenly spaced windows of one size, as numbers."""

    first: int
    """First slot of the first window."""
    last: int
    """First slot of the last window."""
    spacing: int
    """Slots from one window's first to the next one's; 0 for a single window."""
    num_rows: int
    """Rows that every window has room for, n."""
    size: int
    """Slots of every window, W."""

    @classmethod
    def of(cls, window: Window) -> Extent:
        """A single window."""
        return cls(window.first, window.first, 0, window.num_rows, window.size)

    @property
    def num_windows(self) -> int:
        """Windows, B."""
        return 1 + (self.last - self.first) // max(self.spacing, 1)

    @property
    def cost(self) -> int:
        """Time of their product, in rows scored against a slot."""
        return _PER_PRODUCT + self.num_windows * self.size * (self.num_rows + _PER_SLOT)

    def with_next(self, window: Window) -> Extent:
        """Reach to a window further on."""
        return Extent(
            self.first,
            window.first,
            math.gcd(self.spacing, window.first - self.last),
            max(self.num_rows, window.num_rows),
            max(self.size, window.size),
        )


@dataclass(frozen=True, slots=True)
class View:
    """Windows that share a product; some of its extent may be nobody's."""

    windows: tuple[Window, ...]
    """In the order of their rows and of the pool."""
    extent: Extent

    @property
    def places(self) -> list[int]:
        """Which window of the extent is whose."""
        first, spacing = self.extent.first, max(self.extent.spacing, 1)
        return [(window.first - first) // spacing for window in self.windows]


def grouped(windows: Sequence[Window], num_slots: int) -> Iterator[View]:
    """Cut requests into runs that share a view where one product is cheaper than two.

    Args:
        windows: of all requests, in the order of their rows; at least one.
        num_slots: of the pool, which no view may leave.
    """
    group, extent = [windows[0]], Extent.of(windows[0])
    for window in windows[1:]:
        wider = extent.with_next(window)
        if _can_share(group[-1], window, wider, num_slots) and (
            wider.cost <= extent.cost + Extent.of(window).cost
        ):
            group.append(window)
            extent = wider
        else:
            yield View(tuple(group), extent)
            group, extent = [window], Extent.of(window)
    yield View(tuple(group), extent)


def _can_share(last: Window, window: Window, wider: Extent, num_slots: int) -> bool:
    """Whether a view can hold a window behind its last one."""
    is_gathered = last.gathered is not None or window.gathered is not None
    return not is_gathered and window.first > last.first and wider.last + wider.size <= num_slots
