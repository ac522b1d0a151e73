"""Which token slots of a pool each request owns, and which of them hold its sequence.

A request is given every slot it can ever need when it is admitted, so a running batch never runs
out; only a request whose tree has no known end is given more later (:meth:`SlotTable.grow`). Its
slots are one permutation, cut in two by the length of its sequence::

    slots   [ s0 s1 s2 ... | t0 t1 t2 t3 ... ]
              sequence       spare: tree rows of the step in flight

Tree rows are written to the first spare slots. To commit a path is to move its slots in front of
the other spare ones and to lengthen the sequence: two small copies of indices, no key and no value
moves, and nothing is freed or allocated between admission and release.

Where it can be, a request's slots are neighbours, so that its keys and values can be read in place,
and those of several requests as one evenly spaced view.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from echo_policies.errors import InputError

IntArray = npt.NDArray[np.int64]


class SlotTable:
    """Ownership of ``num_slots`` token slots by requests, under keys of the caller's choice.

    - :meth:`reserve` at admission, :meth:`release` on every way out; nothing else changes owners,
      and :meth:`grow` adds slots that had none.
    - Between them :meth:`spare`, a forward that writes there, and :meth:`commit` or nothing.
    """

    def __init__(self, num_slots: int, block: int | None = None) -> None:
        """Make a table whose slots are all free.

        Args:
            num_slots: slots in all.
            block: slots of the largest request; a request's first slot is a multiple of it where
                possible, that of its key first. By default all slots are one block.
        """
        self._block = min(block or num_slots, num_slots)
        self._is_free = np.ones(num_slots, dtype=bool)
        self._slots: dict[int, IntArray] = {}
        self._length: dict[int, int] = {}

    @property
    def num_slots(self) -> int:
        """Slots in all."""
        return len(self._is_free)

    @property
    def num_free(self) -> int:
        """Slots without an owner."""
        return int(self._is_free.sum())

    def reserve(self, key: int, capacity: int) -> bool:
        """Give a request its slots; False, and nothing happens, while too few are free."""
        assert key not in self._slots, f"request {key} has its slots already"
        if capacity > self.num_free:
            return False
        self._slots[key] = self._neighbours(key, capacity)
        self._is_free[self._slots[key]] = False
        self._length[key] = 0
        return True

    def grow(self, key: int, num_slots: int) -> None:
        """Make the table longer by ``num_slots`` slots, all of them spare slots of one request."""
        added = self.num_slots + np.arange(num_slots)
        self._is_free = np.concatenate([self._is_free, np.zeros(num_slots, dtype=bool)])
        self._slots[key] = np.concatenate([self._slots[key], added])

    def release(self, key: int) -> None:
        """Take back a request's slots."""
        self._is_free[self._slots.pop(key)] = True
        del self._length[key]

    def capacity(self, key: int) -> int:
        """Slots of a request, spare ones included."""
        return len(self._slots[key])

    def length(self, key: int) -> int:
        """Tokens of a request's sequence."""
        return self._length[key]

    def seen(self, key: int, extra: int = 0) -> IntArray:
        """Slots of the sequence in order, and of the ``extra`` spare slots behind it."""
        return self._slots[key][: self._length[key] + extra]

    def spare(self, key: int, count: int) -> IntArray:
        """The first ``count`` spare slots, to be written by rows that may be committed.

        Raises:
            InputError: the request reserved fewer.
        """
        start = self._length[key]
        slots = self._slots[key][start : start + count]
        if len(slots) < count:
            raise InputError(
                f"A step must fit in the slots reserved for its request; {count} rows behind "
                f"{start} tokens exceed {len(self._slots[key])} slots."
            )
        return slots

    def commit(self, key: int, rows: Sequence[int] | IntArray) -> None:
        """Make the spare slots number ``rows`` (ascending) the continuation of the sequence."""
        slots, start = self._slots[key], self._length[key]
        chosen = np.asarray(rows, dtype=np.int64)
        tail = slots[start:]
        others = np.ones(len(tail), dtype=bool)
        others[chosen] = False
        slots[start:] = np.concatenate([tail[chosen], tail[others]])
        self._length[key] = start + len(chosen)

    def check_integrity(self, keys: Sequence[int]) -> None:
        """Check that every slot is free or has exactly one owner, and that these are ``keys``.

        For tests and debugging.
        """
        assert sorted(self._slots) == sorted(keys), "a request left without giving back its slots"
        everything = np.concatenate([np.flatnonzero(self._is_free), *self._slots.values()])
        assert everything.size == self.num_slots, "a slot leaked or was made up"
        assert np.array_equal(np.sort(everything), np.arange(self.num_slots)), "two owners"
        assert all(self._length[key] <= len(s) for key, s in self._slots.items())

    def _neighbours(self, key: int, capacity: int) -> IntArray:
        """Free slots: the beginning of a block, the block of its key first, or any."""
        num_blocks = self.num_slots // self._block
        for block in (key % num_blocks, *range(num_blocks)):
            start = block * self._block
            slots = slice(start, start + capacity)
            if slots.stop <= self.num_slots and self._is_free[slots].all():
                return np.arange(slots.start, slots.stop)
        return np.flatnonzero(self._is_free)[:capacity]
