"""How many distinct experts a mixture-of-experts layer loads for T tokens.

Source: hardware.md section 4.3. Popularity of experts follows a Zipf law with exponent ``alpha``;
0 is uniform routing. Tokens are taken as independent, which overstates the count inside a draft
tree; ``alpha`` is the sensitivity axis for that.
"""

from __future__ import annotations

import math
from functools import lru_cache


@lru_cache(maxsize=64)
def inclusion_probabilities(experts: int, per_token: int, alpha: float) -> tuple[float, ...]:
    """Return for each expert the probability that a token is routed to it.

    Proportional to ``(e + 1) ** -alpha``, clipped at 1 and rescaled until the sum is
    ``per_token``.
    """
    weights = [(expert + 1) ** -alpha for expert in range(experts)]
    clipped = 0  # weights decrease, so the clipped experts are the first ones
    while clipped < per_token:
        factor = (per_token - clipped) / sum(weights[clipped:])
        over = sum(weight * factor > 1.0 for weight in weights[clipped:])
        if not over:
            break
        clipped += over
    scale = (per_token - clipped) / sum(weights[clipped:]) if clipped < experts else 0.0
    return (1.0,) * clipped + tuple(weight * scale for weight in weights[clipped:])


@lru_cache(maxsize=65536)
def distinct_experts(experts: int, per_token: int, alpha: float, tokens: float) -> float:
    """Return the expected number of distinct experts that ``tokens`` tokens are routed to.

    ``sum over experts of 1 - (1 - p) ** tokens``. Remembered per token count, because the sum
    takes as long as the rest of a step cost.
    """
    probabilities = inclusion_probabilities(experts, per_token, alpha)
    return sum(1.0 - math.pow(1.0 - probability, tokens) for probability in probabilities)
