"""Intervals and steady-state checks over run records.

Requests are resampled, never steps: the steps of one request are correlated.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

from traces.records import RunRecords

RESAMPLES: Final = 2000
"""Bootstrap resamples of an interval."""

STEADY_BLOCKS: Final = 10
"""Blocks of steps that the steady-state check compares."""

SURPRISE: Final = 0.001
"""Probability below which a drift is no chance: few requests in a row differ by a lot."""

MIN_BLOCKS: Final = 4
"""Blocks below which drift cannot be judged."""

MIN_REQUESTS: Final = 2
"""Requests below which there is no interval."""

Float1 = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Interval:
    """A figure with its 95 % interval; NaN bounds where there are too few requests."""

    value: float
    low: float
    high: float


def work_by_request(records: RunRecords, num_requests: int) -> tuple[Float1, Float1]:
    """Emitted tokens and attributed seconds of every recorded request.

    A batch step's time is shared equally by the requests in it, so tokens over seconds, summed
    over requests, is the throughput of the batch.

    Returns:
        tokens [num_requests], seconds [num_requests].
    """
    live_SB = records.live_SB
    share_S = records.step_s / np.maximum(live_SB.sum(axis=1), 1)
    request = records.request_SB[live_SB]
    seconds = np.broadcast_to(share_S[:, None], live_SB.shape)[live_SB]
    emitted = records.emitted_SB[live_SB]
    return (
        np.bincount(request, weights=emitted, minlength=num_requests).astype(np.float64),
        np.bincount(request, weights=seconds, minlength=num_requests).astype(np.float64),
    )


def speedup_interval(
    policy: RunRecords,
    plain: RunRecords,
    sources: Sequence[str],
    rng: np.random.Generator,
    only: npt.NDArray[np.int64] | None = None,
) -> Interval:
    """Throughput of a policy over plain decoding's, paired by recorded request.

    Args:
        policy: records of the policy.
        plain: records of plain decoding at the same batch size on the same requests.
        sources: what each request of the trace was recorded as or drawn from; requests of one
            source are resampled together.
        rng: source of the resamples.
        only: recorded requests to compare, such as those of one data set.
    """
    parts = np.stack(
        [*work_by_request(policy, len(sources)), *work_by_request(plain, len(sources))]
    )
    seen = (parts[1] > 0) & (parts[3] > 0)
    if only is not None:
        seen &= np.isin(np.arange(len(sources)), only)
    tokens, seconds, plain_tokens, plain_seconds = _summed(parts[:, seen], np.array(sources)[seen])
    if not seen.any():
        return Interval(float("nan"), float("nan"), float("nan"))
    value = _ratio(tokens, seconds, plain_tokens, plain_seconds)
    if tokens.size < MIN_REQUESTS:
        return Interval(float(value), float("nan"), float("nan"))
    result = stats.bootstrap(
        (tokens, seconds, plain_tokens, plain_seconds),
        _ratio,
        n_resamples=RESAMPLES,
        paired=True,
        vectorized=True,
        method="percentile",
        rng=rng,
    )
    bounds = result.confidence_interval
    return Interval(float(value), float(bounds.low), float(bounds.high))


def _summed(parts: Float1, sources: npt.NDArray[np.str_]) -> Float1:
    """Sum columns of one source."""
    names, index = np.unique(sources, return_inverse=True)
    summed = np.zeros((len(parts), names.size))
    np.add.at(summed.T, index, parts.T)
    return summed


def _ratio(
    tokens: Float1, seconds: Float1, plain_tokens: Float1, plain_seconds: Float1, axis: int = -1
) -> Float1:
    rate = tokens.sum(axis=axis) / seconds.sum(axis=axis)
    plain = plain_tokens.sum(axis=axis) / plain_seconds.sum(axis=axis)
    return np.asarray(rate / plain)


@dataclass(frozen=True, slots=True)
class Steadiness:
    """Whether throughput drifted over the measured part."""

    drift: float
    """Relative change from the first half to the second."""
    is_steady: bool
    """The drift is below 2 %, or no surprise given how much the blocks differ (t-test, 0.1 %)."""


def steadiness(records: RunRecords) -> Steadiness:
    """Compare the two halves of the measured part by means over blocks of steps."""
    emitted = records.emitted_SB.sum(axis=1).astype(np.float64)
    num_blocks = min(STEADY_BLOCKS, emitted.size // 2 * 2)
    if num_blocks < MIN_BLOCKS:
        return Steadiness(0.0, is_steady=True)
    rates = np.array(
        [
            tokens.sum() / max(seconds.sum(), 1e-30)
            for tokens, seconds in zip(
                np.array_split(emitted, num_blocks),
                np.array_split(records.step_s, num_blocks),
                strict=True,
            )
        ]
    )
    first, second = np.array_split(rates, 2)
    drift = (second.mean() - first.mean()) / rates.mean()
    error = np.sqrt(first.var(ddof=1) / first.size + second.var(ddof=1) / second.size)
    surprising = stats.t.ppf(1 - SURPRISE / 2, df=rates.size - 2)
    limit = max(0.02, float(surprising) * float(error) / float(rates.mean()))
    return Steadiness(float(drift), is_steady=bool(abs(drift) <= limit))
