"""Fits the few free constants of the cost model to measured steps.

Robust regression of log(predicted / measured) (soft L1), with a prior on the logarithm of every
constant around its starting value: where rows say nothing, the constant stays. Rows of one model
on one engine share their faults, so a group counts as at most `GROUP_ROWS` independent rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np
from scipy.optimize import least_squares

from echo_policies.errors import InputError
from simulator.cost.parameters import CONSTANTS, FITTED_NAMES, NEUTRAL, CostParameters
from simulator.cost.predict import predict_all
from simulator.cost.stepfile import MeasuredStep

# Shapes: S steps, P fitted constants.
Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

NOISE: Final = 0.05
"""Relative error from which on a row counts as an outlier, and the noise that intervals assume."""
GROUP_ROWS: Final = 10
MIN_ROWS: Final = 5
Z_95: Final = 1.959964


@dataclass(frozen=True, slots=True)
class CostFit:
    """Fitted constants with the covariance of their logarithms."""

    parameters: CostParameters
    names: tuple[str, ...]
    """Constants that the rows depend on; the others kept their starting value."""
    covariance: tuple[tuple[float, ...], ...]

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """The 95 % interval of every fitted constant."""
        found = {}
        for place, name in enumerate(self.names):
            value = getattr(self.parameters, name)
            factor = float(np.exp(Z_95 * np.sqrt(self.covariance[place][place])))
            found[name] = (value / factor, value * factor)
        return found


def fit_constants(steps: Sequence[MeasuredStep], start: CostParameters = NEUTRAL) -> CostFit:
    """Fit the constants that the steps depend on.

    Args:
        steps: measured steps; leave out flagged ones before.
        start: centre of the priors, and the value of everything that is not fitted.

    Raises:
        InputError: fewer steps than the constants need.
        UnknownNameError: a model or GPU that the catalogue lacks.
    """
    measured_ms_S = np.array([step.measured_ms for step in steps])
    names = _sensitive(steps, start) if steps else ()
    needed = max(MIN_ROWS, len(names))
    if len(steps) < needed:
        raise InputError(
            f"A fit of {len(names)} constants ({', '.join(names)}) needs at least {needed} "
            f"measured steps; got {len(steps)}. Measure {needed - len(steps)} more."
        )
    width_P = np.array([CONSTANTS[name]["prior"] for name in names])
    low_P = np.log([CONSTANTS[name]["low"] for name in names])
    high_P = np.log([CONSTANTS[name]["high"] for name in names])
    # a start on its bound would leave the solver no room
    centre_P = np.clip(_logs(start, names), low_P + 1e-6, high_P - 1e-6)
    weight_S = _weights(steps)

    def residuals(log_P: Floats) -> Floats:
        predicted_ms_S = np.array(predict_all(steps, _moved(start, names, log_P)))
        error_S = np.log(predicted_ms_S / measured_ms_S) / NOISE
        robust_S = np.sign(error_S) * np.sqrt(2.0 * (np.sqrt(1.0 + error_S**2) - 1.0))
        return np.concatenate([weight_S * robust_S, (log_P - centre_P) / width_P])

    found = least_squares(
        residuals,
        centre_P,
        bounds=(low_P, high_P),
        x_scale=width_P,
        max_nfev=60,
        ftol=1e-6,
        xtol=1e-5,
    )
    covariance = np.linalg.inv(found.jac.T @ found.jac)
    return CostFit(
        parameters=_moved(start, names, found.x),
        names=names,
        covariance=tuple(tuple(row) for row in covariance.tolist()),
    )


def cross_validate(
    steps: Sequence[MeasuredStep],
    start: CostParameters = NEUTRAL,
    progress: Callable[[str, int, int], None] | None = None,
) -> list[float]:
    """Return milliseconds of every step, predicted by a fit that never saw its group.

    A group is a model on an engine, whatever the GPU, the version and the weight format.

    Raises:
        InputError: fewer than two groups.
    """
    groups = sorted({step.group for step in steps})
    if len(groups) < 2:  # noqa: PLR2004
        raise InputError(
            "Cross-validation leaves out whole model and engine groups and needs at least 2; got "
            f"{len(groups)}."
        )
    predicted_ms: dict[int, float] = {}
    for done, group in enumerate(groups):
        if progress is not None:
            progress("cross-validation: " + " on ".join(group), done, len(groups))
        kept = [step for step in steps if step.group != group]
        held = [place for place, step in enumerate(steps) if step.group == group]
        parameters = fit_constants(kept, start).parameters
        values = predict_all([steps[place] for place in held], parameters)
        predicted_ms.update(zip(held, values, strict=True))
    return [predicted_ms[place] for place in range(len(steps))]


def _sensitive(steps: Sequence[MeasuredStep], start: CostParameters) -> tuple[str, ...]:
    """Return the free constants that any of the steps depends on."""
    base = predict_all(steps, start)
    return tuple(
        name
        for name in FITTED_NAMES
        if predict_all(steps, replace(start, **{name: getattr(start, name) * 1.1})) != base
    )


def _weights(steps: Sequence[MeasuredStep]) -> Floats:
    sizes = Counter(step.group for step in steps)
    return np.array([min(1.0, (GROUP_ROWS / sizes[step.group]) ** 0.5) for step in steps])


def _logs(parameters: CostParameters, names: Sequence[str]) -> Floats:
    return np.log([getattr(parameters, name) for name in names])


def _moved(start: CostParameters, names: Sequence[str], log_P: Floats) -> CostParameters:
    return replace(start, **dict(zip(names, np.exp(log_P).tolist(), strict=True)))
