"""Constants drawn from what a fit leaves open, to carry its uncertainty into results."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from echo_policies.errors import InputError
from simulator.cost.constants import ConstantsFile
from simulator.cost.parameters import CONSTANTS, CostParameters


def draw_parameters(
    content: ConstantsFile, draws: int, rng: np.random.Generator
) -> list[CostParameters]:
    """Return sets of constants drawn together: log-normal, with the covariance of the fit.

    Only fitted constants vary; published and estimated ones have no interval to draw from. Draws
    stay within the bounds of the fit.

    Raises:
        InputError: the constants come without a covariance.
    """
    if not content.names or len(content.covariance) != len(content.names):
        raise InputError(
            "A cost interval needs constants with a covariance, as `simulate costs fit` writes; "
            "these have none."
        )
    centre_P = np.log([getattr(content.parameters, name) for name in content.names])
    low_P = np.log([CONSTANTS[name]["low"] for name in content.names])
    high_P = np.log([CONSTANTS[name]["high"] for name in content.names])
    logs_DP = rng.multivariate_normal(centre_P, np.array(content.covariance), size=draws)
    values_DP = np.exp(np.clip(logs_DP, low_P, high_P)).tolist()
    return [
        replace(content.parameters, **dict(zip(content.names, values_P, strict=True)))
        for values_P in values_DP
    ]
