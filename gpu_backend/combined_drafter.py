"""Prompt lookup where the text repeats itself, the draft model elsewhere: node by node.

A lookup costs nothing, so every node is looked up. Where its best child has at least the
probability ``confidence``, that is the answer. Else the *draft model* is asked, if the plan lets it
run for the request, it has run the node's whole branch and the children are within the first
``model_levels`` depths. Else the draft ends there; for a request that the model must not run for,
whatever was found counts. So a chain may go on by lookup from what the model began; where a root's
lookup is confident no forward of the draft runs for the request at all, and the model reads what it
is behind when it is asked next.

Shape letters: B slots of the batch, F expanded nodes of a layer, W candidates of a layer,
N candidates of all layers, k children.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from gpu_backend.candidates import Children
from gpu_backend.draft_step import StepDrafter
from gpu_backend.lookup_drafter import LookupDrafter
from gpu_backend.prompt_lookup import CONFIDENCE, MODEL_LEVELS
from gpu_backend.ragged_pool import Extension
from gpu_backend.tree_drafter import TreeDrafter, slots_asked
from traces.lookup_plans import lookup_objection


class CombinedDrafter(StepDrafter):
    """Drafts for every slot of a batch from its own text or from a model.

    Log-probabilities are those of whoever proposes: each is a share of everything that may follow,
    rounded to float16.
    """

    looks_up: bool = True
    """Where it can."""

    def __init__(
        self,
        lookup: LookupDrafter,
        model: TreeDrafter,
        *,
        confidence: float = CONFIDENCE,
        model_levels: int = MODEL_LEVELS,
    ) -> None:
        """Bind both sources, made for the same batch.

        Args:
            lookup: proposes where the text repeats itself.
            model: proposes elsewhere.
            confidence: probability of the best that was found, for which no model is asked.
            model_levels: depths that the model proposes where the plan does not say.
        """
        self._lookup = lookup
        self._model = model
        self._least_logp = math.log(confidence)
        self._model_levels = model_levels
        # One step for all three: either source goes on from what the other one proposed.
        self.step = model.step = lookup.step
        self._asked_B = torch.zeros(0, dtype=torch.bool)
        """Requests that the model may run for in this step."""
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

    @property
    def unread(self) -> tuple[int, ...]:
        """Tokens by slot that the model has not read yet."""
        return self._model.unread

    def objection(self, plan: DraftPlan) -> str | None:
        """Refuse fixed trees other than chains, and what the model has no room for."""
        return lookup_objection(plan) or self._model.objection(plan)

    def require_room(self, num_tokens: int) -> None:
        """Refuse a request that the draft's positions or its pool cannot hold."""
        self._model.require_room(num_tokens)

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Reserve the model's room and start a text."""
        return self._model.admit(slot, num_tokens) and self._lookup.admit(slot, num_tokens)

    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None = None) -> None:
        """Index prompt tokens, and let the model take them in."""
        self._model.read(chunks, features)
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
        self._asked_B = slots_asked(plan, drafting_B) & (self._most_levels(plan) > 0)
        found = self._lookup.look_up(drafting_B[:, None])
        self._ran_BF = (drafting_B & self._asked_B)[:, None] & ~self._is_sure(found)
        of_model = self._model.roots(plan, self._ran_BF[:, 0])
        return self.step.reveal(self._answer(found, of_model), self._ran_BF)

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Return the children of the frontier's nodes, each from its own source."""
        self._lookup.descend(frontier)
        found = self._lookup.look_up(frontier.mask_BF)
        parent_BF = torch.from_numpy(self.step.parents(frontier.index_BF.cpu().numpy()))
        ran_BF = self._ran_BF.gather(1, parent_BF.to(self._ran_BF.device))
        is_within = layer.depth < self._most_levels(self.step.plan)
        self._ran_BF = ran_BF & frontier.mask_BF & ~self._is_sure(found) & is_within
        of_model = self._model.grow(layer, Frontier(frontier.index_BF, self._ran_BF))
        return self.step.reveal(self._answer(found, of_model), self._ran_BF, layer, frontier)

    def _most_levels(self, plan: DraftPlan) -> int:
        return self._model_levels if plan.model_levels is None else plan.model_levels

    def _is_sure(self, found: Children) -> Tensor:
        """bool [B, F]: nodes for whose children no model is asked."""
        return found.logp_BFk[..., 0] >= self._least_logp

    def _answer(self, found: Children, of_model: Children) -> Children:
        """Children by the model where it ran, else of the lookup where they count."""
        counts_BF = self._is_sure(found) | ~self._asked_B[:, None]
        return _merged(self._ran_BF, of_model, counts_BF, found)


def _merged(ran_BF: Tensor, of_model: Children, counts_BF: Tensor, found: Children) -> Children:
    """Children of the model where it ran, of the lookup elsewhere, as far as they count."""
    ran_BF1, counts_BF1 = ran_BF[..., None], counts_BF[..., None]
    logp_BFk = found.logp_BFk.masked_fill(~counts_BF1, -torch.inf)
    return Children(
        torch.where(ran_BF1, of_model.token_BFk, found.token_BFk),
        torch.where(ran_BF1, of_model.logp_BFk, logp_BFk),
        torch.where(ran_BF, of_model.entropy_BF, found.entropy_BF),
    )
