"""A policy's calls of one step, taken down on a recording, to be played again on any device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from echo_policies.api import Feedback, Policy, StepContext
from echo_policies.session import Session
from simulator.charge import PresentCosts
from simulator.setting import Setting
from traces.replay import RecordedDrafter, RecordedVerifier

Call: TypeAlias = tuple[Callable[..., Any], tuple[Any, ...]]
"""A policy's method and its arguments."""


@dataclass(frozen=True, slots=True)
class Tape:
    """The calls of one step, in order."""

    calls: tuple[Call, ...]
    levels: int

    def on(self, device: str) -> Tape:
        """Return a copy with fresh arguments on a device: nothing that a call cached is in it."""
        known: dict[int, Any] = {}
        calls = tuple((function, moved(given, device, known)) for function, given in self.calls)
        return Tape(calls, self.levels)

    def play(self) -> None:
        """Make the calls."""
        for function, arguments in self.calls:
            function(*arguments)


@dataclass(slots=True)
class _Recorder:
    calls: list[Call] = field(default_factory=list)

    def __call__(self, method: str, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
        if method != "checkpoints":  # host numbers only
            self.calls.append((function, given))
        return function(*given)


def record_tapes(
    setting: Setting, policy: Policy, batch_size: int, k_max: int, *, steps: int, seed: int
) -> Iterator[Tape]:
    """Yield the calls of a calibrated policy on batches of random recorded positions.

    Levels that nobody extends are run, as a GPU runs them; a checkpoint does not stop the draft.
    """
    recorder = _Recorder()
    drafter = RecordedDrafter(setting.tables, gives_entropy="entropy" in policy.needs)
    session = Session(
        policy, drafter, is_staged=False, guards=False, call=recorder, skips_empty=False
    )
    verifier, rng = RecordedVerifier(drafter), np.random.default_rng(seed)
    memory = policy.scheduler.start()
    costs = PresentCosts(setting.cost, batch_size, batch_size * setting.mean_context)
    spans = [setting.trace.positions(q) for q in setting.evaluated]
    positions = np.concatenate([np.arange(span.start, span.stop) for span in spans])
    for step in range(steps):
        recorder.calls = []
        drafter.seek(torch.from_numpy(rng.choice(positions, batch_size)))
        ctx = replace(_context(batch_size, k_max, step), costs=costs)
        decision = session.decide(ctx, memory)
        accepted_B = verifier.verify(decision.forest, decision.keep_BN)
        feedback = Feedback(accepted_B, decision.keep_BN, ctx.live_B, 1e-3, 1e-2, 1.1e-2)
        memory = recorder("observe", policy.scheduler.observe, (memory, feedback))
        yield Tape(tuple(recorder.calls), decision.levels)


def _context(batch_size: int, k_max: int, step: int) -> StepContext:
    long_B = torch.full((batch_size,), 1 << 20, dtype=torch.int64)
    return StepContext(
        k_max=k_max,
        step=step,
        live_B=torch.ones(batch_size, dtype=torch.bool),
        remaining_B=long_B,
        arrival_B=torch.arange(batch_size),
        level_limit=(1 << 20) - 1,
        num_live=batch_size,
    )


def moved(value: Any, device: str, known: dict[int, Any]) -> Any:
    """Return a value with its tensors on a device; what was shared stays shared.

    Tensors, dataclasses, tuples, lists and dicts are gone through; anything else stays itself.
    """
    if id(value) not in known:
        known[id(value)] = _moved(value, device, known)
    return known[id(value)]


def _moved(value: Any, device: str, known: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(moved(part, device, known) for part in value))
    if isinstance(value, list | tuple):
        return type(value)(moved(part, device, known) for part in value)
    if isinstance(value, dict):
        return {key: moved(part, device, known) for key, part in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        given = {f.name: getattr(value, f.name) for f in fields(value) if f.init}
        parts = {name: moved(part, device, known) for name, part in given.items()}
        if isinstance(parts.get("device"), torch.device):
            parts["device"] = torch.device(device)
        return type(value)(**parts)
    return value
