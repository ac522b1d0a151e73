"""Random step situations, as hypothesis strategies; the simplest ones are the smallest."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from hypothesis import strategies as st

from echo_policies.testing.drafter import EVEN_GROUND, Ground

UNLIMITED = 1 << 20
"""A budget that never binds."""

MAX_SLOTS = 5
"""Largest batch."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One slot of the batch."""

    seed: int = 0
    live: bool = True
    remaining: int = 16
    arrival: int = 0


@dataclass(frozen=True, slots=True)
class Situation:
    """A batch and a budget, for a run of a few steps."""

    slots: tuple[Slot, ...]
    k_max: int
    step: int = 0
    ground: Ground = EVEN_GROUND
    steps: int = 1

    def permuted(self, order: Sequence[int]) -> Situation:
        """Return the same requests in other slots: slot n holds what slot ``order[n]`` held."""
        return replace(self, slots=tuple(self.slots[n] for n in order))

    def without_ties(self) -> Situation:
        """Return a situation in which no two nodes score alike, but for a hash collision."""
        slots = tuple(replace(slot, seed=slot.seed * 64 + n) for n, slot in enumerate(self.slots))
        return replace(self, slots=slots, ground=EVEN_GROUND)


def _with_own_arrivals(slots: list[Slot]) -> tuple[Slot, ...]:
    """No two requests arrive at the same time."""
    return tuple(
        replace(slot, arrival=slot.arrival * MAX_SLOTS + n) for n, slot in enumerate(slots)
    )


# Built once: hypothesis checks a strategy anew whenever one is made.
_SLOTS = st.builds(
    Slot,
    seed=st.integers(0, 999),
    live=st.sampled_from([True, True, True, False]),
    remaining=st.sampled_from([16, 40, 1, 2, 3, 5]),
    arrival=st.integers(0, 3),
)
_SITUATIONS = st.builds(
    Situation,
    slots=st.lists(_SLOTS, min_size=1, max_size=MAX_SLOTS).map(_with_own_arrivals),
    k_max=st.one_of(st.integers(0, 6), st.integers(7, 60), st.just(UNLIMITED)),
    step=st.integers(0, 5),
    ground=st.builds(Ground, st.sampled_from([0.0, 0.5, 1.0]), st.booleans()),
    steps=st.integers(1, 2),
)


def situations() -> st.SearchStrategy[Situation]:
    """Strategy of step situations: ties, absent candidates, idle slots, every kind of budget."""
    return _SITUATIONS
