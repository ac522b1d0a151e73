"""The one decision loop, used by the simulator and by the real backend.

It drives a policy through a step and enforces the plan: existing nodes only, closed under
ancestors, within ``k_max`` where the policy says so, nothing for slots without a request. On the
CPU a violation raises at once.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Policy, State, StepContext
from echo_policies.errors import InputError, SignalError
from echo_policies.forest import Forest, clamp_to_k_max, count_true
from echo_policies.guard import Caller, Guard, call_plainly


class Drafter(Protocol):
    """Proposes candidates: a recording, or a real draft model."""

    @property
    def signals(self) -> frozenset[str]:
        """What the layer views carry, such as ``path_logp``."""
        ...

    def objection(self, plan: DraftPlan) -> str | None:
        """Say in a clause why this drafter cannot serve such a plan; None where it can."""
        ...

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Return the depth-1 layer of the requests in ``drafting_B`` (bool [B])."""
        ...

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Return the children of the frontier's nodes."""
        ...


class Verifier(Protocol):
    """Tells how much of a plan the target accepts."""

    def verify(self, forest: Forest, keep_BN: Tensor) -> Tensor:
        """Return int64 [B]: accepted draft tokens of every request."""
        ...


@dataclass(frozen=True, slots=True)
class Decision:
    """What one step drafted and sends to verification."""

    plan: DraftPlan
    forest: Forest
    keep_BN: Tensor
    """bool [B, N]: the enforced plan."""
    verified_B: Tensor
    """int64 [B]: K_i, candidate nodes to verify."""
    drafted_B: Tensor
    """int64 [B]: candidate nodes generated."""
    expanded_B: Tensor
    """int64 [B]: nodes expanded, the root included."""
    depth_B: Tensor
    """int64 [B]: levels drafted for the request, whether or not they held candidates."""
    levels: int
    """Levels the engine must charge: drafting can end early only at a checkpoint."""
    checks: int
    """Gate checks of the whole batch that cost a sync: none in masked mode."""
    was_clamped: Tensor
    """bool []: ``--cap-all`` cut the plan; on the device, so that the loop need not wait for it."""


@dataclass(frozen=True, slots=True)
class Session:
    """A policy bound to a drafter for one run.

    Build it with :func:`open_session`, which refuses what cannot run.
    """

    policy: Policy
    drafter: Drafter
    is_staged: bool = True
    """Drafting stops at a checkpoint when nobody deepens; else every planned level is drafted."""
    caps_all: bool = False
    """Clamp every policy to ``k_max``."""
    guards: bool = True
    """Check the plan against the contract."""
    call: Caller = call_plainly
    """How the policy's methods are called, such as under a counter of operations."""
    skips_empty: bool = True
    """On the CPU, leave out layers that nobody extends; a GPU would draft them."""
    measure: Callable[[str], AbstractContextManager[object]] = nullcontext
    """Entered around every ``draft`` layer and every ``check``, for engines with a real clock."""

    def decide(self, ctx: StepContext, memory: State) -> Decision:
        """Draft and select for one step.

        Raises:
            PolicyCrash: the policy raised.
            PolicyViolation: the policy broke its contract.
            SignalError: the policy weighs costs, and the engine gives none.
        """
        if ctx.costs is None and self.policy.scheduler.uses_costs:
            raise SignalError(
                f"Policy {self.policy.name!r} weighs costs, which this engine does not give; "
                "run it where steps have a price (`simulate`, `run_gpu`)."
            )
        if self.caps_all and ctx.k_max == 0:
            return _plain_decoding(ctx)
        is_strict = self.guards and ctx.live_B.device.type == "cpu"
        guard = Guard(self.policy, ctx.step, is_strict, self.call)
        plan, state = guard.begin(ctx, memory)
        if min(plan.levels, ctx.level_limit) <= 0:
            return _plain_decoding(ctx)
        draft = _Draft(self, ctx, plan, guard)
        state = draft.run(state)
        forest = Forest(tuple(draft.layers), ctx.live_B.shape[0], ctx.live_B.device)
        keep_BN = guard.select(state, forest, ctx.k_max)
        keep_BN, was_clamped = self._clamp(ctx, forest, keep_BN)
        return Decision(
            plan=plan,
            forest=forest,
            keep_BN=keep_BN,
            verified_B=keep_BN.sum(1),
            drafted_B=forest.exists_BN.sum(1),
            expanded_B=draft.expanded_B,
            depth_B=draft.depth_B,
            levels=draft.levels,
            checks=sum(depth <= draft.levels for depth in draft.stops),
            was_clamped=was_clamped,
        )

    def _clamp(self, ctx: StepContext, forest: Forest, keep_BN: Tensor) -> tuple[Tensor, Tensor]:
        if not self.caps_all or keep_BN.numel() <= ctx.k_max:
            return keep_BN, keep_BN.new_zeros(())
        return clamp_to_k_max(forest, keep_BN, ctx.k_max), keep_BN.sum() > ctx.k_max


