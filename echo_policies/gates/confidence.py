"""ECHO's confidence gate: the best path probability of a layer against a threshold per depth.

Source: arXiv 2604.09603, Eq. 6 (c) and Eq. 7 (g); calibration as this project's docs describe.
"""

from __future__ import annotations

import math
from typing import Literal, Self

from pydantic import Field, field_validator
from torch import Tensor

from echo_policies.api import CalibrationContext, Gate, LayerView
from echo_policies.calibration import CalibrationSamples, depth_reports, youden_tau
from echo_policies.errors import InputError

GateSet = Literal["sparse", "dense", "off"]
Threshold = Literal["per_depth", "fixed", "normalized"]


class ConfidenceGate(Gate):
    """Extends a request at depth d iff c[i, d] > tau_d, c the best path probability.

    ``echo`` is sparse with one threshold per depth; ``dense`` and ``fixed`` are its ablations.
    Comparisons are made in log space, in float32.
    """

    gate_set: GateSet = Field("sparse", description="checked depths: D_sig, every depth, or none")
    threshold: Threshold = Field(
        "per_depth", description="tau_d per depth, one tau, or one tau on c^(1/d)"
    )
    gate_cmp: Literal["gt", "ge"] = Field("gt", description="extend iff c > tau, or c >= tau")
    delta: float | None = Field(
        None, description="smallest AUC of a gated depth; None takes the calibration's", ge=0, le=1
    )
    depths: tuple[int, ...] | None = Field(
        None, description="gated depths given by hand, instead of D_sig"
    )
    taus: tuple[tuple[int, float], ...] | None = Field(
        None, description="(depth, tau) pairs; None until calibrated. Probabilities, not logs"
    )

    @field_validator("taus")
    @classmethod
    def _taus_are_probabilities(
        cls, taus: tuple[tuple[int, float], ...] | None
    ) -> tuple[tuple[int, float], ...] | None:
        for depth, tau in taus or ():
            if depth < 1 or not 0 <= tau <= 1:
                raise ValueError(
                    f"taus must pair a depth >= 1 with a probability in [0, 1]; got {depth}: {tau}"
                )
        return tuple(sorted(taus)) if taus is not None else None

    @property
    def is_calibrated(self) -> bool:
        """Whether there are thresholds, or none is needed."""
        return self.gate_set == "off" or self.taus is not None

    def checkpoints(self, levels: int) -> tuple[int, ...]:
        """Depths that have a threshold."""
        if self.gate_set == "off":
            return ()
        return tuple(depth for depth, _ in self.taus or () if depth <= levels)

    def evaluate(self, layer: LayerView) -> Tensor:
        """Compare c with tau at the layer's depth (Eq. 7)."""
        tau = next(tau for depth, tau in self.taus or () if depth == layer.depth)
        log_tau = math.log(tau) if tau > 0 else -math.inf
        log_c_B = layer.best_B
        if self.threshold == "normalized":
            log_c_B = log_c_B / layer.depth
        return log_c_B > log_tau if self.gate_cmp == "gt" else log_c_B >= log_tau

    def calibrate(self, samples: CalibrationSamples, ctx: CalibrationContext) -> Self:
        """Choose the gated depths by AUC and the thresholds by Youden's J.

        Raises:
            InputError: the samples hold no depth with both outcomes.
        """
        if self.is_calibrated:
            return self
        delta = ctx.delta if self.delta is None else self.delta
        depths = self._choose_depths(samples, delta)
        if self.threshold == "per_depth":
            taus = [(depth, youden_tau(*samples.labelled(depth))) for depth in depths]
        else:
            pooled = samples.pooled(depths, is_normalized=self.threshold == "normalized")
            taus = [(depth, youden_tau(*pooled)) for depth in depths]
        return self.model_copy(update={"taus": tuple(taus)})

    def _choose_depths(self, samples: CalibrationSamples, delta: float) -> tuple[int, ...]:
        if self.depths is not None:
            return tuple(sorted(self.depths))
        reports = [r for r in depth_reports(samples, num_resamples=0) if r.is_usable]
        if not reports:
            raise InputError(
                "Calibration needs a depth with at least 10 accepted and 10 rejected samples; "
                "this split has none. Calibrate on more requests."
            )
        if self.gate_set == "dense":
            return tuple(report.depth for report in reports)
        chosen = [report.depth for report in reports if report.auc > delta]
        if not chosen:
            best = sorted(reports, key=lambda report: -report.auc)[:3]
            chosen = sorted(report.depth for report in best)
        return tuple(chosen)
