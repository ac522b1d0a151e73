"""Policies at single positions: a batch of them sharing a budget, and whether plans agree.

Used where the same policy is driven on two drafters at the same positions: two recordings, or a
recording and the model that it was made from. Shape letters: B positions (the batch), W candidates
of a layer, N of all layers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from echo_policies.api import Policy, StepContext
from echo_policies.session import Decision, Drafter, Verifier, open_session

RANK_BITS: Final = 20
"""Bits of a rank in a node's key; a node has far fewer children than 2^20."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """What a policy did at a batch of positions."""

    decision: Decision
    accepted_B: Tensor
    """int64 [B]"""


@dataclass(frozen=True, slots=True, eq=False)
class Agreement:
    """Where two outcomes of one policy differ."""

    revealed_B: Tensor
    """bool [B]: the children of every expanded node are known; only there the rest counts."""
    plan_differs_B: Tensor
    """bool [B]: other nodes are verified."""
    accepted_differs_B: Tensor
    """bool [B]"""

    def counts(self) -> tuple[int, int, int, int]:
        """Positions, those with unrevealed nodes, and of the others: plans, accepted lengths."""
        hidden_B = ~self.revealed_B
        masks = hidden_B, self.plan_differs_B, self.accepted_differs_B
        unrevealed, plans, accepted = (int(mask.sum()) for mask in masks)
        return hidden_B.numel(), unrevealed, plans, accepted


def batch_context(remaining_B: Tensor, k_per_request: int) -> StepContext:
    """A first step of a full batch.

    Args:
        remaining_B: int64 [B], tokens left of ``max_new_tokens``, at least 1.
        k_per_request: candidate nodes per position that the batch shares.
    """
    size = remaining_B.numel()
    return StepContext(
        k_max=k_per_request * size,
        step=0,
        live_B=torch.ones(size, dtype=torch.bool),
        remaining_B=remaining_B,
        arrival_B=torch.arange(size),
        level_limit=int(remaining_B.max()) - 1,
        num_live=size,
    )


def drive(policy: Policy, drafter: Drafter, verifier: Verifier, ctx: StepContext) -> Outcome:
    """Take one step with a drafter that was placed at the positions.

    Raises:
        SignalError: the drafter cannot serve the policy.
        InputError: the policy is not calibrated.
    """
    decision = open_session(policy, drafter).decide(ctx, policy.scheduler.start())
    return Outcome(decision, verifier.verify(decision.forest, decision.keep_BN))


def agreement(
    one: Outcome, other: Outcome, revealed_B: Tensor, reach_B: Tensor | None = None
) -> Agreement:
    """Compare two outcomes at the same positions.

    Args:
        one: what the policy did on one drafter.
        other: what it did on the other.
        revealed_B: bool [B], positions at which both know every child.
        reach_B: int64 [B], levels at which the target's tokens are the same for both; what is
            accepted beyond them is left out. All levels by default.
    """
    accepted = one.accepted_B, other.accepted_B
    if reach_B is not None:
        accepted = torch.minimum(accepted[0], reach_B), torch.minimum(accepted[1], reach_B)
    return Agreement(
        revealed_B=revealed_B,
        plan_differs_B=plans_differ(one.decision, other.decision) & revealed_B,
        accepted_differs_B=(accepted[0] != accepted[1]) & revealed_B,
    )


def plans_differ(one: Decision, other: Decision) -> Tensor:
    """bool [B]: the verified nodes differ, as paths of ranks from the root.

    Frontier order does not count: a node is its path, wherever it lies among the candidates.
    """
    decisions = one, other
    kept = [decision.forest.split(decision.keep_BN) for decision in decisions]
    size = one.keep_BN.shape[0]
    differs_B = torch.zeros(size, dtype=torch.bool)
    above = [torch.zeros((size, 0), dtype=torch.int64) for _ in decisions]
    for depth in range(1, max(map(len, kept)) + 1):
        if depth > min(map(len, kept)):
            longer = max(kept, key=len)
            differs_B = differs_B | longer[depth - 1].any(1)
            continue
        nodes = [_path_keys(d, depth, ids) for d, ids in zip(decisions, above, strict=True)]
        ids_BX, count = _numbered(torch.cat(nodes, dim=1))
        above = list(torch.split(ids_BX, [part.shape[1] for part in nodes], dim=1))
        held = [
            torch.zeros((size, count), dtype=torch.int64).scatter_add_(
                1, ids, keep[depth - 1].long()
            )
            for ids, keep in zip(above, kept, strict=True)
        ]
        differs_B = differs_B | (held[0] != held[1]).any(1)
    return differs_B


def _path_keys(decision: Decision, depth: int, above_BW: Tensor) -> Tensor:
    """int64 [B, W]: a number per candidate, equal where parents' numbers and ranks are equal."""
    layer, tree = decision.forest.layers[depth - 1], decision.plan.template
    if tree is not None:
        rank_W = torch.tensor(tree.ranks[tree.layers[depth - 1]])
    else:
        rank_W = torch.arange(layer.width)
        rank_W = rank_W % decision.plan.top_k if depth > 1 else rank_W
    rank_BW = rank_W.expand_as(layer.exists_BW)
    if layer.parent_BW is None:
        return rank_BW
    return (above_BW.gather(1, layer.parent_BW) << RANK_BITS) + rank_BW


def _numbered(keys_BX: Tensor) -> tuple[Tensor, int]:
    """Replace keys by numbers from 0, so that they do not grow with depth."""
    values, ids_BX = torch.unique(keys_BX, return_inverse=True)
    return ids_BX, values.numel()
