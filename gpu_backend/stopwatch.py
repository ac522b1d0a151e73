"""Real seconds by part of a step, read where the device has finished what was asked of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

Clock = Callable[[], float]
"""Seconds from some fixed moment on."""


def device_clock(device: torch.device) -> Clock:
    """A clock that waits for the device, because a GPU is asked for work and not waited for."""
    if device.type != "cuda":
        return time.perf_counter

    def after_all_work() -> float:
        torch.cuda.synchronize(device)
        return time.perf_counter()

    return after_all_work


class Stopwatch:
    """Seconds since it was made, and seconds added up under names; the innermost part counts."""

    def __init__(self, clock: Clock) -> None:
        """Start at zero with nothing measured."""
        self._clock = clock
        self._zero_s = clock()
        self._seconds: dict[str, float] = {}
        self._inner_s = 0.0
        """Of the parts that ended within the part that runs."""

    def now(self) -> float:
        """Seconds since the stopwatch was made."""
        return self._clock() - self._zero_s

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Add the time the block takes to a part, less that of parts within it."""
        start, outer_inner_s, self._inner_s = self._clock(), self._inner_s, 0.0
        try:
            yield
        finally:
            spent_s = self._clock() - start
            self._seconds[name] = self._seconds.get(name, 0.0) + spent_s - self._inner_s
            self._inner_s = outer_inner_s + spent_s

    def take(self, name: str) -> float:
        """Return a part's seconds and set them to zero."""
        return self._seconds.pop(name, 0.0)
