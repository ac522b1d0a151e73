"""Sharing a budget between requests in an order, on the device and without a sync.

Shape letters: B requests, R rounds.
"""

from __future__ import annotations

import torch
from torch import Tensor


def grant_in_order(
    demand_B: Tensor, order_B: Tensor, budget: Tensor, *, limit: int, quantum: int
) -> Tensor:
    """Grant nodes to requests in an order until the budget is used up.

    In every round each request, in order, takes up to ``quantum`` of what it still demands.

    Args:
        demand_B: int64 [B], each at most ``limit``; not modified.
        order_B: int64 [B], a permutation of the requests: who is served first.
        budget: int64 scalar tensor.
        limit: largest possible demand, a host number that fixes the number of rounds.
        quantum: most nodes a request takes per turn.

    Returns:
        int64 [B]: nodes granted, between 0 and ``demand_B``, in sum at most ``budget``.
    """
    turn_B = demand_B[order_B]
    num_rounds = max(1, -(-limit // quantum))
    if num_rounds > 1:
        start_R = torch.arange(num_rounds, device=demand_B.device) * quantum
        turn_R = (turn_B - start_R[:, None]).clamp_(0, quantum).reshape(-1)
    else:
        turn_R = turn_B
    left_R = (budget - turn_R.cumsum(0)).add_(turn_R).clamp_(min=0)
    granted_B = torch.minimum(turn_R, left_R)
    if num_rounds > 1:
        granted_B = granted_B.reshape(num_rounds, -1).sum(0)
    return torch.empty_like(granted_B).scatter_(0, order_B, granted_B)


def descending(key_B: Tensor) -> Tensor:
    """int64 [B]: requests by key, largest first, ties by slot."""
    return torch.sort(key_B, descending=True, stable=True).indices


def ascending(key_B: Tensor) -> Tensor:
    """int64 [B]: requests by key, smallest first, ties by slot."""
    return torch.sort(key_B, stable=True).indices


def rotating(live_B: Tensor, step: int) -> Tensor:
    """int64 [B]: live slots in turn, the first one moving on by one with every step."""
    num_live = live_B.sum().clamp_(min=1)
    turn_B = (live_B.cumsum(0) - 1 - step) % num_live
    return ascending(turn_B.masked_fill(~live_B, live_B.shape[0]))
