"""What a step may buy, and at what price: forwards and rows, in tokens.

Shape letters: G sizes of a verify batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import Final

import torch
from torch import Tensor

from echo_policies.views import CostView

ALL_SIZES_UP_TO: Final = 16
"""Verify batches of up to so many nodes are all weighed; beyond, sizes grow by a quarter."""


@dataclass(frozen=True, slots=True)
class Market:
    """What time costs in this step, in tokens."""

    costs: CostView
    live: int
    price: float
    """Tokens that a second must earn."""

    @classmethod
    def of(cls, costs: CostView, live: int, gain: float) -> Market:
        """Prices of a batch.

        Args:
            costs: seconds.
            live: requests in the batch.
            gain: what a second earns, in what plain decoding earns in it.
        """
        plain_s = costs.verify_s(live)
        return cls(costs, live, gain * live / plain_s if plain_s > 0 else math.inf)

    def nodes(self, count: int) -> float:
        """Price of verifying so many nodes beside the roots."""
        costs, live = self.costs, self.live
        return self.price * (costs.verify_s(live + count) - costs.verify_s(live))

    def layer(self, rows: int) -> float:
        """Price of one draft layer."""
        return self.price * self.costs.draft_layer_s(rows)


@dataclass(frozen=True, slots=True)
class Offer:
    """The verify batches to choose from, and the least score that any node can be worth."""

    nodes_G: Tensor
    """int64 [G], ascending from 0."""
    price_G: Tensor
    """float32 [G]"""
    floor: float
    """Log-probability."""

    @classmethod
    def of(cls, market: Market, most: int, markup: float, device: torch.device) -> Offer:
        """Price verify batches.

        Args:
            market: of the step.
            most: nodes that there can be.
            markup: times what nodes cost, what they must promise.
            device: of the tensors.
        """
        sizes = _sizes(most)
        prices = [markup * market.nodes(count) for count in sizes]
        steps = zip(pairwise(sizes), pairwise(prices), strict=True)
        cheapest = min((after - before) / (to - since) for (since, to), (before, after) in steps)
        return cls(
            torch.tensor(sizes, device=device),
            torch.tensor(prices, device=device),
            math.log(cheapest) if cheapest > 0 else -math.inf,
        )


def _sizes(most: int) -> list[int]:
    """Verify batches that are weighed, in nodes."""
    sizes = list(range(min(most, ALL_SIZES_UP_TO) + 1))
    while sizes[-1] < most:
        sizes.append(min(most, sizes[-1] + sizes[-1] // 4))
    return sizes
