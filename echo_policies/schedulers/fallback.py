"""Falls back to plain decoding where drafting does not pay.

A drafted step pays where it emits more tokens per request than plain steps would in its time. The
time comes from the engine's cost view, set right by how long steps really took, the tokens and the
nodes from a running mean of drafted steps. Everything is a host number that the engine knows once
it has committed a step, so a decision needs no sync; an engine that schedules ahead would know it a
step later.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from pydantic import Field, field_serializer, field_validator
from torch import Tensor

from echo_policies.api import (
    CalibrationContext,
    DraftPlan,
    Feedback,
    Frontier,
    Gate,
    LayerView,
    Scheduler,
    State,
    StepContext,
)
from echo_policies.step_seconds import draft_s

if TYPE_CHECKING:
    from echo_policies.calibration import CalibrationSamples
    from echo_policies.forest import Forest

GRACE: Final = 1
"""Steps without a draft that do not end a spell: when every output is at its last token."""

FIRST_WAIT: Final = 16
"""Plain steps before the first probe; doubled after every failed one, up to `MOST_DOUBLINGS`."""

MOST_DOUBLINGS: Final = 6

NEWEST_WEIGHT: Final = 0.125
"""Of the newest step in the running means of how far the cost view is off, once they are warm."""


@dataclass(frozen=True, slots=True)
class Estimate:
    """Running means of drafted steps, per request-step; weights fade exponentially."""

    weight: float = 0.0
    """Request-steps in the means; 0 before the first draft."""
    tokens: float = 0.0
    """Emitted, bonus token included."""
    nodes: float = 0.0
    """Verified."""
    layers: float = 0.0
    """Draft layers that ran."""

    def after(self, feedback: Feedback, window: int) -> Estimate:
        """Return the means with one more drafted step in them."""
        live = feedback.num_live
        if live == 0:
            return self
        old = self.weight * math.exp(-live / window)
        weight = old + live

        def mean(before: float, total: float) -> float:
            return (old * before + total) / weight

        return Estimate(
            weight,
            mean(self.tokens, live + feedback.num_accepted),
            mean(self.nodes, feedback.num_verified),
            mean(self.layers, live * feedback.draft_layers),
        )


@dataclass(frozen=True, slots=True)
class Slowness:
    """Running mean of what steps took, in seconds per second that the cost view said."""

    ratio: float = 1.0
    steps: int = 0

    def after(self, spent_s: float, said_s: float) -> Slowness:
        """Return the mean with one more step in it; a step of no cost says nothing."""
        if said_s <= 0:
            return self
        weight = max(NEWEST_WEIGHT, 1 / (self.steps + 1))
        return Slowness(self.ratio + weight * (spent_s / said_s - self.ratio), self.steps + 1)


@dataclass(frozen=True, slots=True)
class FallbackMemory:
    """What is carried from step to step."""

    inner: State
    estimate: Estimate = Estimate()
    quiet: int = 0
    """Steps since the last one that drafted."""
    spell: int = 0
    """Request-steps drafted since drafting was last taken up."""
    failed: int = 0
    """Spells in a row that ended about where they began."""
    plain: Slowness = Slowness()
    """Of plain steps. Before the first they are taken at the cost view's word: if that is too
    good for them, a few of them show it."""
    drafted: Slowness = Slowness()
    """Of drafted steps, checks, selection, packing and the host's work included."""


