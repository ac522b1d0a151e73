"""What a policy is: a gate and a scheduler, and the values that pass between them and an engine.

Shape letters: B requests (slots of the batch), W candidates of one layer, F frontier nodes,
N candidates of a whole forest. The root (last committed token) has depth 0.

One step of an engine, run by :mod:`echo_policies.session`::

    plan, state = scheduler.begin(ctx, memory)
    layer = drafter.begin(plan, drafting_B)                depth 1
    for d in 1 .. plan.levels:
        passed_B = gate.evaluate(layer)                    only at the gate's checkpoints
        state, frontier = scheduler.extend(state, layer, passed_B)
        layer = drafter.expand(layer, frontier)            depth d + 1
    keep_BN = scheduler.select(state, forest)
    memory = scheduler.observe(memory, feedback)

Policies are written in torch with fixed shapes and never look at a tensor's value on the host
(no ``.item()``, ``nonzero``, boolean indexing or Python branch on a tensor).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Self, TypeAlias

from pydantic import BaseModel, ConfigDict
from torch import Tensor

from echo_policies.views import (
    CostView,
    DraftPlan,
    Feedback,
    Frontier,
    LayerView,
    ModelDepth,
    StepContext,
)

if TYPE_CHECKING:
    from echo_policies.calibration import CalibrationSamples
    from echo_policies.forest import Forest

__all__ = [
    "CalibrationContext",
    "CostView",
    "DraftPlan",
    "Feedback",
    "Frontier",
    "Gate",
    "LayerView",
    "ModelDepth",
    "Policy",
    "Scheduler",
    "State",
    "StepContext",
]

State: TypeAlias = Any
"""What a scheduler carries through one step, or (as *memory*) from step to step: a value."""


@dataclass(frozen=True, slots=True)
class CalibrationContext:
    """What calibration may use to choose parameters for the batch at hand."""

    batch_size: int
    k_max: int
    tokens_per_second: Callable[[Policy], float] | None = None
    """Simulated throughput of a policy on calibration requests; None where nobody can tell."""
    delta: float = 0.70
    """Smallest AUC of a depth worth gating; the paper does not publish its own."""


class _Part(BaseModel):
    """A frozen set of hyperparameters; unknown fields are errors."""

    model_config = ConfigDict(frozen=True, extra="forbid", arbitrary_types_allowed=True)


class Gate(_Part, ABC):
    """Decides, per request and only at its checkpoints, whether a draft may deepen.

    - A closed gate stays closed for the rest of the step.
    - The engine charges every checkpoint; the gate charges nothing.
    """

    needs: ClassVar[frozenset[str]] = frozenset({"path_logp"})
    """Signals that the layer views must carry."""

    @abstractmethod
    def checkpoints(self, levels: int) -> tuple[int, ...]:
        """Depths within ``1 .. levels`` at which :meth:`evaluate` is called, ascending."""

    @abstractmethod
    def evaluate(self, layer: LayerView) -> Tensor:
        """Return bool [B]: True lets the request deepen, False truncates it at this depth."""

    @property
    def is_calibrated(self) -> bool:
        """Whether the gate can run as it is."""
        return True

    def calibrate(self, samples: CalibrationSamples, ctx: CalibrationContext) -> Self:
        """Return a fitted copy; the default has nothing to fit."""
        del samples, ctx
        return self


class Scheduler(_Part, ABC):
    """Decides what is drafted, which nodes are expanded, and which nodes are verified."""

    needs: ClassVar[frozenset[str]] = frozenset({"path_logp"})
    respects_k_max: ClassVar[bool] = False
    """Whether the plan stays within ``k_max`` by itself."""
    uses_gate: ClassVar[bool] = False
    """Whether :meth:`extend` heeds the gate's answer."""
    uses_costs: ClassVar[bool] = False
    """Whether it looks at ``ctx.costs``, so that an engine must have them."""

    @abstractmethod
    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Return the plan of this step and the state that :meth:`extend` starts from."""

    @abstractmethod
    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Choose the nodes of ``layer`` that are expanded next.

        Args:
            state: as :meth:`begin` or the last call returned it; not modified.
            layer: candidates of the depth just drafted; not modified.
            passed_B: the gate's answer, or None where this depth is no checkpoint.
        """

    @abstractmethod
    def select(self, state: State, forest: Forest) -> Tensor:
        """Return bool [B, N]: the candidates that are verified, closed under ancestors."""

    def start(self) -> State:
        """Return the memory a run begins with."""
        return None

    def observe(self, memory: State, feedback: Feedback) -> State:
        """Return the memory after a step; the default learns nothing."""
        del feedback
        return memory

    @property
    def max_kept(self) -> int | None:
        """Most nodes of one request that :meth:`select` keeps; None where only the plan limits it.

        An engine reserves memory for so many.
        """
        return None

    @property
    def depends_on_slots(self) -> bool:
        """Whether arrival or slot order changes the plan, so that permuting requests may."""
        return False

    @property
    def is_calibrated(self) -> bool:
        """Whether no parameter is left on ``auto``."""
        return True

    def calibrate(self, samples: CalibrationSamples, ctx: CalibrationContext, gate: Gate) -> Self:
        """Return a copy with every ``auto`` parameter chosen; the default has none."""
        del samples, ctx, gate
        return self


class Policy(_Part):
    """A gate and a scheduler under a name; its fields are its hyperparameters."""

    name: str = ""
    gate: Gate
    scheduler: Scheduler

    def model_post_init(self, context: Any, /) -> None:
        """Name a policy after its class where nobody named it."""
        if not self.name:
            object.__setattr__(self, "name", type(self).__name__)

    @property
    def needs(self) -> frozenset[str]:
        """Signals that a drafter must give."""
        return self.scheduler.needs | (self.gate.needs if self.scheduler.uses_gate else frozenset())

    @property
    def is_calibrated(self) -> bool:
        """Whether both parts can run as they are."""
        return self.scheduler.is_calibrated and (
            not self.scheduler.uses_gate or self.gate.is_calibrated
        )

    def calibrate(self, samples: CalibrationSamples, ctx: CalibrationContext) -> Self:
        """Return a copy fitted to calibration samples: first the gate, then the scheduler."""
        if self.is_calibrated:
            return self
        gate = self.gate.calibrate(samples, ctx) if self.scheduler.uses_gate else self.gate
        scheduler = self.scheduler.calibrate(samples, ctx, gate)
        return self.model_copy(update={"gate": gate, "scheduler": scheduler})

    def parameters(self) -> Mapping[str, Any]:
        """Return all hyperparameters by name, gate's and scheduler's together."""
        gate = self.gate.model_dump() if self.scheduler.uses_gate else {}
        return {**gate, **self.scheduler.model_dump()}
