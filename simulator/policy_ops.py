"""Operations of a policy's own code in one step: counted once per shape of a step, then known.

A policy has fixed shapes and never branches on a tensor's value, so what it launches is decided by
the plan and by the levels that run. The count needs no clock and no particular machine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from echo_policies.api import DraftPlan, Feedback, Policy, State, StepContext
from echo_policies.session import Decision, Session
from traces.replay import RecordedDrafter, ReplayTables

LAUNCHES_NOTHING: Final = frozenset(
    {
        *("empty", "empty_like", "empty_strided", "new_empty"),
        *("detach_", "as_strided_", "squeeze_", "t_", "transpose_", "unsqueeze_"),
    }
)
"""Operations that launch nothing although their schema does not say so: bare allocations, and
changes of a tensor's shape in place."""


class OpCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations that launch work: views and bare allocations do not.

    An operation that a GPU runs as several kernels (a sort) counts once.
    """

    def __init__(self) -> None:
        """Start at zero."""
        super().__init__()  # type: ignore[no-untyped-call]
        self.ops = 0

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        """Count one operation and run it."""
        self.ops += launches(func)
        return func(*args, **(kwargs or {}))


def launches(func: Any) -> bool:
    """Whether an ATen operation launches work, by its schema: a view only renames memory."""
    returns = func._schema.returns
    is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in returns)
    return not is_view and func.overloadpacket.__name__ not in LAUNCHES_NOTHING


@dataclass(slots=True)
class PolicyMeter:
    """Counts a policy's operations on a recording; made by `policy_meter`."""

    session: Session
    drafter: RecordedDrafter
    counter: OpCounter
    known: dict[tuple[DraftPlan, int], int] = field(default_factory=dict)
    """Operations by plan and levels charged."""

    def ops(self, decision: Decision, ctx: StepContext, memory: State, position_B: Tensor) -> int:
        """Return the operations of a step like ``decision``, on a GPU that skips no level.

        Args:
            decision: what the step came to.
            ctx: what the policy was told.
            memory: with what it began.
            position_B: int64 [B], where the recording stood.
        """
        key = decision.plan, decision.levels
        if key not in self.known:
            self.known[key] = self._count(decision.levels, ctx, memory, position_B)
        return self.known[key]

    def _count(self, levels: int, ctx: StepContext, memory: State, position_B: Tensor) -> int:
        self.counter.ops = 0
        self.drafter.seek(position_B)
        # The step again, to the levels that are charged: the plan's others never ran.
        again = replace(ctx, level_limit=levels) if levels else ctx
        with torch.inference_mode():
            decision = self.session.decide(again, memory)
            nothing_B = torch.zeros_like(ctx.remaining_B)
            feedback = Feedback(nothing_B, decision.keep_BN, ctx.live_B, 0.0, 0.0, 0.0)
            observe = self.session.policy.scheduler.observe
            self.session.call("observe", observe, (memory, feedback))
        return self.counter.ops


def policy_meter(
    policy: Policy, tables: ReplayTables, *, is_staged: bool = True, caps_all: bool = False
) -> PolicyMeter:
    """Return a meter of a calibrated policy on a recording.

    Args:
        policy: calibrated; its code is run, a few steps per run of an engine.
        tables: the recording.
        is_staged: as the engine's session.
        caps_all: as the engine's session.
    """
    counter = OpCounter()

    def counted(method: str, function: Callable[..., Any], arguments: tuple[Any, ...]) -> Any:
        del method
        with counter:
            return function(*arguments)

    drafter = RecordedDrafter(tables, gives_entropy="entropy" in policy.needs)
    session = Session(
        policy,
        drafter,
        is_staged,
        caps_all,
        guards=False,
        call=counted,
        skips_empty=False,
    )
    return PolicyMeter(session, drafter, counter)
