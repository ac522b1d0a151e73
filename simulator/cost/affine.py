"""The affine cost model of other simulators, fitted: constant + per token + per KV token.

A yardstick: it knows no knee, no shapes and no other GPU. ``t = c + a * rows + b * kv_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from itertools import combinations
from typing import Final

import numpy as np
from scipy.special import stdtrit

from echo_policies.errors import InputError
from simulator.cost.fallback import FallbackCosts, check_fallback, check_knee
from simulator.cost.protocol import StepCosts
from simulator.cost.step import KNEE_ROWS_LIMIT
from simulator.cost.step_group import StepGroup
from simulator.cost.step_rows import StepRow

Floats = np.ndarray[tuple[int, ...], np.dtype[np.float64]]

TERMS: Final = ("constant_s", "per_token_s", "per_kv_token_s")
MIN_ROWS: Final = 2 * len(TERMS)
"""Two rows per constant, so that intervals rest on at least three degrees of freedom."""
WORST_CONDITION: Final = 1e6
"""Above this the rows do not tell the three terms apart."""


@dataclass(frozen=True, slots=True)
class Constant:
    """A fitted constant in seconds with its 95 % interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True, slots=True)
class AffineLaw:
    """Seconds of a step as a line; no term is negative, so no step is either."""

    constant_s: Constant
    """Per step."""
    per_token_s: Constant
    """Per row of the batch."""
    per_kv_token_s: Constant
    """Per committed token of the batch."""
    median_error: float
    """Of the fitted rows: median of |predicted / measured - 1|."""
    num_rows: int

    def step_s(self, rows: float, kv_tokens: float) -> float:
        """Return the seconds of a step over ``rows`` tokens with ``kv_tokens`` committed ones."""
        return (
            self.constant_s.value
            + self.per_token_s.value * rows
            + self.per_kv_token_s.value * kv_tokens
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class AffineCosts(FallbackCosts):
    """Verification times from an `AffineLaw`; made by `build_affine_costs`."""

    group: StepGroup
    law: AffineLaw

    @property
    def source(self) -> str:
        """The group, its number of rows, and how far a line is stretched beyond them."""
        rows = self.group.rows
        most = max(row.tokens for row in rows)
        return (
            f"{self.group.name}: affine fit of {len(rows)} measured steps of at most {most:g} "
            "tokens per request"
        )

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one step; 0 for no rows. ``requests`` do not matter to it."""
        return self.scale * self.law.step_s(rows, kv_tokens) if rows > 0 else 0.0

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the candidate rows until a verification takes ``factor`` times a plain step.

        A line has no knee; this is where it has risen by ``factor``.

        Raises:
            InputError: if the knee is not defined.
        """
        check_knee(batch_size, context_tokens, factor)
        plain_s = self.law.step_s(batch_size, batch_size * context_tokens)
        extra_s = (factor - 1.0) * plain_s
        most = max(0, KNEE_ROWS_LIMIT - batch_size)
        slope_s = self.law.per_token_s.value
        return min(most, int(extra_s / slope_s * (1.0 + 1e-12))) if slope_s > 0.0 else most

    def describe_source(self) -> dict[str, object]:
        """Return the rows, and the law with its intervals."""
        measured = self.group.describe()
        return {"kind": "affine", "measured": measured, "law": asdict(self.law)}


def fit_affine(rows: Sequence[StepRow]) -> AffineLaw:
    """Fit the law by least squares on relative errors, no term below 0.

    Intervals are those of the unconstrained fit (Student's t, 95 %), cut off at 0.

    Raises:
        InputError: fewer than `MIN_ROWS` rows, or rows that do not tell the terms apart.
    """
    if len(rows) < MIN_ROWS:
        raise InputError(
            f"An affine fit of {len(TERMS)} constants needs at least {MIN_ROWS} rows; got "
            f"{len(rows)}. Measure {MIN_ROWS - len(rows)} more, at other batch sizes and contexts."
        )
    seconds = np.array([row.step_s for row in rows])
    design = np.array([[1.0, row.batch * row.tokens, row.batch * row.context] for row in rows])
    relative = design / seconds[:, None]  # times the constants: predicted over measured
    sizes = np.linalg.norm(relative, axis=0)
    scaled = relative / np.where(sizes > 0.0, sizes, 1.0)
    if np.linalg.cond(scaled) > WORST_CONDITION:
        raise InputError(
            "An affine fit needs rows that differ in batch, in tokens per request or context, and "
            f"not all in step; these {len(rows)} rows of {rows[0].model} do not tell a token from "
            "a KV token. Measure at a second batch size and a second context."
        )
    best = _non_negative(scaled)
    low, high = _interval(scaled)
    low, high = np.minimum(np.maximum(low, 0.0), best), np.maximum(high, best)
    ends = zip(
        (best / sizes).tolist(), (low / sizes).tolist(), (high / sizes).tolist(), strict=True
    )
    constant, per_token, per_kv_token = (Constant(*values) for values in ends)
    return AffineLaw(
        constant_s=constant,
        per_token_s=per_token,
        per_kv_token_s=per_kv_token,
        median_error=float(np.median(np.abs(scaled @ best - 1.0))),
        num_rows=len(rows),
    )


def build_affine_costs(
    group: StepGroup, fallback: StepCosts, *, has_host: bool = True, scale: float = 1.0
) -> AffineCosts:
    """Make a cost model of a line through measured steps.

    Args:
        group: rows of one model on one engine, from `step_group.select_rows`.
        fallback: cost model of the same pair on the same machine, for what rows cannot give.
        has_host: whether the measured times hold the host's part, as an engine's steps do.
        scale: factor on every returned time.

    Raises:
        InputError: for an option out of range, rows that are not in milliseconds, or too few.
    """
    law = fit_affine(group.rows)
    check_fallback(group, fallback, has_host=has_host, scale=scale)
    return AffineCosts(group=group, fallback=fallback, has_host=has_host, scale=scale, law=law)


def _non_negative(scaled: Floats) -> Floats:
    """Return the non-negative constants with the least squared relative error.

    With three constants every choice of free ones is tried; the rest are 0.
    """
    best, least = np.zeros(len(TERMS)), float(len(scaled))
    for size in range(len(TERMS), 0, -1):
        for free in map(list, combinations(range(len(TERMS)), size)):
            found = np.linalg.lstsq(scaled[:, free], np.ones(len(scaled)))[0]
            error = float(np.sum((scaled[:, free] @ found - 1.0) ** 2))
            if np.all(found >= 0.0) and error < least:
                best, least = np.zeros(len(TERMS)), error
                best[free] = found
    return best


def _interval(scaled: Floats) -> tuple[Floats, Floats]:
    """Return the ends of the unconstrained constants' 95 % intervals."""
    found = np.linalg.lstsq(scaled, np.ones(len(scaled)))[0]
    freedom = len(scaled) - len(TERMS)
    variance = float(np.sum((scaled @ found - 1.0) ** 2)) / freedom
    spread = np.sqrt(variance * np.diag(np.linalg.inv(scaled.T @ scaled)))
    half = np.asarray(spread * float(stdtrit(freedom, 0.975)), dtype=np.float64)
    return found - half, found + half
