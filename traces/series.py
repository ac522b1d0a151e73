"""Series of one figure per request: how successive values hang together, and how requests differ.

Shape letters: none; a series is one array per request, of its own length.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Series = Sequence[npt.NDArray[np.int64]]


@dataclass(frozen=True, slots=True)
class Autocorrelation:
    """Lag-1 autocorrelation: Pearson's correlation over pairs of successive values."""

    pooled: float
    """About the common means, so that lasting differences between requests count too."""
    within: float
    """About each request's own means: what is left within requests. Short series bias it down, by
    about 1 over their length."""
    pairs: int


@dataclass(frozen=True, slots=True)
class Spread:
    """How far requests differ in the mean of their values."""

    requests: int
    sd_of_means: float
    """Standard deviation of the requests' means (n - 1), which short requests widen."""
    sd_between: float
    """Square root of the variance component between requests: what is left of it without the
    noise within them; 0 where the estimate is negative."""
    icc: float
    """Share of variance between requests: ICC(1) of a one-way random-effects analysis of variance
    with unequal group sizes (Donner 1986), 0 where the estimate is negative. Successive values
    are taken as independent, so autocorrelation within requests raises it."""


def autocorrelation(series: Series) -> Autocorrelation:
    """Correlate every value with the next one of the same request; NaN where nothing varies."""
    parts = [np.asarray(one, np.float64) for one in series if len(one) > 1]
    before = [one[:-1] for one in parts]
    after = [one[1:] for one in parts]
    return Autocorrelation(
        pooled=_correlation(_about(before, own=False), _about(after, own=False)),
        within=_correlation(_about(before, own=True), _about(after, own=True)),
        pairs=sum(len(one) for one in before),
    )


def spread(series: Series) -> Spread:
    """Compare the requests' means; NaN where there are too few values."""
    parts = [np.asarray(one, np.float64) for one in series if len(one)]
    groups, values = len(parts), sum(len(one) for one in parts)
    means = np.array([one.mean() for one in parts])
    if groups < 2:  # noqa: PLR2004 - two is what a spread means
        return Spread(groups, math.nan, math.nan, math.nan)
    sd_of_means = float(means.std(ddof=1))
    if values == groups:
        return Spread(groups, sd_of_means, math.nan, math.nan)
    sizes = np.array([len(one) for one in parts])
    grand_mean = float(np.concatenate(parts).mean())
    mean_square_between = float((sizes * (means - grand_mean) ** 2).sum()) / (groups - 1)
    mean_square_within = sum(float(((one - one.mean()) ** 2).sum()) for one in parts)
    mean_square_within /= values - groups
    typical_size = (values - float((sizes**2).sum()) / values) / (groups - 1)
    between = max(0.0, (mean_square_between - mean_square_within) / typical_size)
    total = between + mean_square_within
    return Spread(groups, sd_of_means, math.sqrt(between), between / total if total else math.nan)


def _about(parts: list[npt.NDArray[np.float64]], *, own: bool) -> npt.NDArray[np.float64]:
    """Deviations from each part's own mean, or from the mean of all."""
    if not parts:
        return np.zeros(0)
    if own:
        return np.concatenate([one - one.mean() for one in parts])
    joined = np.concatenate(parts)
    deviations: npt.NDArray[np.float64] = joined - joined.mean()
    return deviations


def _correlation(one: npt.NDArray[np.float64], other: npt.NDArray[np.float64]) -> float:
    scale = math.sqrt(float(one @ one) * float(other @ other))
    # Rounding leaves a trace of variance where all values are equal.
    if scale <= 1e-12 * max(one.size, 1):
        return math.nan
    return min(1.0, max(-1.0, float(one @ other) / scale))
