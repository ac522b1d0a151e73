"""What a trace is like, in figures that a synthetic one has to resemble: one data set, or all.

Shape letters as in `traces.schema`: P positions, C chain levels.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from traces.acceptance import WITHIN, LevelShares, rank_shares, within_first
from traces.chain_walk import ChainWalk, accepted_by_position, chain_walk
from traces.reliability import LevelReliability, chain_reliability
from traces.schema import Trace
from traces.series import Autocorrelation, autocorrelation

WALKED_LEVELS: Final = (3, 5, 7, 8)
"""Chain lengths K that are walked; those beyond the recording are left out."""


@dataclass(frozen=True, slots=True)
class SplitSize:
    """How much is in one split."""

    requests: int
    positions: int


@dataclass(frozen=True, slots=True)
class Lengths:
    """Token counts of requests."""

    mean: float
    least: int
    quartiles: tuple[float, float, float]
    """Median in the middle."""
    most: int


@dataclass(frozen=True, slots=True)
class Realism:
    """Figures of some requests of a trace."""

    requests: int
    positions: int
    splits: dict[str, SplitSize]
    finish_reasons: dict[str, int]
    prompt_tokens: Lengths
    output_tokens: Lengths
    """Emitted tokens, the first one included and look-ahead left out."""
    within_first: dict[int, LevelShares]
    """Acceptance by level where the target's token may be any of the first k; 1: greedy chain."""
    ranks: tuple[dict[str, float], ...]
    """Shares of the target token's rank, level 1 first."""
    reliability: tuple[LevelReliability, ...]
    """Confidence of the greedy chain against acceptance, level 1 first."""
    walks: tuple[ChainWalk, ...]
    position_autocorrelation: Autocorrelation
    """Of the greedy chain's accepted length at successive positions, not steps. One position
    further on the chain can lose but one token, so this is high for any trace."""


def realism(trace: Trace, requests: Sequence[int]) -> Realism:
    """Measure some requests of a valid trace, at least one of them."""
    arrays, header = trace.arrays, trace.header
    infos = [header.requests[q] for q in requests]
    sizes = np.array([trace.positions(q).stop - trace.positions(q).start for q in requests])
    rows = np.concatenate([np.arange(trace.num_positions)[trace.positions(q)] for q in requests])
    path_rank = arrays.path_rank[rows]
    walked = [levels for levels in WALKED_LEVELS if levels <= header.chain_levels]
    deepest = min(WALKED_LEVELS[-1], header.chain_levels)
    by_position = [accepted_by_position(trace, q, deepest) for q in requests]
    return Realism(
        requests=len(infos),
        positions=len(rows),
        splits={
            split: SplitSize(int(inside.sum()), int(sizes[inside].sum()))
            for split in ("calibration", "evaluation")
            for inside in [np.array([info.split == split for info in infos])]
        },
        finish_reasons=dict(sorted(Counter(info.finish_reason for info in infos).items())),
        prompt_tokens=_lengths(np.array([info.prompt_tokens for info in infos])),
        output_tokens=_lengths(sizes + 1),
        within_first={k: within_first(path_rank, k) for k in WITHIN},
        ranks=tuple(rank_shares(path_rank[:, level]) for level in range(header.chain_levels)),
        reliability=chain_reliability(arrays.chain_logp[rows], path_rank),
        walks=tuple(chain_walk(trace, levels, requests) for levels in walked),
        position_autocorrelation=autocorrelation(by_position),
    )


def _lengths(tokens: npt.NDArray[np.int64]) -> Lengths:
    low, median, high = (float(q) for q in np.quantile(tokens, [0.25, 0.5, 0.75]))
    return Lengths(float(tokens.mean()), int(tokens.min()), (low, median, high), int(tokens.max()))
