"""The walk of a greedy chain through every request: the steps that a serving engine would take."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from traces.resample import chain_levels
from traces.schema import Trace
from traces.series import Autocorrelation, Spread, autocorrelation, spread


@dataclass(frozen=True, slots=True)
class ChainWalk:
    """A chain of K tokens drafted at every step, from the first position of each request on.

    This is ``chain:levels=K`` with each request alone or in a batch: a chain ignores the others.
    """

    levels: int
    """K, the tokens drafted per step."""
    steps: int
    acceptance_length: float
    """Tokens emitted per step, bonus token included and the end of the output respected."""
    autocorrelation: Autocorrelation
    """Of the accepted draft tokens of successive steps of a request; the end of the output cuts
    the last one short."""
    spread: Spread
    """Of the requests' mean accepted draft tokens per step. With the bonus token, which is one
    more at every step, the spread would be the same."""


def chain_walk(trace: Trace, levels: int, requests: Sequence[int] | None = None) -> ChainWalk:
    """Walk requests (all by default) with a chain of ``levels`` tokens per step."""
    chosen = range(trace.num_requests) if requests is None else requests
    accepted = [accepted_by_step(trace, q, levels) for q in chosen]
    steps = sum(len(lengths) for lengths in accepted)
    # Every position is emitted once, whatever the steps: tokens past the end are not counted.
    emitted = sum(trace.positions(q).stop - trace.positions(q).start for q in chosen)
    return ChainWalk(levels, steps, emitted / steps, autocorrelation(accepted), spread(accepted))


def accepted_by_step(trace: Trace, request: int, levels: int) -> npt.NDArray[np.int64]:
    """Accepted draft tokens of every step of one request."""
    acceptable = accepted_by_position(trace, request, levels)
    accepted = []
    position = 0
    while position < len(acceptable):
        accepted.append(int(acceptable[position]))
        position += accepted[-1] + 1
    return np.array(accepted, np.int64)


def accepted_by_position(trace: Trace, request: int, levels: int) -> npt.NDArray[np.int64]:
    """Draft tokens that a chain would be given at every position of one request.

    No more than ``max_new_tokens`` leaves room for beside the bonus token: engines draft no more.
    """
    agreed = chain_levels(trace.arrays.path_rank[trace.positions(request)], levels)
    room = trace.header.requests[request].max_new_tokens - 2 - np.arange(len(agreed))
    return np.minimum(agreed, room)
