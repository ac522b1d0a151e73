"""Windows of a KV pool, and which requests can share one view of it.

Shape letters: n rows of one request, W slots of a window.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gpu_backend.sight import Sight

IntArray = npt.NDArray[np.int64]

_SPARSE: Final = 2
"""Slots of a window per slot seen, beyond which the seen ones are gathered instead."""

_PADDED: Final = 1.25
"""Slots that a group of requests may read per slot of their own windows."""


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


def grouped(windows: Sequence[Window], num_slots: int) -> Iterator[list[Window]]:
    """Cut requests into runs that one evenly spaced view can hold, with little padding.

    Args:
        windows: of all requests, in the order of their rows.
        num_slots: of the pool, which no view may leave.
    """
    group: list[Window] = []
    for window in windows:
        if group and not _fits(group, window, num_slots):
            yield group
            group = []
        group.append(window)
    if group:
        yield group


def _fits(group: list[Window], window: Window, num_slots: int) -> bool:
    head, last = group[0], group[-1]
    if head.gathered is not None or window.gathered is not None:
        return False
    if window.num_rows != head.num_rows or window.first <= last.first:
        return False
    if len(group) > 1 and window.first - last.first != group[1].first - head.first:
        return False
    sizes = [other.size for other in (*group, window)]
    is_inside = window.first + max(sizes) <= num_slots
    return is_inside and len(sizes) * max(sizes) <= _PADDED * sum(sizes)
