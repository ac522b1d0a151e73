"""Resampling of recorded positions to given chain acceptance lengths; `traces.synthetic` uses it.

A position's *level* is the number of leading path ranks 0: what the greedy chain would gain there.
A chain of K steps emits ``1 + min(level, K)`` tokens at a position.

Shape letters: P positions, R recorded requests, L levels 0..max K, K chain lengths, N drawn
positions, M candidate orders.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from scipy.optimize import linprog, root
from scipy.special import rel_entr, softmax

from echo_policies.errors import InputError

Float = npt.NDArray[np.float64]
Int = npt.NDArray[np.int64]

ORDERS: Final = 256
"""Random orders of a request's positions among which one is chosen."""

MARGIN: Final = 1e-6
"""Least distance, in tokens, of a target from the end of what the recording can reach."""

TOLERANCE: Final = 1e-6
METHODS: Final = ("hybr", "lm")


@dataclass(frozen=True, slots=True, eq=False)
class Tilt:
    """Weights ``exp(sum of multiplier_K * min(level, K))``, normalised within each request."""

    chain_lengths: tuple[int, ...]
    multipliers: tuple[float, ...]
    kl_nats: float
    """Mean over requests of the divergence from uniform weights."""

    def weights(self, level_P: Int) -> Float:
        """Weights of one request's positions; they sum to 1."""
        weight_P: Float = softmax(gains(level_P, self.chain_lengths) @ np.array(self.multipliers))
        return weight_P


def chain_levels(path_rank_PC: npt.NDArray[np.int32], deepest: int) -> Int:
    """Leading path ranks 0 of every position, at most ``deepest``."""
    level_P: Int = np.logical_and.accumulate(path_rank_PC[:, :deepest] == 0, axis=1).sum(axis=1)
    return level_P


def gains(level_P: Int, chain_lengths: tuple[int, ...]) -> Int:
    """Draft tokens that each chain gains at each position, [P, K]."""
    gain_PK: Int = np.minimum(level_P[:, None], np.array(chain_lengths))
    return gain_PK


def fit_tilt(level_RP: list[Int], share_R: Float, targets: dict[int, float], what: str) -> Tilt:
    """Find the multipliers with which the requests together reach every target.

    Exponential tilting: of all weights with the same mean gains, those nearest to uniform in KL.
    The multipliers are common to all requests, so the spread between requests remains.
    The acceptance length of requests together is tokens over steps, as benchmarks report it, so
    each request counts by its steps: 1 over the mean of ``1 / acceptance length``.

    Args:
        level_RP: levels of the positions of each recorded request, at most the longest chain.
        share_R: share of the tokens that are drawn from each request; the sum is 1.
        targets: acceptance length, bonus token included, by chain length.
        what: what the targets belong to, for messages.

    Raises:
        InputError: naming the first target that no weights can reach along with the ones before.
    """
    lengths = tuple(sorted(targets))
    base_RL = np.stack([np.bincount(one, minlength=lengths[-1] + 1) / one.size for one in level_RP])
    gain_LK = gains(np.arange(lengths[-1] + 1), lengths).astype(np.float64)
    target_K = np.array([targets[length] for length in lengths])
    _require_reachable(base_RL > 0, share_R, gain_LK, targets, what)
    multiplier_K, missing_K = _solve(base_RL, share_R, gain_LK, target_K)
    if np.abs(missing_K).max() > TOLERANCE:
        worst = int(np.abs(missing_K).argmax())
        raise InputError(
            f"{what}: the acceptance length of {lengths[worst]} steps must be {target_K[worst]:g}, "
            f"but the fit stops {abs(missing_K[worst]):.2g} tokens away from it. Record other "
            "requests, or leave the data set out."
        )
    tilted_RL = _tilted(base_RL, gain_LK @ multiplier_K)
    kl = float(share_R @ rel_entr(tilted_RL, base_RL).sum(axis=1))
    return Tilt(lengths, tuple(float(value) for value in multiplier_K), kl)


def draw(rng: np.random.Generator, level_P: Int, weight_P: Float, count: int) -> Int:
    """Draw ``count`` positions of one request by systematic resampling over sorted levels.

    Every level gets its expected number of draws to within one.
    """
    order_P = np.argsort(level_P, kind="stable")
    edge_P = np.cumsum(weight_P[order_P]) * count
    place_N = np.searchsorted(edge_P, np.arange(count) + rng.random(), side="right")
    return order_P[np.minimum(place_N, len(order_P) - 1)].astype(np.int64)


