"""Whether the draft's confidence in its greedy chain is borne out: bins, calibration error, AUC.

Confidence at level d is the draft's probability of the chain's node given the nodes before it. Its
label is whether the target agrees there, where the chain was accepted at levels 1..d - 1.
Shape letters: N labelled positions, P positions, C levels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from echo_policies.calibration import CalibrationSamples, depth_reports
from traces.schema import PAST_END

Float1 = npt.NDArray[np.float64]
Bool1 = npt.NDArray[np.bool_]

BINS: Final = 10


@dataclass(frozen=True, slots=True)
class ReliabilityBin:
    """Positions whose confidence lies in ``[low, high)``, the last bin's end included."""

    low: float
    high: float
    positions: int
    confidence: float
    """Mean of the bin; NaN where it is empty."""
    accepted: float
    """Share of the bin; NaN where it is empty."""


@dataclass(frozen=True, slots=True)
class LevelReliability:
    """Confidence against acceptance at one level of the greedy chain."""

    level: int
    accepted: int
    rejected: int
    auc: float
    """Chance that an accepted node has more confidence than a rejected one; NaN without both."""
    ece: float
    """Expected calibration error over ``bins``, of equal width (Guo et al. 2017)."""
    ece_equal_mass: float
    """The same over bins of equal mass, which does not hide what happens near probability 1."""
    bins: tuple[ReliabilityBin, ...]


def chain_reliability(
    chain_logp_PC: npt.NDArray[np.float16], path_rank_PC: npt.NDArray[np.int32]
) -> tuple[LevelReliability, ...]:
    """Compare confidence with acceptance at every level of the greedy chain."""
    samples = _samples(chain_logp_PC, path_rank_PC)
    reports = depth_reports(samples, num_resamples=0)
    return tuple(
        LevelReliability(
            level=report.depth,
            accepted=report.accepted,
            rejected=report.rejected,
            auc=report.auc,
            ece=binned_error(bins),
            ece_equal_mass=equal_mass_error(confidence, hit),
            bins=bins,
        )
        for report in reports
        for confidence, hit in [samples.labelled(report.depth)]
        for bins in [reliability_bins(confidence, hit)]
    )


def reliability_bins(confidence_N: Float1, hit_N: Bool1) -> tuple[ReliabilityBin, ...]:
    """Sort positions into `BINS` bins of equal width over [0, 1]."""
    edges = np.linspace(0.0, 1.0, BINS + 1)
    place_N = np.clip(np.searchsorted(edges, confidence_N, side="right") - 1, 0, BINS - 1)
    counts = np.bincount(place_N, minlength=BINS)
    totals = (np.bincount(place_N, weights=of, minlength=BINS) for of in (confidence_N, hit_N))
    means = [
        [total / count if count else math.nan for total, count in zip(sums, counts, strict=True)]
        for sums in totals
    ]
    return tuple(
        ReliabilityBin(float(low), float(high), int(count), float(mean), float(share))
        for low, high, count, mean, share in zip(edges[:-1], edges[1:], counts, *means, strict=True)
    )


def binned_error(bins: tuple[ReliabilityBin, ...]) -> float:
    """Mean gap between confidence and accepted share, bins weighted by positions; NaN if empty."""
    filled = [one for one in bins if one.positions]
    positions = sum(one.positions for one in filled)
    gaps = sum(abs(one.confidence - one.accepted) * one.positions for one in filled)
    return gaps / positions if positions else math.nan


def equal_mass_error(confidence_N: Float1, hit_N: Bool1, bins: int = BINS) -> float:
    """Expected calibration error over bins of equal mass; NaN without a position.

    Equal confidences may be parted by a bin's edge; the order of positions then decides.
    """
    if not confidence_N.size:
        return math.nan
    order = np.argsort(confidence_N, kind="stable")
    parts = [part for part in np.array_split(order, bins) if part.size]
    gaps = (abs(float(confidence_N[p].mean() - hit_N[p].mean())) * p.size for p in parts)
    return sum(gaps) / confidence_N.size


def _samples(
    chain_logp_PC: npt.NDArray[np.float16], path_rank_PC: npt.NDArray[Any]
) -> CalibrationSamples:
    accepted_PC = np.logical_and.accumulate(path_rank_PC == 0, axis=1)
    reached_PC = path_rank_PC != PAST_END
    reached_PC[:, 1:] &= accepted_PC[:, :-1]
    logp_PC = chain_logp_PC.astype(np.float64)
    # No interval is asked for, so nothing is resampled by request.
    return CalibrationSamples(logp_PC, reached_PC, accepted_PC, np.zeros(len(logp_PC), np.int64))
