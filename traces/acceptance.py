"""Where the target's tokens stand among the draft's proposals, level by level.

All of it is over positions, not along any policy's walk. Levels beyond the end of an output count
neither as accepted nor as rejected. Shape letters: P positions, C levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from traces.schema import OUTSIDE_VOCAB, PAST_END

Ranks = npt.NDArray[np.int32]

WITHIN: Final = (1, 2, 3, 10, 32)
"""Numbers of first ranks k for which `within_first` is reported; 1 is the greedy chain."""

RANK_BINS: Final[dict[str, tuple[int, float]]] = {
    "1": (0, 1),
    "2": (1, 2),
    "3": (2, 3),
    "4-10": (3, 10),
    "11-32": (10, 32),
    ">32": (32, math.inf),
    "outside": (OUTSIDE_VOCAB, OUTSIDE_VOCAB + 1),
}
"""Bins of the target token's rank (first rank, end); their names count ranks from 1.

``outside`` holds tokens that the draft's vocabulary lacks.
"""


@dataclass(frozen=True, slots=True)
class LevelShares:
    """How often the first levels succeed; entry d - 1 belongs to level d, NaN where none counts."""

    cumulative: tuple[float, ...]
    """Share of positions that succeed at levels 1..d, of those whose output reaches level d."""
    conditional: tuple[float, ...]
    """Share that succeeds at level d, of those that reach it and succeeded at levels 1..d - 1."""
    reached: tuple[int, ...]
    """Positions whose output reaches level d."""
    succeeded: tuple[int, ...]
    """Positions that succeed at levels 1..d."""


def within_first(path_rank_PC: Ranks, k: int) -> LevelShares:
    """Success is that the target's token is among the draft's first ``k`` at that level.

    With k = 1 this is the acceptance of the greedy chain; with more it is what a tree with k
    children at every node of the target's path could accept.
    """
    hit_PC = (path_rank_PC >= 0) & (path_rank_PC < k)
    reached_PC = path_rank_PC != PAST_END
    agreed_PC = np.logical_and.accumulate(hit_PC, axis=1)
    before_PC = reached_PC.copy()
    before_PC[:, 1:] &= agreed_PC[:, :-1]
    succeeded, reached = agreed_PC.sum(axis=0), reached_PC.sum(axis=0)
    return LevelShares(
        cumulative=_shares(succeeded, reached),
        conditional=_shares(succeeded, before_PC.sum(axis=0)),
        reached=tuple(reached.tolist()),
        succeeded=tuple(succeeded.tolist()),
    )


def rank_shares(path_rank_P: Ranks) -> dict[str, float]:
    """Share of one level's positions in each of `RANK_BINS`; NaN where none reaches the level.

    The rank is that of the target's token given the target's tokens before it.
    """
    rank_P = path_rank_P[path_rank_P != PAST_END]
    counts = [int(((rank_P >= low) & (rank_P < end)).sum()) for low, end in RANK_BINS.values()]
    shares = _shares(np.array(counts), np.full(len(counts), rank_P.size))
    return dict(zip(RANK_BINS, shares, strict=True))


def _shares(part: npt.NDArray[np.int64], whole: npt.NDArray[np.int64]) -> tuple[float, ...]:
    pairs = zip(part.tolist(), whole.tolist(), strict=True)
    return tuple(a / b if b else math.nan for a, b in pairs)
