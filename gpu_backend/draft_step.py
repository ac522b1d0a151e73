"""What every drafter remembers of the step in flight.

Shape letters: B slots of the batch, F expanded nodes of a layer, W candidates of a layer,
N candidates of all layers.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from gpu_backend.candidates import Children, candidates

IntArray = npt.NDArray[np.int64]


class DraftStep:
    """A step's plan, its candidates' tokens, and what was revealed of whom.

    Attributes:
        plan: of the step.
        token_layers: token ids [B, W] of the candidates of every depth.
        revealed: children of the step's expansions, the roots' first, and which nodes were
            expanded.
        model_layers: which candidates of every depth a model proposed, bool [B, W].
    """

    def __init__(self, num_slots: int) -> None:
        """Start before the first step."""
        self._num_slots = num_slots
        self.start(DraftPlan(levels=0))

    def start(self, plan: DraftPlan) -> None:
        """Forget the step before."""
        self.plan = plan
        self.token_layers: list[IntArray] = []
        self.revealed: list[tuple[Children, Frontier | None]] = []
        self.model_layers: list[Tensor] = []
        self._place_BW = np.zeros((self._num_slots, 0), dtype=np.int64)

    def reveal(
        self,
        children: Children,
        by_model_BF: Tensor,
        layer: LayerView | None = None,
        frontier: Frontier | None = None,
    ) -> LayerView:
        """Lay out the children of a frontier's nodes as the next depth, and remember them.

        Args:
            children: of the nodes, in the frontier's places.
            by_model_BF: whether a model proposed them.
            layer: that the frontier is of; None for the roots' children.
            frontier: the expanded nodes; None for the roots.
        """
        layout = candidates(self.plan, children, layer, frontier)
        self.revealed.append((children, frontier))
        self.token_layers.append(layout.token_BW.cpu().numpy())
        self.model_layers.append(by_model_BF.gather(1, layout.place_BW))
        self._place_BW = layout.place_BW.cpu().numpy()
        return layout.view

    def parents(self, index_BF: IntArray) -> IntArray:
        """Which of the newest expanded nodes each of these candidates is a child of: [B, F]."""
        return np.take_along_axis(self._place_BW, index_BF, axis=1)

    def tokens(self) -> IntArray:
        """Token ids [B, N] of the step's candidates."""
        return np.concatenate(self.token_layers, axis=1)


class StepDrafter:
    """What a drafter says of its step in flight.

    Attributes:
        step: the plan and what it has revealed so far.
    """

    step: DraftStep

    @property
    def signals(self) -> frozenset[str]:
        """Ranks, path log-probabilities and entropies."""
        return frozenset({"ranks", "path_logp", "entropy"})

    @property
    def token_layers(self) -> list[IntArray]:
        """Token ids [B, W] of the candidates of every depth of this step."""
        return self.step.token_layers

    @property
    def revealed(self) -> list[tuple[Children, Frontier | None]]:
        """Children of this step's expansions, the roots' first, and which nodes were expanded."""
        return self.step.revealed

    @property
    def model_layers(self) -> list[Tensor]:
        """Which candidates of every depth a model proposed, bool [B, W]."""
        return self.step.model_layers

    def tokens(self) -> IntArray:
        """Token ids [B, N] of the step's candidates."""
        return self.step.tokens()
