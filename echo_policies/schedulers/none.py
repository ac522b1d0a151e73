"""Plain autoregressive decoding: the row that every comparison starts with."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Scheduler, State, StepContext
from echo_policies.forest import Forest


class NoDraft(Scheduler):
    """Drafts nothing; every step commits one token per request."""

    needs: ClassVar[frozenset[str]] = frozenset()
    respects_k_max: ClassVar[bool] = True

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan no level."""
        del ctx, memory
        return DraftPlan(levels=0), None

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Never called: a plan without levels has no layer."""
        raise NotImplementedError

    def select(self, state: State, forest: Forest) -> Tensor:
        """Keep nothing."""
        del state
        return forest.exists_BN
