"""Calibration: from ungated full drafts to gated depths and thresholds.

Shape letters: N samples (positions), D depths.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy import stats

from echo_policies.errors import InputError

FloatArray = npt.NDArray[np.float64]
BoolArray = npt.NDArray[np.bool_]
IntArray = npt.NDArray[np.int64]

MIN_PER_CLASS: Final = 10
"""Samples of either outcome that a depth needs before its AUC is used."""


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationSamples:
    """Confidence and outcome of every depth, from drafts that no gate and no rerank cut.

    A depth's label is conditional: it exists where some node of the depth above was accepted.
    """

    log_c_ND: FloatArray
    """[N, D] best path log-probability of the layer at depths 1..D."""
    reached_ND: BoolArray
    """[N, D] a node of the depth above was accepted (always, at depth 1), and candidates exist."""
    accepted_ND: BoolArray
    """[N, D] some revealed node of this depth was accepted."""
    request_N: IntArray
    """[N] request of each sample: the cluster for intervals."""

    def __post_init__(self) -> None:
        """Refuse an empty set.

        Raises:
            InputError: there is no sample.
        """
        if self.log_c_ND.shape[0] == 0:
            raise InputError(
                "Calibration needs recorded positions; the calibration split has none."
            )

    @property
    def levels(self) -> int:
        """Deepest depth, D."""
        return int(self.log_c_ND.shape[1])

    def labelled(self, depth: int) -> tuple[FloatArray, BoolArray]:
        """Confidences (as probabilities) and labels of one depth, where the label exists."""
        rows = self.reached_ND[:, depth - 1]
        confidence = np.exp(self.log_c_ND[rows, depth - 1])
        return confidence, self.accepted_ND[rows, depth - 1]

    def pooled(
        self, depths: tuple[int, ...], *, is_normalized: bool
    ) -> tuple[FloatArray, BoolArray]:
        """Samples of several depths together; ``is_normalized`` takes c^(1/d)."""
        parts = [self.labelled(depth) for depth in depths]
        scores = [
            score ** (1 / depth) if is_normalized else score
            for depth, (score, _) in zip(depths, parts, strict=True)
        ]
        return np.concatenate(scores), np.concatenate([label for _, label in parts])


@dataclass(frozen=True, slots=True)
class DepthReport:
    """How well the confidence of one depth separates accepted from rejected."""

    depth: int
    auc: float
    """NaN where a class is empty."""
    auc_low: float
    auc_high: float
    """95 % interval, resampling requests; NaN where not asked for or not to be had."""
    accepted: int
    rejected: int
    tau: float
    """Youden's threshold of this depth alone; NaN where a class is empty."""

    @property
    def is_usable(self) -> bool:
        """Whether both classes have at least ``MIN_PER_CLASS`` samples."""
        return min(self.accepted, self.rejected) >= MIN_PER_CLASS


def auc(scores: FloatArray, labels: BoolArray) -> float:
    """Area under the ROC curve by the Mann-Whitney statistic; NaN where a class is empty."""
    num_true = int(labels.sum())
    num_false = labels.size - num_true
    if num_true == 0 or num_false == 0:
        return float("nan")
    rank_sum = float(stats.rankdata(scores)[labels].sum())
    return (rank_sum - num_true * (num_true + 1) / 2) / (num_true * num_false)


def youden_tau(scores: FloatArray, labels: BoolArray) -> float:
    """Threshold that maximises TPR - FPR of ``score > tau``.

    Between two neighbouring scores every threshold does equally well, so the middle is taken;
    where several separate plateaus tie, the lowest one.

    Raises:
        InputError: one of the two outcomes never occurs.
    """
    num_true = int(labels.sum())
    num_false = labels.size - num_true
    if num_true == 0 or num_false == 0:
        raise InputError(
            "A threshold needs accepted and rejected samples; got "
            f"{num_true} accepted and {num_false} rejected. Calibrate on more requests."
        )
    values, index = np.unique(scores, return_inverse=True)
    true_above = num_true - np.cumsum(np.bincount(index[labels], minlength=values.size))
    false_above = num_false - np.cumsum(np.bincount(index[~labels], minlength=values.size))
    # Whole numbers, so that a tie is a tie: J scaled by num_true * num_false.
    j_after = true_above * num_false - false_above * num_true
    j = np.concatenate([[0], j_after])
    best = int(np.argmax(j))
    last = best
    while last + 1 < j.size and j[last + 1] == j[best]:
        last += 1
    low = 0.0 if best == 0 else float(values[best - 1])
    high = float(values[last]) if last < values.size else 1.0
    return (low + high) / 2


def depth_reports(
    samples: CalibrationSamples,
    *,
    num_resamples: int = 400,
    rng: np.random.Generator | None = None,
) -> list[DepthReport]:
    """AUC, interval and threshold of every depth.

    Args:
        samples: ungated drafts.
        num_resamples: bootstrap resamples over requests for the interval; 0 leaves it out.
        rng: source of the resamples; needed where ``num_resamples`` is not 0.
    """
    reports = []
    for depth in range(1, samples.levels + 1):
        scores, labels = samples.labelled(depth)
        num_true = int(labels.sum())
        has_both = 0 < num_true < labels.size
        clusters = samples.request_N[samples.reached_ND[:, depth - 1]]
        low, high = float("nan"), float("nan")
        if has_both and num_resamples and rng is not None:
            low, high = _auc_interval(scores, labels, clusters, num_resamples, rng)
        reports.append(
            DepthReport(
                depth=depth,
                auc=auc(scores, labels),
                auc_low=low,
                auc_high=high,
                accepted=num_true,
                rejected=labels.size - num_true,
                tau=youden_tau(scores, labels) if has_both else float("nan"),
            )
        )
    return reports


def _auc_interval(
    scores: FloatArray,
    labels: BoolArray,
    clusters: IntArray,
    num_resamples: int,
    rng: np.random.Generator,
) -> tuple[float, float]:
    """Percentile interval of the AUC; requests are resampled, not positions."""
    names = np.unique(clusters)
    rows = [np.flatnonzero(clusters == name) for name in names]
    draws = []
    for _ in range(num_resamples):
        picked = np.concatenate([rows[i] for i in rng.integers(0, names.size, names.size)])
        draws.append(auc(scores[picked], labels[picked]))
    kept = [draw for draw in draws if not np.isnan(draw)]
    if not kept:
        return float("nan"), float("nan")
    low, high = np.quantile(kept, [0.025, 0.975])
    return float(low), float(high)
