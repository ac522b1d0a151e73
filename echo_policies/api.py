"""What a policy is: a gate and a scheduler, and the values that pass between them and an engine.

Shape letters: B requests (slots of the batch), W candidates of one layer, F frontier nodes,
N candidates of a whole forest. The root (last committed token) has depth 0.

One step of an engine, run by :mod:`echo_policies.session`::

    plan, state = scheduler.begin(ctx, memory)
    layer = drafter.begin(ctx, plan)                       depth 1
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
from functools import cached_property
from typing import TYPE_CHECKING, Any, ClassVar, Protocol, Self, TypeAlias

import torch
from pydantic import BaseModel, ConfigDict
from torch import Tensor

if TYPE_CHECKING:
    from echo_policies.calibration import CalibrationSamples
    from echo_policies.forest import Forest
    from echo_policies.template import RankTemplate

State: TypeAlias = Any
"""What a scheduler carries through one step, or (as *memory*) from step to step: a value."""


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


@dataclass(frozen=True, slots=True)
class CalibrationContext:
    """What calibration may use to choose parameters for the batch at hand."""

    batch_size: int
    k_max: int
    tokens_per_second: Callable[[Policy], float] | None = None
    """Simulated throughput of a policy on calibration requests; None where nobody can tell."""
    delta: float = 0.70
    """Smallest AUC of a depth worth gating (not published; echo.md of the docs gives sweeps)."""


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
