"""Plays a policy through a situation, optionally with somebody watching its every call."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from echo_policies.api import Policy, StepContext
from echo_policies.session import Decision, open_session
from echo_policies.step_feedback import step_feedback
from echo_policies.testing.drafter import SyntheticDrafter
from echo_policies.testing.strategies import Situation

Around = Callable[[str], AbstractContextManager[object]]
"""Context that a policy's own method of this name runs in."""

Note = Callable[[str, tuple[Any, ...], Any], None]
"""Told the method, its arguments and its result."""

OWN_METHODS = frozenset({"start", "begin", "extend", "select", "observe", "evaluate"})
"""What a policy does itself during a run."""


@dataclass(frozen=True, slots=True)
class LinearCosts:
    """Costs that a policy may ask for: a constant and a price per row."""

    def verify_s(self, rows: int) -> float:
        """Seconds of a verify forward."""
        return 1e-2 + 1e-4 * rows

    def draft_layer_s(self, rows: int) -> float:
        """Seconds of a draft layer."""
        return 1e-3 + 1e-6 * rows


@dataclass(frozen=True, slots=True)
class Seconds:
    """How long every played step takes."""

    draft_s: float = 1e-3
    verify_s: float = 1e-2
    prefill_s: float = 0.0
    total_s: float = 1.1e-2


@dataclass(frozen=True, slots=True, eq=False)
class Played:
    """One step as it was played."""

    ctx: StepContext
    ctx_copy: StepContext
    decision: Decision
    drafter: SyntheticDrafter

    @property
    def plan(self) -> list[set[int]]:
        """Identities of the kept nodes, per request."""
        return self.drafter.kept(self.decision.keep_BN)


class _Watched:
    """Forwards to a part of a policy; its own methods run inside ``around`` and are noted."""

    def __init__(self, part: object, around: Around | None, note: Note | None) -> None:
        self._part, self._around, self._note = part, around, note

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._part, name)
        if name not in OWN_METHODS:
            return value

        def call(*args: Any) -> Any:
            if self._around is None:
                result = value(*args)
            else:
                with self._around(name):
                    result = value(*args)
            if self._note is not None:
                self._note(name, args, result)
            return result

        return call


class _WatchedPolicy:
    """A policy whose gate and scheduler are watched."""

    def __init__(self, policy: Policy, around: Around | None, note: Note | None) -> None:
        self._policy = policy
        self.gate = _Watched(policy.gate, around, note)
        self.scheduler = _Watched(policy.scheduler, around, note)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._policy, name)


def play(
    policy: Policy,
    situation: Situation,
    *,
    caps_all: bool = False,
    outcomes: Sequence[int] = (0, 0),
    around: Around | None = None,
    note: Note | None = None,
) -> list[Played]:
    """Run a few steps without guards, so that a fault shows as itself.

    Args:
        policy: calibrated.
        situation: the batch.
        caps_all: clamp the plans to ``k_max``.
        outcomes: which hidden target path each step has.
        around: context for the policy's own code.
        note: told every call of the policy's own code.
    """
    if around is not None or note is not None:
        policy = cast("Policy", _WatchedPolicy(policy, around, note))
    memory = policy.scheduler.start()
    played = []
    for number in range(situation.steps):
        seeds = [slot.seed * 1009 + number for slot in situation.slots]
        drafter = SyntheticDrafter(torch.tensor(seeds), situation.ground, outcomes[number])
        session = open_session(policy, drafter, caps_all=caps_all, guards=False)
        ctx, copy = (context(situation, number) for _ in range(2))
        decision = session.decide(ctx, memory)
        played.append(Played(ctx, copy, decision, drafter))
        accepted_B = drafter.verify(decision.forest, decision.keep_BN)
        feedback = step_feedback(
            ctx,
            decision,
            Seconds(),
            accepted_B=accepted_B,
            emitted_B=accepted_B.numpy(),
            by_model=[layer.exists_BW for layer in decision.forest.layers],
            draft_layers=decision.levels,
            counts=True,
        )
        memory = policy.scheduler.observe(memory, feedback)
    return played


def context(situation: Situation, number: int) -> StepContext:
    """Return what the policy is told at a step of the situation."""
    slots = situation.slots
    live_B = torch.tensor([slot.live for slot in slots])
    remaining_B = torch.tensor([slot.remaining if slot.live else 0 for slot in slots])
    return StepContext(
        k_max=situation.k_max,
        step=situation.step + number,
        live_B=live_B,
        remaining_B=remaining_B,
        arrival_B=torch.tensor([slot.arrival for slot in slots]),
        level_limit=max([0, *(slot.remaining - 1 for slot in slots if slot.live)]),
        num_live=sum(slot.live for slot in slots),
        costs=LinearCosts(),
    )


def same_tensors(left: Tensor | None, right: Tensor | None) -> bool:
    """Whether two optional tensors hold the same."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(left, right)