class _Draft:
    """The layers of one step as they grow."""

    def __init__(self, session: Session, ctx: StepContext, plan: DraftPlan, guard: Guard) -> None:
        self.guard = guard
        self.measure = session.measure
        self.drafter = session.drafter
        self.plan = plan
        self.levels = min(plan.levels, ctx.level_limit)
        self.cap_B = ctx.level_cap_B.clamp(max=self.levels)
        self.skips_empty = session.skips_empty
        self.checkpoints = guard.checkpoints(self.levels)
        self.stops = self.checkpoints if session.is_staged else ()
        self.layers: list[LayerView] = []
        drafting_B = self.cap_B > 0
        self.expanded_B = drafting_B.long()
        self.depth_B = drafting_B.long()

    def run(self, state: State) -> State:
        """Grow layer by layer until the plan ends or nobody extends."""
        with self.measure("draft"):
            layer = self.drafter.begin(self.plan, self.cap_B > 0)
        self.layers.append(layer)
        for depth in range(1, self.levels + 1):
            passed_B = self._check(layer) if depth in self.checkpoints else None
            state, frontier = self.guard.extend(state, layer, passed_B, self.plan)
            if depth == self.levels:
                break
            mask_BF = frontier.mask_BF & (self.cap_B > depth)[:, None]
            if self._nobody_extends(mask_BF):
                self.levels = self._next_stop(depth)
                break
            layer = self._grow(layer, Frontier(frontier.index_BF, mask_BF))
        return state

    def _check(self, layer: LayerView) -> Tensor:
        with self.measure("check"):
            return self.guard.evaluate(layer)

    def _grow(self, layer: LayerView, frontier: Frontier) -> LayerView:
        with self.measure("draft"):
            grown = self.drafter.expand(layer, frontier)
        self.layers.append(grown)
        rows_B = count_true(frontier.mask_BF)
        self.expanded_B = self.expanded_B + rows_B
        self.depth_B = self.depth_B + (rows_B > 0)
        return grown

    def _nobody_extends(self, mask_BF: Tensor) -> bool:
        # Layers without candidates change no plan, so on the CPU they are skipped at once; what
        # is charged stays the next checkpoint, where a GPU's host could first see it.
        return self.skips_empty and mask_BF.device.type == "cpu" and not mask_BF.any()

    def _next_stop(self, depth: int) -> int:
        return next((stop for stop in self.stops if stop >= depth), self.levels)


def open_session(
    policy: Policy,
    drafter: Drafter,
    *,
    is_staged: bool = True,
    caps_all: bool = False,
    guards: bool = True,
) -> Session:
    """Bind a policy to a drafter.

    Raises:
        SignalError: the drafter lacks a signal that the policy needs, or levels.
        InputError: the policy has parameters that calibration must choose.
    """
    missing = policy.needs - drafter.signals
    if missing:
        raise SignalError(
            f"Policy {policy.name!r} needs the signal {min(missing)!r}, which this drafter "
            f"does not give; it gives {', '.join(sorted(drafter.signals))}."
        )
    if not policy.is_calibrated:
        raise InputError(
            f"Policy {policy.name!r} must be calibrated before it runs; give a calibration file "
            "or a trace with calibration requests."
        )
    objection = drafter.objection(widest_plan(policy))
    if objection is not None:
        raise SignalError(f"Policy {policy.name!r} {objection}.")
    return Session(policy, drafter, is_staged, caps_all, guards)


def widest_plan(policy: Policy) -> DraftPlan:
    """Return what a policy plans for one request with neither budget nor length in its way."""
    one = torch.ones(1, dtype=torch.int64)
    ctx = StepContext(1 << 20, 0, one.bool(), one << 20, one * 0)
    plan, _ = Guard(policy, 0, is_strict=True).begin(ctx, policy.scheduler.start())
    return plan


def _plain_decoding(ctx: StepContext) -> Decision:
    none_B = torch.zeros_like(ctx.remaining_B)
    forest = Forest((), ctx.live_B.shape[0], ctx.live_B.device)
    return Decision(
        plan=DraftPlan(0),
        forest=forest,
        keep_BN=forest.exists_BN,
        verified_B=none_B,
        drafted_B=none_B,
        expanded_B=none_B,
        depth_B=none_B,
        levels=0,
        checks=0,
        was_clamped=forest.exists_BN.new_zeros(()),
    )
