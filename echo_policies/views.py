"""The values that pass between an engine and a policy within a step; nobody modifies them.

Shape letters: B requests (slots of the batch), W candidates of one layer, F frontier nodes,
N candidates of a whole forest. The root (last committed token) has depth 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

if TYPE_CHECKING:
    from echo_policies.template import RankTemplate


class CostView(Protocol):
    """What a policy may know of costs, in seconds; host numbers, so no sync."""

    def verify_s(self, rows: int) -> float:
        """Seconds of a verify forward over ``rows`` tokens at the present batch and context."""
        ...

    def draft_layer_s(self, rows: int) -> float:
        """Seconds of one draft layer over ``rows`` frontier nodes."""
        ...


@dataclass(frozen=True, slots=True)
class StepContext:
    """What a scheduler may know at the start of a step."""

    k_max: int
    """Candidate nodes the batch may verify in this step, roots excluded."""
    step: int
    """Step number of the run, from 0."""
    live_B: Tensor
    """bool [B]: the slot holds a request."""
    remaining_B: Tensor
    """int64 [B]: tokens left of ``max_new_tokens``, at least 1 where live."""
    arrival_B: Tensor
    """int64 [B]: arrival number of the request, for first-come orders."""
    level_limit: int = 1 << 30
    """Largest of ``level_cap_B``, as a host number: engines know the lengths of their outputs."""
    num_live: int | None = None
    """Requests in the batch, as a host number; None where the engine does not know it."""
    costs: CostView | None = None
    remaining: tuple[int, ...] = ()
    """``remaining_B`` as host numbers; empty where the engine does not know them."""
    unread: tuple[int, ...] = ()
    """Tokens by slot that a draft model must read before it can draft; empty where nobody is
    behind, as in a replay."""
    looks_up: bool = False
    """The drafter looks its candidates up where it can, and asks a draft model elsewhere."""

    @property
    def level_cap_B(self) -> Tensor:
        """int64 [B]: levels worth drafting; r tokens left leave room for r - 1 drafts."""
        return torch.where(self.live_B, self.remaining_B - 1, 0)


@dataclass(frozen=True, slots=True)
class DraftPlan:
    """What a scheduler asks the drafter for; host numbers only, so that shapes are fixed."""

    levels: int
    """Depths 1 .. levels are drafted; 0 is plain decoding."""
    top_k: int = 1
    """Children revealed per expanded node."""
    width: int = 1
    """Most nodes of one request that are expanded per layer, F."""
    template: RankTemplate | None = None
    """A fixed tree by ranks; the layers then carry no scores."""
    model_levels: int | None = None
    """Depths at which a drafter that looks up may ask its model; None leaves it to the drafter."""
    model_slots: frozenset[int] | None = None
    """Slots that a draft model may run for; None: all of them."""

    @property
    def is_chain(self) -> bool:
        """Whether the draft of a request can only be a chain."""
        if self.template is not None:
            return self.template.is_chain
        return self.top_k == 1 and self.width == 1


@dataclass(frozen=True, eq=False)
class LayerView:
    """The candidates of one depth, as a policy sees them; padded, never modified.

    Candidates of a parent lie together in rank order; parents in frontier order.
    """

    depth: int
    exists_BW: Tensor
    """bool [B, W]: the candidate is there."""
    parent_BW: Tensor | None
    """int64 [B, W]: index into the previous layer's candidates; None at depth 1."""
    path_logp_BW: Tensor | None
    """float32 [B, W]: path log-probability, -inf where absent; None for a template's layers."""
    is_sorted: bool = False
    """The candidates of every request are already in score order (one parent each)."""
    entropy_BF: Tensor | None = None
    """float32 [B, F]: entropy (nats) of the distribution at every node that was expanded for this
    layer, the root at depth 1; only for policies that need the signal ``entropy``."""

    @property
    def width(self) -> int:
        """Candidates per request, W."""
        return self.exists_BW.shape[1]

    @property
    def scores_BW(self) -> Tensor:
        """``path_logp_BW`` of a layer that has scores."""
        assert self.path_logp_BW is not None, "a template's layers carry no scores"
        return self.path_logp_BW

    @cached_property
    def best_B(self) -> Tensor:
        """float32 [B]: largest path log-probability; exp of it is c of the ECHO paper (Eq. 6)."""
        return self.scores_BW[:, 0] if self.is_sorted else self.scores_BW.amax(1)

    @cached_property
    def mass_B(self) -> Tensor:
        """float32 [B]: log-sum-exp of the path log-probabilities."""
        return torch.logsumexp(self.scores_BW, 1)

    @cached_property
    def num_candidates_B(self) -> Tensor:
        """int64 [B]: candidates that are there."""
        return self.exists_BW.sum(1)

    @cached_property
    def order_BW(self) -> Tensor:
        """int64 [B, W]: candidate indices by (score descending, index ascending)."""
        if self.is_sorted:
            return torch.arange(self.width, device=self.exists_BW.device).expand_as(self.exists_BW)
        return torch.sort(self.scores_BW, dim=1, descending=True, stable=True).indices

    @cached_property
    def place_BW(self) -> Tensor:
        """int64 [B, W]: place of every candidate in :attr:`order_BW`, from 0."""
        if self.is_sorted:
            return self.order_BW
        places = torch.arange(self.width, device=self.exists_BW.device).expand_as(self.exists_BW)
        return torch.empty_like(self.order_BW).scatter_(1, self.order_BW, places)


@dataclass(frozen=True, slots=True)
class Frontier:
    """Nodes of one layer that are expanded next."""

    index_BF: Tensor
    """int64 [B, F]: candidate indices; any valid index where masked out."""
    mask_BF: Tensor
    """bool [B, F]: the entry counts."""


@dataclass(frozen=True, slots=True)
class ModelDepth:
    """What a draft model proposed at one depth, over all requests: host numbers."""

    asked: int = 0
    """Requests for which it proposed anything."""
    verified: int = 0
    """Nodes of its own that were verified."""
    accepted: int = 0
    """Those of them that were accepted."""


@dataclass(frozen=True, slots=True)
class Feedback:
    """What a step showed, for schedulers that learn."""

    accepted_B: Tensor
    """int64 [B]: accepted draft tokens that were emitted."""
    keep_BN: Tensor
    """bool [B, N]: the enforced plan."""
    live_B: Tensor
    draft_s: float
    verify_s: float
    step_s: float
    prefill_s: float = 0.0
    """Of the step's seconds those that prompts took."""
    costs: CostView | None = None
    """What the policy was told of costs when the step began."""
    plan: DraftPlan | None = None
    """What was asked of the drafter; None where an engine does not say."""
    num_live: int = 0
    """Requests that took part. This and what follows are host numbers: an engine that has
    committed a step knows them, so looking at them is no sync."""
    num_accepted: int = 0
    """Sum of ``accepted_B``."""
    num_verified: int = 0
    """Candidate nodes verified, K."""
    promised: float = 0.0
    """Of them, how many were to be accepted by their scores; counted only for schedulers
    that weigh costs."""
    has_drafted: bool = False
    """Whether there was anything drafted, by whatever drafter."""
    draft_layers: int = 0
    """Draft layers that ran, as a forward of a draft model; a lookup runs none."""
    model: tuple[ModelDepth, ...] = ()
    """What became of a draft model's proposals, by depth; counted likewise."""
