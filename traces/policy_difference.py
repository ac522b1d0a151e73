"""What it does to policies that one recording stands in for another at their common positions.

Shape letters: M common positions, B of them in a batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from torch import Tensor

from echo_policies.api import CalibrationContext, Policy
from echo_policies.errors import InputError
from echo_policies.registry import parse_list
from traces.alignment import Alignment
from traces.calibrate import calibration_samples
from traces.positions import agreement, batch_context, drive
from traces.replay import RecordedDrafter, RecordedVerifier, ReplayTables, replay_tables
from traces.schema import Trace

POLICIES: Final = (
    "chain:levels=8",
    "static",
    "eagle3",
    "eagle3_sglang",
    "echo:w_topk=2",
    "dense:w_topk=2",
    "fixed:w_topk=2",
)
"""A representative set: chains, fixed trees, reranked beams, gated budgets."""


@dataclass(frozen=True, slots=True)
class Replaying:
    """How policies are replayed at common positions."""

    positions: int = 2000
    """Most positions, spread evenly over the common ones; 0 takes all."""
    batch_size: int = 16
    """Positions that share a budget, of different requests where there are several."""
    k_per_request: int = 6
    """Candidate nodes per position of that budget."""


@dataclass(frozen=True, slots=True)
class PolicyDifference:
    """What one policy did on both recordings."""

    policy: str
    positions: int
    unrevealed: int
    """Positions at which one recording lacks the children of an expanded node; left out below."""
    plans_differ: int
    accepted_differ: int
    """Other numbers of accepted tokens, of the tokens that both texts have in common."""
    reason: str = ""
    """Why the policy was not replayed, where it was not."""


@dataclass(frozen=True, slots=True, eq=False)
class _Replay:
    """Both recordings and the batches of common positions."""

    tables: tuple[ReplayTables, ReplayTables]
    rows_M: tuple[Tensor, Tensor]
    remaining_M: Tensor
    reach_M: Tensor
    batches: tuple[Tensor, ...]
    """Indices of common positions, int64 [B] each."""
    k_per_request: int


def policy_differences(
    one: Trace,
    other: Trace,
    alignment: Alignment,
    specs: Sequence[str] | None = None,
    replaying: Replaying | None = None,
) -> tuple[PolicyDifference, ...]:
    """Replay policies on both recordings at common positions.

    Args:
        one: a valid trace; gates are fitted on its calibration requests, for both.
        other: a valid trace.
        alignment: of the two.
        specs: policies; by default `POLICIES`, of which those that the recordings cannot serve
            are returned with the reason.
        replaying: positions, batches and budget.

    Raises:
        InputError: a policy that was asked for does not exist, cannot be calibrated on the first
            trace, or cannot be served by the recordings.
    """
    replaying = replaying or Replaying()
    replay = _replay(one, other, alignment, replaying)
    samples = None
    found = []
    for policy in parse_list(specs or POLICIES):
        try:
            fitted = policy
            if not policy.is_calibrated:
                samples = samples or calibration_samples(one, one.split("calibration"))
                fitted = policy.calibrate(samples, _calibration_context(replaying))
            found.append(_difference(fitted, replay))
        except InputError as error:
            if specs:
                raise
            found.append(PolicyDifference(policy.name, 0, 0, 0, 0, str(error)))
    return tuple(found)


def _calibration_context(replaying: Replaying) -> CalibrationContext:
    k_max = replaying.batch_size * replaying.k_per_request
    return CalibrationContext(replaying.batch_size, k_max)


def _replay(one: Trace, other: Trace, alignment: Alignment, replaying: Replaying) -> _Replay:
    limits = [
        min(one.header.requests[p.index_one].max_new_tokens, other_limit)
        for p in alignment.pairs
        for other_limit in [other.header.requests[p.index_other].max_new_tokens]
    ]
    limit_M = np.array(limits, np.int64)[alignment.pair_M]
    return _Replay(
        tables=(replay_tables(one), replay_tables(other)),
        rows_M=(torch.from_numpy(alignment.row_one_M), torch.from_numpy(alignment.row_other_M)),
        remaining_M=torch.from_numpy(limit_M - 1 - alignment.offset_M),
        reach_M=torch.from_numpy(alignment.reach_M),
        batches=tuple(_batches(alignment, replaying)),
        k_per_request=replaying.k_per_request,
    )


def _batches(alignment: Alignment, replaying: Replaying) -> Iterator[Tensor]:
    """Positions at about the same place of several outputs, together."""
    order_M = np.lexsort((alignment.pair_M, alignment.offset_M))
    size = replaying.positions or order_M.size
    if order_M.size > size:
        order_M = order_M[np.linspace(0, order_M.size - 1, size).astype(np.int64)]
    for start in range(0, order_M.size, replaying.batch_size):
        yield torch.from_numpy(order_M[start : start + replaying.batch_size])


def _difference(policy: Policy, replay: _Replay) -> PolicyDifference:
    counts = np.zeros(4, np.int64)
    with torch.inference_mode():
        one, other = (RecordedDrafter(tables) for tables in replay.tables)
        for batch_B in replay.batches:
            ctx = batch_context(replay.remaining_M[batch_B], replay.k_per_request)
            one.seek(replay.rows_M[0][batch_B])
            other.seek(replay.rows_M[1][batch_B])
            outcome = drive(policy, one, RecordedVerifier(one), ctx)
            outcome_other = drive(policy, other, RecordedVerifier(other), ctx)
            revealed_B = (one.unrevealed_B == 0) & (other.unrevealed_B == 0)
            reach_B = replay.reach_M[batch_B]
            counts += agreement(outcome, outcome_other, revealed_B, reach_B).counts()
    positions, unrevealed, plans, accepted = (int(count) for count in counts)
    return PolicyDifference(policy.name, positions, unrevealed, plans, accepted)
