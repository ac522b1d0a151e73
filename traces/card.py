"""What a trace is, in figures: the content of ``simulate traces info``. Nothing is printed here.

Shape letters as in `traces.schema`: P positions, C chain levels.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from traces.schema import PAST_END, ModelInfo, Provenance, Trace
from traces.validate import named_arrays

CHAIN_LEVELS: Final = (3, 5, 7)
"""Chain lengths K that are walked; those beyond the recording are left out."""

COVERAGE_WIDTH: Final = 10
CALIBRATION_BINS: Final = 10


@dataclass(frozen=True, slots=True)
class GroupCount:
    """How much of one data set is in one split."""

    task: str
    split: str
    requests: int
    positions: int


@dataclass(frozen=True, slots=True)
class Acceptance:
    """Acceptance of the greedy chain at the positions, not along any policy's walk.

    ``by_level[d - 1]`` is the share of positions whose chain agrees with the target at levels
    1..d, all of them, among the positions whose output reaches level d; NaN where none does.
    """

    positions: int
    by_level: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class ChainWalk:
    """A chain of K tokens drafted at every step, from the first position of each request on."""

    levels: int
    """K, the tokens drafted per step."""
    steps: int
    acceptance_length: float
    """Tokens emitted per step, bonus token included and the end of the output respected."""
    autocorrelation: float
    """Lag 1, of the accepted draft tokens of successive steps in a request; NaN if undefined."""


@dataclass(frozen=True, slots=True)
class TraceCard:
    """All that ``simulate traces info`` says of a trace."""

    name: str
    target: ModelInfo
    draft: ModelInfo
    drafter: str
    temperature: float
    licence: str
    provenance: Provenance
    groups: tuple[GroupCount, ...]
    acceptance: Acceptance
    acceptance_by_task: dict[str, Acceptance]
    walks: tuple[ChainWalk, ...]
    coverage: float
    """Share of positions whose target token is among the root's first `COVERAGE_WIDTH` ranks."""
    calibration_error: float
    """Of ``exp(chain_logp[:, 0])`` against acceptance at depth 1; equal-mass bins."""
    array_bytes: int
    digest: str


def describe(trace: Trace) -> TraceCard:
    """Measure a valid trace."""
    header, arrays = trace.header, trace.arrays
    tasks = sorted({info.task for info in header.requests})
    hit = arrays.path_rank[:, 0] == 0
    covered = (arrays.path_rank[:, 0] >= 0) & (arrays.path_rank[:, 0] < COVERAGE_WIDTH)
    return TraceCard(
        name=header.name,
        target=header.target,
        draft=header.draft,
        drafter=header.drafter,
        temperature=header.temperature,
        licence=header.licence,
        provenance=header.provenance,
        groups=_groups(trace),
        acceptance=acceptance(arrays.path_rank),
        acceptance_by_task={task: acceptance(_task_ranks(trace, task)) for task in tasks},
        walks=tuple(chain_walk(trace, k) for k in CHAIN_LEVELS if k <= header.chain_levels),
        coverage=float(covered.mean()),
        calibration_error=calibration_error(np.exp(arrays.chain_logp[:, 0].astype(float)), hit),
        array_bytes=sum(array.nbytes for array in named_arrays(arrays).values()),
        digest=trace.digest,
    )


def acceptance(path_rank: npt.NDArray[np.int32]) -> Acceptance:
    """Acceptance of the greedy chain by level, from path ranks ``[P, C]``."""
    agreed = np.logical_and.accumulate(path_rank == 0, axis=1).sum(axis=0)
    reached = (path_rank != PAST_END).sum(axis=0)
    shares = tuple(int(a) / int(r) if r else math.nan for a, r in zip(agreed, reached, strict=True))
    return Acceptance(len(path_rank), shares)


def chain_walk(trace: Trace, levels: int) -> ChainWalk:
    """Walk every request with a chain of ``levels`` tokens per step."""
    agreed = np.logical_and.accumulate(trace.arrays.path_rank[:, :levels] == 0, axis=1).sum(axis=1)
    accepted = [_walk(agreed[trace.positions(q)]) for q in range(trace.num_requests)]
    steps = sum(len(lengths) for lengths in accepted)
    # Every position is emitted once, whatever the steps: tokens past the end are not counted.
    return ChainWalk(levels, steps, trace.num_positions / steps, autocorrelation(accepted))


def _walk(agreed: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Accepted draft tokens of each step of one request."""
    accepted = []
    position = 0
    while position < len(agreed):
        accepted.append(int(agreed[position]))
        position += accepted[-1] + 1
    return np.array(accepted, np.int64)


def autocorrelation(series: Sequence[npt.NDArray[np.int64]]) -> float:
    """Lag-1 autocorrelation, pooled over series about their common mean.

    NaN where there is no pair of successive values, or no variance.
    """
    values = np.concatenate([np.asarray(one, float) for one in series])
    pairs = sum(max(len(one) - 1, 0) for one in series)
    variance = float(values.var()) if values.size else 0.0
    if not pairs or variance == 0.0:
        return math.nan
    mean = values.mean()
    products = sum(float(((one[1:] - mean) * (one[:-1] - mean)).sum()) for one in series)
    return products / pairs / variance


def calibration_error(
    probability: npt.NDArray[np.float64],
    hit: npt.NDArray[np.bool_],
    bins: int = CALIBRATION_BINS,
) -> float:
    """Expected calibration error over bins of equal mass.

    Equal probabilities may be parted by a bin's edge; the order of positions then decides.
    """
    order = np.argsort(probability, kind="stable")
    parts = [part for part in np.array_split(order, bins) if part.size]
    gaps = (abs(float(probability[p].mean() - hit[p].mean())) * p.size for p in parts)
    return sum(gaps) / len(probability)


def _groups(trace: Trace) -> tuple[GroupCount, ...]:
    requests: dict[tuple[str, str], list[int]] = {}
    for q, info in enumerate(trace.header.requests):
        requests.setdefault((info.task, info.split), []).append(q)
    offset = trace.arrays.position_offset
    return tuple(
        GroupCount(task, split, len(ids), sum(int(offset[q + 1] - offset[q]) for q in ids))
        for (task, split), ids in sorted(requests.items())
    )


def _task_ranks(trace: Trace, task: str) -> npt.NDArray[np.int32]:
    of_task = [info.task == task for info in trace.header.requests]
    rows = np.repeat(of_task, np.diff(trace.arrays.position_offset))
    ranks: npt.NDArray[np.int32] = trace.arrays.path_rank[rows]
    return ranks
