"""How far the content of two recordings differs at the positions that they have in common.

A recording holds no token of a draft, only ranks: so nodes are the same where the ranks on their
paths are. Shape letters: M common positions, D levels, W slots, k children, C chain levels.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from traces.alignment import Alignment
from traces.resample import chain_levels
from traces.schema import NO_SLOT, Trace, TraceArrays

Array = npt.NDArray[Any]
Bool = npt.NDArray[np.bool_]
Int = npt.NDArray[np.int64]

CHUNK: Final = 2048
"""Positions that are compared together."""

SLOT_AXIS: Final = 2
PROPOSALS: Final = ("root_logp", "slot_child", "child_logp", "chain_logp")
"""What the draft proposed, entropies aside."""

NOTHING: Final = (np.zeros(0), np.zeros(0))

NO_MATCH: Final = -2
"""A candidate number that no slot holds, not even an empty one."""


@dataclass(frozen=True, slots=True)
class Count:
    """How many of some things differ."""

    differ: int
    of: int

    @property
    def share(self) -> float:
        """Share that differs; NaN where there is nothing."""
        return self.differ / self.of if self.of else math.nan

    def __add__(self, other: Count) -> Count:
        """Count two sets together."""
        return Count(self.differ + other.differ, self.of + other.of)


@dataclass(frozen=True, slots=True)
class LogpDifference:
    """How far log-probabilities (or entropies) of the same nodes are apart, in nats."""

    values: int
    """Values that are finite in both."""
    differ: int
    largest: float
    """Largest absolute difference; 0 without a value."""
    mean: float
    """Mean absolute difference over all values, equal ones included; 0 without a value."""
    in_one_only: int
    """Values that only one recording has."""

    def __add__(self, other: LogpDifference) -> LogpDifference:
        """Join the differences of two sets of values."""
        values = self.values + other.values
        total = self.mean * self.values + other.mean * other.values
        return LogpDifference(
            values,
            self.differ + other.differ,
            max(self.largest, other.largest),
            total / values if values else 0.0,
            self.in_one_only + other.in_one_only,
        )


@dataclass(frozen=True, slots=True)
class ContentDifference:
    """What differs at the common positions; entry d - 1 of a tuple belongs to depth d."""

    proposals: Count
    """Positions at which anything differs of what the draft proposed."""
    slots: tuple[Count, ...]
    """Slots that are filled in one recording at least and name another candidate in the other."""
    nodes: tuple[Count, ...]
    """Expanded nodes of both recordings that the other did not expand, in whichever slot."""
    path_ranks: tuple[Count, ...]
    """Ranks of the target's token, where its tokens up to that level are common."""
    chain_agreement: Count
    """Positions at which the greedy chain agrees with the common text for another number of
    levels: there the chains themselves surely differ."""
    chain_values: Count
    """Positions at which some log-probability of the greedy chain differs."""
    root_logp: LogpDifference
    child_logp: LogpDifference
    """Of the children of nodes that both expanded."""
    chain_logp: LogpDifference
    path_logp: LogpDifference
    """Where the target's tokens up to that level are common."""
    root_entropy: LogpDifference
    """Without a value where a recording has no entropies."""
    slot_entropy: LogpDifference
    """Of the nodes that both expanded."""

    def __add__(self, other: ContentDifference) -> ContentDifference:
        """Join the differences of two sets of positions."""
        return ContentDifference(
            self.proposals + other.proposals,
            _added(self.slots, other.slots),
            _added(self.nodes, other.nodes),
            _added(self.path_ranks, other.path_ranks),
            self.chain_agreement + other.chain_agreement,
            self.chain_values + other.chain_values,
            self.root_logp + other.root_logp,
            self.child_logp + other.child_logp,
            self.chain_logp + other.chain_logp,
            self.path_logp + other.path_logp,
            self.root_entropy + other.root_entropy,
            self.slot_entropy + other.slot_entropy,
        )


def content_difference(one: Trace, other: Trace, alignment: Alignment) -> ContentDifference | None:
    """Compare the arrays at the common positions; None where there is none."""
    total = None
    for rows in _chunks(alignment.num_positions):
        part = _difference(
            one.arrays,
            other.arrays,
            (alignment.row_one_M[rows], alignment.row_other_M[rows]),
            alignment.reach_M[rows],
        )
        total = part if total is None else total + part
    return total


