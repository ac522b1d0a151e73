"""ECHO's elastic scheduler: first deepen confident requests anywhere, then widen truncated ones.

Source: arXiv 2604.09603, Algorithm 1, with correct accounting: what is charged is what is
admitted, the budget is never overspent, and widening ends when no candidate is left.

Shape letters: B requests, W candidates of a layer, F expanded nodes, D depths, N all candidates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, Self

import torch
from pydantic import Field
from torch import Tensor

from echo_policies import allocate
from echo_policies.api import (
    CalibrationContext,
    DraftPlan,
    Frontier,
    Gate,
    LayerView,
    Policy,
    Scheduler,
    State,
    StepContext,
)
from echo_policies.calibration import CalibrationSamples
from echo_policies.forest import Forest

W_TOPK_CHOICES = (1, 2, 3, 4)
"""What ``w_topk=auto`` chooses from."""


@dataclass(frozen=True, slots=True)
class ElasticState:
    """Where the budget went so far in this step."""

    ctx: StepContext
    k_left: Tensor
    """int64 scalar: candidate nodes still to spend."""
    active_B: Tensor
    """bool [B]: may still deepen."""
    cut_B: Tensor
    """int64 [B]: depth at which the request is widened; 0 where it is not."""
    cut_key_B: Tensor
    """float32 [B]: best path log-probability at that depth."""
    admitted: tuple[Tensor, ...] = ()
    """int64 [B] per depth: the best so many candidates of the layer are admitted."""


class Elastic(Scheduler):
    """Shares ``k_max`` between requests: priority 1 is depth, priority 2 is width.

    A request whose gate closes at depth d is *truncated* there and yields its share; a request
    that gets no node is dropped. Every admitted node's parent is admitted.
    """

    respects_k_max: ClassVar[bool] = True
    uses_gate: ClassVar[bool] = True

    levels: int = Field(8, ge=1, le=64, description="deepest level, D_max")
    top_k: int = Field(10, ge=1, le=64, description="children revealed per expanded node")
    w_topk: int | Literal["auto"] = Field(
        "auto", description="nodes admitted per layer; auto chooses on calibration requests"
    )
    w_max: int = Field(8, ge=1, description="nodes a truncated request takes per widening turn")
    failing_layer: Literal["drop", "keep"] = Field(
        "drop", description="whether the layer at which the gate closes is verified"
    )
    budget_order: Literal["confidence", "fcfs", "round_robin"] = Field(
        "confidence", description="who is served first when the budget runs out"
    )
    widen: Literal["off", "truncated", "truncated_and_complete"] = Field(
        "truncated", description="who is widened; complete requests reached their last level"
    )
    widen_depths: Literal["cut_only", "up_to_cut"] = Field(
        "cut_only", description="candidates of the cut depth only, or of all depths up to it"
    )
    budget_counts_roots: bool = Field(False, description="whether roots count against k_max")

    @property
    def depends_on_slots(self) -> bool:
        """First-come and round-robin orders look at arrival and slot."""
        return self.budget_order != "confidence"

    @property
    def is_calibrated(self) -> bool:
        """Whether ``w_topk`` is a number."""
        return self.w_topk != "auto"

    @property
    def _width(self) -> int:
        return 1 if self.w_topk == "auto" else min(self.w_topk, self.top_k)

    def calibrate(self, samples: CalibrationSamples, ctx: CalibrationContext, gate: Gate) -> Self:
        """Choose ``w_topk`` by simulated tokens per second on calibration requests.

        Where nobody can simulate, or there is no budget to share, it becomes 1.
        """
        del samples
        if self.w_topk != "auto":
            return self
        options = [self.model_copy(update={"w_topk": w}) for w in W_TOPK_CHOICES]
        if ctx.tokens_per_second is None or ctx.k_max == 0:
            return options[0]
        rate = ctx.tokens_per_second

        def rated(option: Elastic) -> float:
            return rate(Policy(name=f"w_topk={option.w_topk}", gate=gate, scheduler=option))

        return max(options, key=rated)

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Start with the whole budget and every request active."""
        del memory
        roots = ctx.num_live if self.budget_counts_roots else None
        if ctx.k_max <= (roots or 0):
            return DraftPlan(levels=0), None
        k_left = torch.full((), ctx.k_max, dtype=torch.int64, device=ctx.live_B.device)
        if self.budget_counts_roots:
            k_left = (k_left - ctx.live_B.sum()).clamp_(min=0)
        none_B = torch.zeros_like(ctx.remaining_B)
        state = ElasticState(ctx, k_left, ctx.live_B, none_B, none_B.float())
        return DraftPlan(self.levels, self.top_k, self._width), state

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Admit up to ``w_topk`` nodes of every active request, in order, while budget is left."""
        here_B = state.active_B & (layer.num_candidates_B > 0)
        deepens_B = here_B if passed_B is None else here_B & passed_B
        asks_B = here_B if self.failing_layer == "keep" else deepens_B
        demand_B = layer.num_candidates_B.clamp(max=self._width).masked_fill(~asks_B, 0)
        granted_B = self._grant(state, demand_B, layer.best_B, self._width, self._width)
        active_B = deepens_B & (granted_B > 0)
        cut_now_B = here_B & ~deepens_B
        if self.widen == "truncated_and_complete":
            last_B = state.ctx.level_cap_B.clamp(max=self.levels) == layer.depth
            cut_now_B = cut_now_B | (active_B & last_B)
        state = ElasticState(
            ctx=state.ctx,
            k_left=state.k_left - granted_B.sum(),
            active_B=active_B,
            cut_B=state.cut_B.masked_fill(cut_now_B, layer.depth),
            cut_key_B=torch.where(cut_now_B, layer.best_B, state.cut_key_B),
            admitted=(*state.admitted, granted_B),
        )
        index_BF = layer.order_BW[:, : self._width]
        places_F = torch.arange(index_BF.shape[1], device=index_BF.device)
        # Algorithm 1 ends with the budget: a layer that could admit nothing is not drafted.
        goes_on_B = active_B & (state.k_left > 0)
        mask_BF = (places_F < granted_B[:, None]) & goes_on_B[:, None]
        return state, Frontier(index_BF, mask_BF)

    def select(self, state: State, forest: Forest) -> Tensor:
        """Keep what was admitted, then widen truncated requests with what is left of the budget."""
        if self.widen != "off" and self.widen_depths == "up_to_cut":
            return self._widen_up_to_cut(state, forest)
        counts = state.admitted
        if self.widen != "off":
            counts = self._widen_at_cut(state, forest)
        return torch.cat(
            [
                (layer.place_BW < count_B[:, None]) & layer.exists_BW
                for layer, count_B in zip(forest.layers, counts, strict=True)
            ],
            dim=1,
        )

    def _widen_at_cut(self, state: ElasticState, forest: Forest) -> list[Tensor]:
        """Admitted counts per depth after widening at the cut depth alone."""
        pool_B = torch.zeros_like(state.cut_B)
        for layer, count_B in zip(forest.layers, state.admitted, strict=True):
            at_cut_B = state.cut_B == layer.depth
            pool_B = torch.where(at_cut_B, layer.num_candidates_B - count_B, pool_B)
        limit = max(forest.widths)
        extra_B = self._grant(state, pool_B, state.cut_key_B, limit, self.w_max)
        return [
            count_B + extra_B.masked_fill(state.cut_B != layer.depth, 0)
            for layer, count_B in zip(forest.layers, state.admitted, strict=True)
        ]

    def _widen_up_to_cut(self, state: ElasticState, forest: Forest) -> Tensor:
        """Widen with every unadmitted candidate of depths 1 .. cut, best path first."""
        keep, pool = [], []
        for layer, count_B in zip(forest.layers, state.admitted, strict=True):
            keep_BW = (layer.place_BW < count_B[:, None]) & layer.exists_BW
            keep.append(keep_BW)
            pool.append(layer.exists_BW & ~keep_BW & (state.cut_B >= layer.depth)[:, None])
        pool_BN = torch.cat(pool, dim=1)
        score_BN = forest.path_logp_BN.masked_fill(~pool_BN, -torch.inf)
        order_BN = torch.sort(score_BN, dim=1, descending=True, stable=True).indices
        place_BN = torch.empty_like(order_BN).scatter_(
            1, order_BN, torch.arange(order_BN.shape[1], device=order_BN.device).expand_as(order_BN)
        )
        limit = forest.num_candidates
        extra_B = self._grant(state, pool_BN.sum(1), state.cut_key_B, limit, self.w_max)
        return torch.cat(keep, dim=1) | (pool_BN & (place_BN < extra_B[:, None]))

    def _grant(
        self, state: ElasticState, demand_B: Tensor, key_B: Tensor, limit: int, quantum: int
    ) -> Tensor:
        """Serve ``demand_B`` in the chosen order; round robin takes one node per turn."""
        ctx = state.ctx
        if self.budget_order == "confidence":
            order_B = allocate.descending(key_B)
        elif self.budget_order == "fcfs":
            order_B = allocate.ascending(ctx.arrival_B)
        else:
            order_B, quantum = allocate.rotating(ctx.live_B, ctx.step), 1
        return allocate.grant_in_order(
            demand_B, order_B, state.k_left, limit=limit, quantum=quantum
        )
