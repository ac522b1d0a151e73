"""Fixed trees by ranks: chains, Medusa's and EAGLE-1's trees, trees of the user's own.

Source: arXiv 2211.17192 (chains), 2401.10774 (Medusa), 2401.15077 (EAGLE-1).
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, PrivateAttr, field_validator
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Scheduler, State, StepContext
from echo_policies.errors import InputError, UnknownNameError
from echo_policies.forest import Forest
from echo_policies.template import NAMED_TREES, RankTemplate, parse_tree


class _Template(Scheduler):
    """Verifies a fixed tree whatever the draft model thinks of it; blind, so nothing leaks."""

    needs: ClassVar[frozenset[str]] = frozenset({"ranks"})
    _template: RankTemplate = PrivateAttr()

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan the whole template; the state is what is expanded of each layer."""
        del memory
        tree = self._template
        plan = DraftPlan(tree.levels, max(tree.ranks) + 1, max(tree.expanded), tree)
        return plan, tree.expanded_in_layers(ctx.live_B.device)

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Expand whatever has children in the template."""
        del passed_B
        if layer.depth >= self._template.levels:
            empty_BF = layer.exists_BW[:, :0]
            return state, Frontier(empty_BF.long(), empty_BF)
        index_F = state[layer.depth - 1]
        index_BF = index_F.expand(layer.exists_BW.shape[0], -1)
        return state, Frontier(index_BF, layer.exists_BW[:, index_F])

    def select(self, state: State, forest: Forest) -> Tensor:
        """Keep every node."""
        del state
        return forest.exists_BN


class StaticTree(_Template):
    """A published tree or a list of rank paths."""

    tree: str = Field(
        "medusa63", description="medusa63, eagle25, or rank paths such as 0/1/00/01 (0/0.12)"
    )

    @field_validator("tree")
    @classmethod
    def _tree_is_known(cls, tree: str) -> str:
        _lookup(tree)
        return tree

    def model_post_init(self, context: object, /) -> None:
        """Resolve the tree."""
        self._template = _lookup(self.tree)


class Chain(_Template):
    """The greedy chain of ``levels`` tokens."""

    levels: int = Field(4, ge=0, le=64, description="drafted tokens; 0 is plain decoding")

    def model_post_init(self, context: object, /) -> None:
        """Build the chain; a chain of no level plans nothing."""
        self._template = RankTemplate.chain(max(self.levels, 1))

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan the chain."""
        if self.levels == 0:
            return DraftPlan(levels=0), None
        return super().begin(ctx, memory)


def _lookup(tree: str) -> RankTemplate:
    if tree in NAMED_TREES:
        return NAMED_TREES[tree]
    try:
        return parse_tree(tree)
    except InputError:
        if any(letter.isalpha() for letter in tree):
            raise UnknownNameError("static tree", tree, NAMED_TREES) from None
        raise
