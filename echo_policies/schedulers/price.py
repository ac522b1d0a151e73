"""Buys draft tokens while they are worth their price.

What counts over a run is tokens per second, a ratio. Among all rules the one that maximises it
maximises ``tokens - price * seconds`` in every step, where the price of a second is the throughput
that is achieved (W. Dinkelbach, 1967, Management Science 13:492). So a node is verified if the
probability that it is accepted is worth the time its row takes, a depth is drafted if what it adds
is worth its forward, and where nothing is, the step is plain decoding: no probing, no budget.

With constant acceptance the rule for depths is SmartSpec's goodput (arXiv 2406.14066); the rule for
nodes is the one of DSpark (arXiv 2607.05147, Algorithm 1), with the long-run price in the place of
the step's own. Scores are taken at their word, so they should be calibrated.

Shape letters: B requests, N candidates of a request, F frontier nodes, G sizes of a verify batch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from itertools import zip_longest
from typing import ClassVar, Final

import torch
from pydantic import Field
from torch import Tensor

from echo_policies.api import (
    DraftPlan,
    Feedback,
    Frontier,
    LayerView,
    ModelDepth,
    Scheduler,
    State,
    StepContext,
)
from echo_policies.forest import Forest
from echo_policies.market import Market, Offer
from echo_policies.model_means import ModelMeans
from echo_policies.step_seconds import draft_s

NEWEST_WEIGHT: Final = 0.1
"""Of the newest step in the running means."""


@dataclass(frozen=True, slots=True)
class PriceMemory:
    """What is carried from step to step: host numbers."""

    gain: float = 1.0
    """Running mean of tokens emitted over what plain decoding emits in the time, by the costs."""
    pace: float = 2.0
    """Running mean of tokens per request and step. At first a guess on the safe side: who emits
    more per step has fewer steps left in which a draft model pays for what it must read."""
    depths: tuple[ModelMeans, ...] = ()
    """Of a draft model, from depth 1."""
    promised: float = 0.0
    """Nodes that were to be accepted by their scores, in a sum that fades."""
    paid: float = 0.0
    """Nodes that were; likewise."""


class Price(Scheduler):
    """Drafts and verifies what pays at the present batch; plain decoding where nothing does.

    - *Nodes*: the best of all candidates of the batch, as many as maximise expected profit. Where
      fewer are accepted than scores promised, scores are believed less by that factor: nodes are
      chosen for promising much, so those that promise too much are chosen most.
    - *Depths of a draft model*: as many as pay at its running acceptance, which fades to ``prior``.
      What a lookup proposes costs no forward and is always welcome.
    - *Requests*: a draft model that is behind reads up only if enough output is left to pay for it.
    """

    uses_costs: ClassVar[bool] = True

    levels: int = Field(8, ge=1, le=64, description="most depths drafted")
    top_k: int = Field(1, ge=1, le=64, description="children per expanded node")
    width: int = Field(1, ge=1, le=64, description="most nodes of a request expanded per layer")
    margin: float = Field(
        0.2, ge=0, description="of what nodes cost, what their scores must promise beyond that"
    )
    prior: float = Field(
        0.7, ge=0, lt=1, description="acceptance per depth of a draft model, before any is seen"
    )
    prior_weight: float = Field(10.0, gt=0, description="trials that the prior counts for")
    trust: float = Field(
        4.0, gt=0, description="accepted nodes for which scores are believed before any is seen"
    )
    window: int = Field(256, ge=1, description="request-steps that experience looks back on")

    def start(self) -> PriceMemory:
        """Know nothing."""
        return PriceMemory()

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan the depths that pay, and price what verification can have.

        Without costs, as when an engine asks how wide plans can be, everything is planned; the
        session refuses to run so.
        """
        if ctx.costs is None:
            return DraftPlan(self.levels, self.top_k, self.width), None
        live = max(1, ctx.live_B.shape[0] if ctx.num_live is None else ctx.num_live)
        market = Market.of(ctx.costs, live, max(1.0, memory.gain))
        levels = max(0, min(self.levels, ctx.level_limit))
        is_free = ctx.costs.draft_layer_s(1) <= 0
        plan = self._plan(levels) if is_free else self._model_plan(ctx, market, levels, memory)
        if plan.levels == 0:
            return plan, None
        markup = (1 + self.margin) / self._honesty(memory)
        return plan, Offer.of(market, live * _candidates(plan), markup, ctx.live_B.device)

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Expand the best of the layer that could be worth anything."""
        del passed_B
        index_BF = layer.order_BW[:, : self.width]
        return state, Frontier(index_BF, layer.scores_BW.gather(1, index_BF) > state.floor)

    def select(self, state: State, forest: Forest) -> Tensor:
        """Keep the best candidates of the batch, as many as pay (ties: depth, order, slot)."""
        score_BN = forest.path_logp_BN
        ranked = torch.sort(score_BN.T.reshape(-1), descending=True, stable=True)
        worth = torch.nn.functional.pad(ranked.values.exp().cumsum(0), (1, 0))
        # A batch of more nodes than there are is worth what all of them are.
        worth_G = worth.index_select(0, state.nodes_G.clamp(max=score_BN.numel()))
        count = state.nodes_G.index_select(0, (worth_G - state.price_G).argmax().reshape(1))
        is_bought = torch.arange(score_BN.numel(), device=score_BN.device) < count
        keep = torch.zeros_like(is_bought).scatter_(0, ranked.indices, is_bought)
        return keep.reshape(score_BN.T.shape).T & forest.exists_BN

    def observe(self, memory: State, feedback: Feedback) -> State:
        """Note what the step earned, and how far drafts of a model got."""
        costs, plan, live = feedback.costs, feedback.plan, feedback.num_live
        if costs is None or plan is None or live == 0:
            return memory
        emitted = live + feedback.num_accepted
        # In seconds of the cost view, so that price and income are in one currency.
        spent_s = costs.verify_s(live + feedback.num_verified)
        spent_s += draft_s(costs, plan, feedback.draft_layers, live)
        gain = emitted / live * costs.verify_s(live) / spent_s if spent_s > 0 else 1.0
        fade = math.exp(-live / self.window)
        return PriceMemory(
            gain=memory.gain + NEWEST_WEIGHT * (gain - memory.gain),
            pace=memory.pace + NEWEST_WEIGHT * (emitted / live - memory.pace),
            depths=_depths(memory.depths, feedback, plan, fade),
            promised=fade * memory.promised + feedback.promised,
            paid=fade * memory.paid + feedback.num_accepted,
        )

    def _honesty(self, memory: PriceMemory) -> float:
        """Share of what scores promised lately that was accepted; at most 1."""
        return min(1.0, (self.trust + memory.paid) / (self.trust + memory.promised))

    def _plan(self, levels: int) -> DraftPlan:
        return DraftPlan(levels, self.top_k, self.width)

    def _model_plan(
        self, ctx: StepContext, market: Market, levels: int, memory: PriceMemory
    ) -> DraftPlan:
        """Plan where drafting takes forwards of a model, beside a lookup or alone."""
        depth, readers = self._depth_and_readers(ctx, market, levels, memory)
        return DraftPlan(
            levels if ctx.looks_up else depth,
            self.top_k,
            self.width,
            model_levels=depth if ctx.looks_up else None,
            model_slots=readers if depth else None,
        )

    def _depth_and_readers(
        self, ctx: StepContext, market: Market, levels: int, memory: PriceMemory
    ) -> tuple[int, frozenset[int] | None]:
        """Depths of the model, and slots that it runs for; None: all."""
        drafting = market.live
        while drafting:
            depth, profit = self._depth(market, drafting, levels, memory)
            readers = _readers(ctx, market, profit, memory.pace) if depth else frozenset()
            if readers is None or len(readers) >= drafting:
                return depth, readers
            # Fewer share the forwards, which may then not pay any more.
            drafting = len(readers)
        return 0, frozenset()

    def _depth(
        self, market: Market, live: int, levels: int, memory: PriceMemory
    ) -> tuple[int, float]:
        """Depths of the model that pay best for so many requests, and their profit for each."""
        best, best_profit = 0, 0.0
        earned = drafting = verified = 0.0
        mean = ModelMeans(self.prior_weight, 1.0, 1.0, 1.0)
        for depth in range(1, levels + 1):
            known = memory.depths[depth - 1] if depth <= len(memory.depths) else ModelMeans()
            # Before a depth is tried it is taken to be as the one above, with the prior's loss.
            mean = known.per_request(replace(mean, accepted=self.prior * mean.accepted))
            # Whoever is asked first reads what was emitted since it was asked before.
            rows = live * memory.pace if depth == 1 else live * mean.asked * self.width
            drafting += market.layer(math.ceil(rows)) * min(1.0, live * mean.asked)
            earned += live * mean.accepted
            verified += live * mean.verified
            profit = earned - drafting - market.nodes(round(verified))
            if profit > best_profit:
                best, best_profit = depth, profit
        return best, best_profit / live


def _depths(
    before: tuple[ModelMeans, ...], feedback: Feedback, plan: DraftPlan, fade: float
) -> tuple[ModelMeans, ...]:
    planned = plan.levels if plan.model_levels is None else plan.model_levels
    slots = plan.model_slots
    offered = feedback.num_live if slots is None else len(slots)
    both = zip_longest(before, feedback.model, fillvalue=None)
    return tuple(
        (old or ModelMeans()).after(fade, offered if depth <= planned else 0, new or ModelDepth())
        for depth, (old, new) in enumerate(both, start=1)
    )


def _readers(ctx: StepContext, market: Market, profit: float, pace: float) -> frozenset[int] | None:
    """Slots whose output is long enough to pay for what the model must read first; None: all."""
    if not ctx.unread or not ctx.remaining:
        return None

    def pays(remaining: int, unread: int) -> bool:
        return profit * remaining / pace > market.layer(unread) - market.layer(1)

    slots = zip(ctx.remaining, ctx.unread, strict=True)
    return frozenset(
        slot for slot, (remaining, unread) in enumerate(slots) if unread and pays(remaining, unread)
    )


def _candidates(plan: DraftPlan) -> int:
    """Most candidates of one request."""
    return plan.top_k + (plan.levels - 1) * plan.width * plan.top_k