def arrange(rng: np.random.Generator, level_N: Int, chain_lengths: tuple[int, ...]) -> Int:
    """Put drawn positions in random order, [N] indices.

    Of `ORDERS` random permutations it is the one along which chains, walked from the first
    position, find acceptance lengths nearest to those of all drawn positions.
    """
    order_MN = rng.permuted(np.tile(np.arange(len(level_N)), (ORDERS, 1)), axis=1)
    miss_M = np.zeros(ORDERS)
    for length in chain_lengths:
        steps_M, tokens_M = walk(level_N[order_MN], length)
        drawn = 1 + np.minimum(level_N, length).mean()
        miss_M = np.maximum(miss_M, np.abs(tokens_M / steps_M / drawn - 1))
    best_N: Int = order_MN[int(miss_M.argmin())]
    return best_N


def walk(level_MN: Int, length: int) -> tuple[Int, Int]:
    """Steps and tokens of a chain along each row.

    The last step counts in full, with what it emits beyond the end: by Wald's identity tokens over
    steps then has the acceptance length as its expectation, however short the row.
    """
    emitted_MN = np.minimum(level_MN, length) + 1
    rows, columns = emitted_MN.shape
    steps_M = np.zeros(rows, np.int64)
    tokens_M = np.zeros(rows, np.int64)
    while (going_M := tokens_M < columns).any():
        now_M = emitted_MN[np.arange(rows), np.minimum(tokens_M, columns - 1)]
        tokens_M += now_M * going_M
        steps_M += going_M
    return steps_M, tokens_M


def _tilted(base_RL: Float, log_weight_L: Float) -> Float:
    """Shares of the levels within each request after weighting."""
    own_RL = np.where(base_RL > 0, log_weight_L, -np.inf)
    weight_RL = base_RL * np.exp(own_RL - own_RL.max(axis=1, keepdims=True))
    tilted_RL: Float = weight_RL / weight_RL.sum(axis=1, keepdims=True)
    return tilted_RL


def _solve(base_RL: Float, share_R: Float, gain_LK: Float, target_K: Float) -> tuple[Float, Float]:
    """Multipliers, and by how much each acceptance length misses its target with them."""

    def excess(multiplier_K: Float) -> tuple[Float, Float]:
        tilted_RL = _tilted(base_RL, gain_LK @ multiplier_K)
        length_RK = 1 + tilted_RL @ gain_LK
        pooled_K = 1 / (share_R @ (1 / length_RK))
        centred_RLK = gain_LK - (length_RK - 1)[:, None]
        slope_RKJ = np.einsum("rl,rlk,rlj->rkj", tilted_RL, centred_RLK, centred_RLK)
        share_RK = share_R[:, None] * (pooled_K / length_RK) ** 2
        return pooled_K - target_K, np.einsum("rk,rkj->kj", share_RK, slope_RKJ)

    # Each of the two methods finds some solutions that the other one misses.
    starts = (root(excess, np.zeros(len(target_K)), jac=True, method=name) for name in METHODS)
    best_K = min((found.x for found in starts), key=lambda x: float(np.abs(excess(x)[0]).max()))
    return best_K, excess(best_K)[0]


def _require_reachable(
    has_RL: npt.NDArray[np.bool_],
    share_R: Float,
    gain_LK: Float,
    targets: dict[int, float],
    what: str,
) -> None:
    """Refuse targets that no weights on the recorded levels have as mean gains."""
    request_V, level_V = np.nonzero(has_RL)  # one variable per level that a request has
    sums_RV = (request_V == np.arange(len(has_RL))[:, None]).astype(np.float64)
    mean_KV = share_R[request_V] * gain_LK[level_V].T
    target_K = np.array([targets[length] for length in sorted(targets)])
    for k, length in enumerate(sorted(targets)):
        rows_V = np.concatenate([sums_RV, mean_KV[:k]])
        sides = np.concatenate([np.ones(len(has_RL)), target_K[:k] - 1])
        ends = [linprog(sign * mean_KV[k], A_eq=rows_V, b_eq=sides) for sign in (1, -1)]
        low, high = 1 + ends[0].fun, 1 - ends[1].fun
        if not low + MARGIN < target_K[k] < high - MARGIN:
            given = f" with the {k} shorter ones at theirs" if k else ""
            raise InputError(
                f"{what}: the acceptance length of {length} steps must be {target_K[k]:g}, but the "
                f"recorded positions reach {low:.3f} to {high:.3f}{given}. Record other requests, "
                "or leave the data set out."
            )