class Fallback(Scheduler):
    """Lets another scheduler draft while that is predicted to be faster than plain decoding.

    - *Margin*: the prediction is of a full batch in a steady state. Drafting also lets requests end
      at different times, so that the last ones run alone and prompts are read one by one.
    - *Probes*: drafting is tried for at least ``probe`` request-steps, at the start and again
      after plain spells that get longer with every failure and long enough that the loss of a
      probe, as predicted, is at most ``tax`` of the time.
    - What would not even pay at ``best_case`` acceptance is not tried.
    """

    uses_costs: ClassVar[bool] = True

    inner: Scheduler = Field(description="who drafts")
    window: int = Field(64, ge=1, description="request-steps that the running means look back on")
    probe: int = Field(8, ge=1, description="request-steps before a judgement")
    margin: float = Field(
        0.15, ge=0, description="of what drafting costs, what it must earn beyond that"
    )
    tax: float = Field(0.01, gt=0, le=1, description="share of the time that trying may cost")
    best_case: float = Field(
        0.95, gt=0, le=1, description="acceptance per level at which drafting must pay to be tried"
    )

    @field_serializer("inner")
    def _with_kind(self, inner: Scheduler) -> dict[str, Any]:
        return {"kind": type(inner).__name__, **inner.model_dump()}

    @field_validator("inner", mode="before")
    @classmethod
    def _of_kind(cls, value: object) -> object:
        """Read what :meth:`_with_kind` wrote."""
        if not isinstance(value, dict):
            return value
        kinds = {kind.__name__: kind for kind in _kinds(Scheduler)}  # type: ignore[type-abstract]
        fields = dict(value)
        kind = fields.pop("kind", "")
        if kind not in kinds:
            raise ValueError(f"kind must be a loaded scheduler; got {kind!r}")
        return kinds[kind].model_validate(fields)

    # Of a scheduler these are class variables; here they are whatever the inner one's are.
    @property
    def needs(self) -> frozenset[str]:  # type: ignore[override]
        """Signals that the inner scheduler needs."""
        return self.inner.needs

    @property
    def respects_k_max(self) -> bool:  # type: ignore[override]
        """Whether the inner scheduler does."""
        return self.inner.respects_k_max

    @property
    def uses_gate(self) -> bool:  # type: ignore[override]
        """Whether the inner scheduler does."""
        return self.inner.uses_gate

    @property
    def max_kept(self) -> int | None:
        """The inner scheduler's."""
        return self.inner.max_kept

    @property
    def depends_on_slots(self) -> bool:
        """Whether the inner scheduler's plans do."""
        return self.inner.depends_on_slots

    @property
    def is_calibrated(self) -> bool:
        """Whether the inner scheduler is."""
        return self.inner.is_calibrated

    def calibrate(self, samples: CalibrationSamples, ctx: CalibrationContext, gate: Gate) -> Self:
        """Calibrate the inner scheduler, as if it always drafted."""
        return self.model_copy(update={"inner": self.inner.calibrate(samples, ctx, gate)})

    def start(self) -> FallbackMemory:
        """Know nothing."""
        return FallbackMemory(self.inner.start())

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan what the inner scheduler plans, or no level.

        Without costs, as when an engine asks how wide plans can be, the inner plan stands; the
        session refuses to run so.
        """
        plan, state = self.inner.begin(ctx, memory.inner)
        if ctx.costs is None or plan.levels == 0 or ctx.level_limit <= 0:
            return plan, state
        if self._drafts(ctx, plan, memory):
            return plan, state
        return DraftPlan(levels=0), None

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Extend as the inner scheduler does."""
        return self.inner.extend(state, layer, passed_B)

    def select(self, state: State, forest: Forest) -> Tensor:
        """Select as the inner scheduler does."""
        return self.inner.select(state, forest)

    def observe(self, memory: State, feedback: Feedback) -> State:
        """Note what the step was worth."""
        memory = self._timed(memory, feedback)
        memory = replace(memory, inner=self.inner.observe(memory.inner, feedback))
        if not feedback.has_drafted:
            has_ended = memory.quiet == GRACE and memory.estimate.weight > 0
            was_short = memory.spell < 4 * self.probe
            failed = memory.failed + 1 if was_short else 1
            return replace(
                memory,
                quiet=memory.quiet + 1,
                failed=failed if has_ended else memory.failed,
            )
        spell = memory.spell if memory.quiet <= GRACE else 0
        return replace(
            memory,
            estimate=memory.estimate.after(feedback, self.window),
            quiet=0,
            spell=spell + feedback.num_live,
        )

    def _timed(self, memory: FallbackMemory, feedback: Feedback) -> FallbackMemory:
        """Note how long the step took against what the cost view said of it."""
        costs, plan, live = feedback.costs, feedback.plan, feedback.num_live
        if costs is None or plan is None or live == 0:
            return memory
        spent_s = feedback.step_s - feedback.prefill_s
        said_s = costs.verify_s(live + feedback.num_verified)
        if not feedback.has_drafted:
            return replace(memory, plain=memory.plain.after(spent_s, said_s))
        said_s += draft_s(costs, plan, feedback.draft_layers, live)
        return replace(memory, drafted=memory.drafted.after(spent_s, said_s))

    def _drafts(self, ctx: StepContext, plan: DraftPlan, memory: FallbackMemory) -> bool:
        """Whether to draft in this step."""
        live = max(1, ctx.live_B.shape[0] if ctx.num_live is None else ctx.num_live)
        known = memory.estimate
        cost = self._cost(ctx, plan, live, memory)
        hope = _geometric(self.best_case, min(plan.levels, ctx.level_limit))
        if hope < cost:
            return False
        if known.weight == 0:
            return True
        # What costs nothing, as a lookup that finds nothing, needs to earn nothing.
        if known.tokens - 1 >= (1 + self.margin) * (cost - 1) - self.tax:
            return True
        if memory.quiet <= GRACE:
            return memory.spell < self.probe
        loss = (cost - known.tokens) * math.ceil(self.probe / live)
        wait = FIRST_WAIT * 2.0 ** min(memory.failed - 1, MOST_DOUBLINGS)
        return memory.quiet >= max(wait, loss / self.tax)

    def _cost(self, ctx: StepContext, plan: DraftPlan, live: int, memory: FallbackMemory) -> float:
        """Predicted time of a drafted step, in plain steps of the batch."""
        costs = ctx.costs
        assert costs is not None, "begin asks"
        known = memory.estimate
        is_known = known.weight > 0
        nodes = known.nodes if is_known else self._fewest_nodes(plan, ctx.k_max, live)
        layers = known.layers if is_known else float(plan.levels)
        plain_s = costs.verify_s(live) * memory.plain.ratio
        verify_s = costs.verify_s(live + round(live * nodes))
        slowness = memory.drafted if is_known else memory.plain
        drafted_s = (verify_s + draft_s(costs, plan, layers, live)) * slowness.ratio
        return drafted_s / plain_s if plain_s > 0 else math.inf

    def _fewest_nodes(self, plan: DraftPlan, k_max: int, live: int) -> float:
        """Nodes per request that a first draft is charged, before any was seen."""
        if plan.template is not None:
            nodes: float = len(plan.template.paths)
        else:
            widest = plan.top_k + (plan.levels - 1) * plan.width * plan.top_k
            nodes = min(self.max_kept or plan.levels, widest)
        return min(nodes, k_max / live) if self.respects_k_max else nodes


def _geometric(acceptance: float, levels: int) -> float:
    """Tokens per step of a chain of so many levels, bonus token included."""
    return sum(acceptance**depth for depth in range(levels + 1))


def _kinds(kind: type[Scheduler]) -> Iterator[type[Scheduler]]:
    """Every scheduler class that is loaded."""
    for child in kind.__subclasses__():
        yield child
        yield from _kinds(child)