def match_slots(one_MDW: Array, other_MDW: Array, top_k: int) -> Int:
    """The other recording's slot that holds the same node, [M, D - 1, W]; -1 where none does.

    Args:
        one_MDW: ``slot_child`` of one recording.
        other_MDW: ``slot_child`` of the other at the same positions.
        top_k: children per node.
    """
    match = np.full(one_MDW.shape, -1, np.int64)
    for d in range(one_MDW.shape[1]):
        candidate = one_MDW[:, d].astype(np.int64)
        wanted = candidate
        if d:  # the number of a deeper candidate counts slots, which may lie otherwise in the other
            parent = np.take_along_axis(match[:, d - 1], np.maximum(candidate, 0) // top_k, axis=1)
            wanted = np.where(parent >= 0, parent * top_k + candidate % top_k, NO_MATCH)
        wanted = np.where(candidate == NO_SLOT, NO_MATCH, wanted)
        held = other_MDW[:, d, None, :] == wanted[..., None]
        match[:, d] = np.where(held.any(axis=2), held.argmax(axis=2), -1)
    return match


def _difference(
    one: TraceArrays, other: TraceArrays, rows: tuple[Int, Int], reach_M: Int
) -> ContentDifference:
    def both(name: str) -> tuple[Array, Array]:
        return getattr(one, name)[rows[0]], getattr(other, name)[rows[1]]

    draft = {name: both(name) for name in PROPOSALS}
    differs = {name: _rows_differ(*pair) for name, pair in draft.items()}
    slots, children, ranks = draft["slot_child"], draft["child_logp"], both("path_rank")
    match = match_slots(*slots, children[0].shape[-1])
    met = [np.minimum(chain_levels(side, side.shape[1]), reach_M) for side in ranks]
    common_MC = np.arange(1, ranks[0].shape[1] + 1) <= reach_M[:, None]
    entropies = [
        both(name) if getattr(one, name) is not None and getattr(other, name) is not None else None
        for name in ("root_entropy", "slot_entropy")
    ]
    return ContentDifference(
        proposals=_count(np.logical_or.reduce(list(differs.values()))),
        slots=_by_depth(slots[0] != slots[1], (slots[0] != NO_SLOT) | (slots[1] != NO_SLOT)),
        nodes=_nodes(slots, match),
        path_ranks=_by_depth((ranks[0] != ranks[1])[..., None], common_MC[..., None]),
        chain_agreement=_count(met[0] != met[1]),
        chain_values=_count(differs["chain_logp"]),
        root_logp=_gap(*draft["root_logp"]),
        child_logp=_gap(*_matched(children, match), (match >= 0)[..., None]),
        chain_logp=_gap(*draft["chain_logp"]),
        path_logp=_gap(*both("path_logp"), common_MC),
        root_entropy=_gap(*(entropies[0] or NOTHING)),
        slot_entropy=(
            _gap(*_matched(entropies[1], match), match >= 0) if entropies[1] else _gap(*NOTHING)
        ),
    )


def _matched(pair: tuple[Array, Array], match: Int) -> tuple[Array, Array]:
    """Values of one recording's slots and of the slots that hold the same nodes in the other."""
    place = np.maximum(match, 0).reshape(*match.shape, *(1,) * (pair[1].ndim - match.ndim))
    return pair[0], np.take_along_axis(pair[1], place, axis=SLOT_AXIS)


def _nodes(slots: tuple[Array, Array], match: Int) -> tuple[Count, ...]:
    filled = [(one != NO_SLOT).sum(axis=(0, 2)) for one in slots]
    total, shared = filled[0] + filled[1], (match >= 0).sum(axis=(0, 2))
    return tuple(Count(int(n - 2 * m), int(n)) for n, m in zip(total, shared, strict=True))


def _gap(one: Array, other: Array, where: Bool | None = None) -> LogpDifference:
    finite = np.isfinite(one), np.isfinite(other)
    both, either = finite[0] & finite[1], finite[0] ^ finite[1]
    if where is not None:
        both, either = both & where, either & where
    gap = np.abs(one[both].astype(np.float64) - other[both].astype(np.float64))
    return LogpDifference(
        values=gap.size,
        differ=int(np.count_nonzero(gap)),
        largest=float(gap.max(initial=0.0)),
        mean=float(gap.mean()) if gap.size else 0.0,
        in_one_only=int(np.count_nonzero(either)),
    )


def _rows_differ(one: Array, other: Array) -> Bool:
    differs: Bool = (one != other).reshape(len(one), -1).any(axis=1)
    return differs


def _count(differs_M: Bool) -> Count:
    return Count(int(differs_M.sum()), differs_M.size)


def _by_depth(differs_MDX: Bool, counts_MDX: Bool) -> tuple[Count, ...]:
    differ, of = ((x & counts_MDX).sum(axis=(0, 2)) for x in (differs_MDX, counts_MDX))
    return tuple(Count(int(a), int(b)) for a, b in zip(differ, of, strict=True))


def _added(one: Sequence[Count], other: Sequence[Count]) -> tuple[Count, ...]:
    return tuple(a + b for a, b in zip(one, other, strict=True))


def _chunks(size: int) -> Iterator[slice]:
    return (slice(start, start + CHUNK) for start in range(0, size, CHUNK))
