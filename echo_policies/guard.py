"""Stands between the decision loop and a policy: names what went wrong, and where.

An exception inside a policy becomes one sentence with policy, method, step and line. On the CPU
every answer is checked against the contract; on a GPU that would need a sync.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Policy, State, StepContext
from echo_policies.errors import EchoError, PolicyCrash, PolicyViolation
from echo_policies.forest import Forest, close_under_ancestors

T = TypeVar("T")

Caller = Callable[[str, Callable[..., Any], tuple[Any, ...]], Any]
"""How a policy's method is called: its name, the method and its arguments."""


def call_plainly(method: str, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
    """Call a policy's method, with nobody watching."""
    del method
    return function(*arguments)


@dataclass(frozen=True, slots=True)
class Guard:
    """A policy's methods for one step, each answer checked where ``is_strict``."""

    policy: Policy
    step: int
    is_strict: bool
    call: Caller = call_plainly

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Call ``scheduler.begin``.

        Raises:
            PolicyCrash: it raised.
            PolicyViolation: the plan is none, or its numbers are no whole numbers in range.
        """
        answer = self._call("begin", self.policy.scheduler.begin, ctx, memory)
        if not (isinstance(answer, tuple) and len(answer) == 2):  # noqa: PLR2004
            self._broken("begin returns a plan and a state", _kind(answer))
        plan, state = answer
        if not isinstance(plan, DraftPlan):
            self._broken("begin returns a plan and a state", _kind(plan))
        for name, least in (("levels", 0), ("top_k", 1), ("width", 1)):
            value = getattr(plan, name)
            if not isinstance(value, int) or value < least:
                self._broken(f"a plan's {name} is a whole number >= {least}", repr(value))
        return plan, state

    def checkpoints(self, levels: int) -> tuple[int, ...]:
        """Call ``gate.checkpoints``; none where the scheduler heeds no gate.

        Raises:
            PolicyCrash: it raised.
            PolicyViolation: the depths are not ascending within ``1 .. levels``.
        """
        if not self.policy.scheduler.uses_gate:
            return ()
        depths = tuple(self._call("checkpoints", self.policy.gate.checkpoints, levels))
        in_order = all(a < b for a, b in zip((0, *depths), (*depths, levels + 1), strict=True))
        if not in_order:
            self._broken(f"checkpoints ascend within 1 .. {levels}", str(depths))
        return depths

    def evaluate(self, layer: LayerView) -> Tensor:
        """Call ``gate.evaluate``.

        Raises:
            PolicyCrash: it raised.
            PolicyViolation: the answer is no bool [B].
        """
        passed_B = self._call("evaluate", self.policy.gate.evaluate, layer)
        if not _is_bool(passed_B, layer.exists_BW.shape[:1]):
            self._broken("a gate answers bool [B]", _kind(passed_B))
        return passed_B

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None, plan: DraftPlan
    ) -> tuple[State, Frontier]:
        """Call ``scheduler.extend``.

        Raises:
            PolicyCrash: it raised.
            PolicyViolation: the frontier is none, wider than planned, names nodes that are not
                there, or names a node twice.
        """
        answer = self._call("extend", self.policy.scheduler.extend, state, layer, passed_B)
        if not (isinstance(answer, tuple) and isinstance(answer[-1], Frontier)):
            self._broken("extend returns a state and a frontier", _kind(answer))
        state, frontier = answer
        if self.is_strict:
            self._check_frontier(layer, frontier, plan)
        return state, frontier

    def select(self, state: State, forest: Forest, k_max: int) -> Tensor:
        """Call ``scheduler.select``.

        Raises:
            PolicyCrash: it raised.
            PolicyViolation: the plan keeps a node that is not there or whose parent is not kept,
                is beyond ``k_max`` although the scheduler is tagged to respect it, or beyond what
                the scheduler says it keeps of one request.
        """
        keep_BN = self._call("select", self.policy.scheduler.select, state, forest)
        if not _is_bool(keep_BN, (forest.num_requests, forest.num_candidates)):
            self._broken("the plan is a bool [B, N]", _kind(keep_BN))
        if self.is_strict:
            self._check_plan(forest, keep_BN, k_max)
        return keep_BN

    def _check_frontier(self, layer: LayerView, frontier: Frontier, plan: DraftPlan) -> None:
        index_BF, mask_BF = frontier.index_BF, frontier.mask_BF
        if not _is_bool(mask_BF, index_BF.shape) or index_BF.dtype != torch.int64:
            self._broken("a frontier is int64 [B, F] and bool [B, F]", _kind(index_BF))
        width = index_BF.shape[1]
        if width > plan.width:
            self._broken("a frontier is no wider than planned", f"{width} > {plan.width}")
        if index_BF.numel() == 0:
            return
        low, high = torch.aminmax(index_BF)
        if low < 0 or high >= layer.width:
            self._broken(
                "a frontier names candidates of its layer",
                f"indices {int(low)} .. {int(high)}, {layer.width} candidates",
            )
        if width > 1:
            # Masked entries get numbers of their own, so that only real repeats are equal.
            spare_F = layer.width + torch.arange(width, device=index_BF.device)
            named_BF = torch.where(mask_BF, index_BF, spare_F).sort(1).values
            if (named_BF[:, 1:] == named_BF[:, :-1]).any():
                self._broken("a frontier names each node once", f"depth {layer.depth} repeats one")

    def _check_plan(self, forest: Forest, keep_BN: Tensor, k_max: int) -> None:
        if not torch.equal(close_under_ancestors(forest, keep_BN), keep_BN):
            if (keep_BN & ~forest.exists_BN).any():
                self._broken("existing nodes only", "it keeps a node that does not exist")
            self._broken("closed under ancestors", "it keeps a node without its parent")
        most = self.policy.scheduler.max_kept
        if most is not None and keep_BN.numel():
            kept = int(keep_BN.sum(1).max())
            if kept > most:
                self._broken("no request keeps more than max_kept", f"kept {kept}, max_kept {most}")
        if self.policy.scheduler.respects_k_max:
            kept = int(keep_BN.sum())
            if kept > k_max:
                self._broken("total within k_max", f"kept {kept}, k_max {k_max}")

    def _call(self, method: str, function: Callable[..., T], *arguments: Any) -> T:
        try:
            return cast("T", self.call(method, function, arguments))
        except EchoError:
            raise
        except (Exception, SystemExit) as error:
            raise PolicyCrash(
                self.policy.name, method, self.step, error, _line_of(error, function)
            ) from error

    def _broken(self, rule: str, detail: str) -> NoReturn:
        raise PolicyViolation(self.policy.name, rule, detail, self.step)


def _is_bool(value: object, shape: tuple[int, ...]) -> bool:
    return (
        isinstance(value, Tensor)
        and value.dtype == torch.bool
        and tuple(value.shape) == tuple(shape)
    )


def _kind(value: object) -> str:
    """What a value is, in words."""
    if isinstance(value, Tensor):
        return f"{value.dtype} {tuple(value.shape)}"
    return f"got {type(value).__name__}"


def _line_of(error: BaseException, function: Callable[..., Any]) -> str:
    """File and line in the policy: the deepest frame in the file of the method that was called.

    Where the method is no Python function, the deepest frame of all.
    """
    code = getattr(function, "__code__", None)
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if code is not None and f.filename == code.co_filename] or frames
    return f"{Path(own[-1].filename).name}, line {own[-1].lineno}"
