"""EAGLE-2/EAGLE-3 trees: grow a beam by path log-probability, keep the best nodes of all layers.

Source: arXiv 2406.16858, 2503.01840 and SafeAILab/EAGLE. Shapes are levels / top_k / nodes with
the root excluded: EAGLE's code ``depth = n`` is n + 1 levels, its ``total_token`` counts the root.
"""

from __future__ import annotations

import torch
from pydantic import Field
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Scheduler, State, StepContext
from echo_policies.forest import Forest


class Rerank(Scheduler):
    """Expands the ``top_k`` best candidates of every layer and verifies the ``nodes`` best of all.

    Ties are broken by depth, then by recorded order, so that parents precede their children.
    """

    levels: int = Field(9, ge=1, le=64, description="drafted depths; EAGLE's code depth plus one")
    top_k: int = Field(10, ge=1, le=64, description="children per node, and nodes per layer")
    nodes: int = Field(59, ge=1, le=4096, description="nodes verified, root excluded")

    @property
    def max_kept(self) -> int | None:
        """The reranked nodes."""
        return self.nodes

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan the full beam."""
        del ctx, memory
        return DraftPlan(self.levels, self.top_k, self.top_k), None

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Expand the ``top_k`` best of the layer."""
        del passed_B
        index_BF = layer.order_BW[:, : self.top_k]
        return state, Frontier(index_BF, layer.exists_BW.gather(1, index_BF))

    def select(self, state: State, forest: Forest) -> Tensor:
        """Keep the ``nodes`` best path log-probabilities of the request."""
        del state
        return best_nodes(forest, self.nodes)


def best_nodes(forest: Forest, nodes: int) -> Tensor:
    """bool [B, N]: the ``nodes`` best candidates of each request, closed under ancestors."""
    if forest.num_candidates <= nodes:
        return forest.exists_BN
    order_BN = torch.sort(forest.path_logp_BN, dim=1, descending=True, stable=True).indices
    keep_BN = torch.zeros_like(forest.exists_BN)
    return keep_BN.scatter_(1, order_BN[:, :nodes], value=True) & forest.exists_BN
