"""Prompt lookup where the text repeats itself, the draft model elsewhere: node by node.

A node is *looked up* where the last ``match`` tokens at its end stood earlier in the request's
text, which costs nothing. Else the *draft model* is asked, if it has run the node's whole branch
and the children are within the first ``model_levels`` depths. Else the draft ends there. So a
chain may go on by lookup from what the model began; where a root is looked up no forward of the
draft runs for the request at all, and the model reads what it is behind when it is asked next.

Shape letters: B slots of the batch, F expanded nodes of a layer, W candidates of a layer,
N candidates of all layers, k children.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from gpu_backend.candidates import Children
from gpu_backend.draft_step import StepDrafter
from gpu_backend.lookup_drafter import LookupDrafter
from gpu_backend.prompt_lookup import MATCH, MODEL_LEVELS
from gpu_backend.ragged_pool import Extension
from gpu_backend.tree_drafter import TreeDrafter
from traces.lookup_plans import lookup_objection


class CombinedDrafter(StepDrafter):
    """Drafts for every slot of a batch from its own text or from a model.

    Who proposes is decided by tokens alone, so a run is deterministic. Log-probabilities are those
    of whoever proposes: each is a share of everything that may follow, rounded to float16.
    """

    def __init__(
        self,
        lookup: LookupDrafter,
        model: TreeDrafter,
        *,
        match: int = MATCH,
        model_levels: int = MODEL_LEVELS,
    ) -> None:
        """Bind both sources, made for the same batch.

        Args:
            lookup: proposes where the text repeats itself.
            model: proposes elsewhere.
            match: tokens that make a repetition, at least 1.
            model_levels: depths that the model proposes, at least 1.
        """
        self._lookup = lookup
        self._model = model
        self._match = match
        self._model_levels = model_levels
        # One step for all three: either source goes on from what the other one proposed.
        self.step = model.step = lookup.step
        self._ran_BF = torch.zeros((0, 1), dtype=torch.bool)
        """Which of the newest expanded nodes the model has run."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Features of the target that the model reads."""
        return self._model.taps

    @property
    def num_forwards(self) -> int:
        """Layers of this step that the model ran for."""
        return self._model.num_forwards

    def objection(self, plan: DraftPlan) -> str | None:
        """Refuse fixed trees other than chains, and what the model has no room for."""
        return lookup_objection(plan) or self._model.objection(plan)

    def require_room(self, num_tokens: int) -> None:
        """Refuse a request that the draft's positions or its pool cannot hold."""
        self._model.require_room(num_tokens)

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Reserve the model's room and start a text."""
        return self._model.admit(slot, num_tokens) and self._lookup.admit(slot, num_tokens)

    def read(
        self,
        chunks: Sequence[Extension],
        features: Sequence[Tensor] | None = None,
        *,
        can_wait: bool = False,
    ) -> None:
        """Read and index prompt tokens."""
        self._model.read(chunks, features, can_wait=can_wait)
        self._lookup.read(chunks)

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Index emitted tokens, which the model reads when it is asked next."""
        self._model.commit(slot, tokens, features)
        self._lookup.commit(slot, tokens)

    def release(self, slot: int) -> None:
        """Forget a request."""
        self._model.release(slot)
        self._lookup.release(slot)

    def check_integrity(self, slots: Sequence[int]) -> None:
        """Check both sources."""
        self._model.check_integrity(slots)
        self._lookup.check_integrity(slots)

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Look up what follows each text, or ask the model."""
        self._lookup.start(plan)
        looked_BF = self._lookup.matches(drafting_B[:, None], self._match)
        self._ran_BF = drafting_B[:, None] & ~looked_BF
        of_model = self._model.roots(plan, self._ran_BF[:, 0])
        return self.step.reveal(_merged(looked_BF, self._lookup.look_up(looked_BF), of_model))

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Return the children of the frontier's nodes, each from its own source."""
        self._lookup.descend(frontier)
        looked_BF = self._lookup.matches(frontier.mask_BF, self._match)
        parent_BF = torch.from_numpy(self.step.parents(frontier.index_BF.cpu().numpy()))
        ran_BF = self._ran_BF.gather(1, parent_BF.to(looked_BF.device))
        runs_BF = ran_BF & frontier.mask_BF & ~looked_BF
        self._ran_BF = runs_BF & (layer.depth < self._model_levels)
        of_model = self._model.grow(layer, Frontier(frontier.index_BF, self._ran_BF))
        children = _merged(looked_BF, self._lookup.look_up(looked_BF), of_model)
        return self.step.reveal(children, layer, frontier)


def _merged(looked_BF: Tensor, lookup: Children, model: Children) -> Children:
    """Children of the lookup where its nodes are, of the model elsewhere."""
    each_BF1 = looked_BF[..., None]
    return Children(
        torch.where(each_BF1, lookup.token_BFk, model.token_BFk),
        torch.where(each_BF1, lookup.logp_BFk, model.logp_BFk),
        torch.where(looked_BF, lookup.entropy_BF, model.entropy_BF),
    )
