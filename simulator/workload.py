"""Which request comes next, and when: closed loops and Poisson arrivals.

Whole requests are drawn, never positions: every cycle serves each request once, in random order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np


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
