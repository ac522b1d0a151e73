"""Looking on while a serving engine runs: what went into every decision, and what came out."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from echo_policies.api import State, StepContext
from echo_policies.session import Decision
from gpu_backend.serving_batch import Serving


@dataclass(frozen=True, slots=True)
class DecidedStep:
    """What went into a decision, and what came out."""

    ctx: StepContext
    memory: State
    decision: Decision
    served: Mapping[int, Serving]
    """The requests that take part, by slot."""


class StepObserver(Protocol):
    """Looks on while an engine runs."""

    def decided(self, step: DecidedStep) -> None:
        """See a step before anything of it is verified."""
        ...
