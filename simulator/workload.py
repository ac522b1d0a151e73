"""Which request comes next, and when: closed loops and Poisson arrivals.

Whole requests are drawn, never positions: every cycle serves each request once, in random order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from enum import IntEnum

import numpy as np


class Stream(IntEnum):
    """One random stream per concern, so that changing one leaves the others alone."""

    ORDER = 0
    START = 1
    ARRIVE = 2
    RESAMPLE = 3
    COSTS = 4

    def rng(self, seed: int) -> np.random.Generator:
        """Return the generator of this concern for a run's seed."""
        return np.random.default_rng([seed, int(self)])


def request_cycle(requests: Sequence[int], rng: np.random.Generator) -> Iterator[int]:
    """Yield recorded requests for ever, a fresh permutation per cycle.

    The order depends on the generator alone, so policies that share a seed serve the same
    requests in the same order.
    """
    while True:
        yield from (int(request) for request in rng.permutation(np.asarray(requests)))


def poisson_gaps(rate: float, rng: np.random.Generator) -> Iterator[float]:
    """Yield seconds between arrivals of a Poisson process of ``rate`` per second."""
    while True:
        yield float(rng.exponential(1 / rate))
