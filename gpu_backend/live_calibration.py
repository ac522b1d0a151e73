"""Calibration in a run's warm-up: full, ungated drafts at every position of a few outputs.

The requests are decoded plainly, so every output position is visited once; at each the draft grows
a full beam of which nothing is verified. Once the output is known, it says which candidates would
have been accepted.

Shape letters: N samples (positions), D depths, M candidates of a request over all depths.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Final

import numpy as np
import numpy.typing as npt
from pydantic import Field
from torch import Tensor

from echo_policies.api import (
    CalibrationContext,
    DraftPlan,
    Frontier,
    LayerView,
    Policy,
    Scheduler,
    State,
    StepContext,
)
from echo_policies.calibration import CalibrationSamples
from echo_policies.forest import Forest
from echo_policies.gates.open import OpenGate
from echo_policies.session import widest_plan
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest
from gpu_backend.step_observer import DecidedStep
from gpu_backend.tree_layout import ForestIndex
from gpu_backend.verifier import TokenSource

BEAM_WIDTH: Final = 4
"""Nodes expanded per layer: as many as the widest choice of ECHO's ``w_topk``."""


class Probe(Scheduler):
    """Drafts a beam and sends nothing of it to verification."""

    needs: ClassVar[frozenset[str]] = frozenset({"path_logp"})
    respects_k_max: ClassVar[bool] = True

    levels: int = Field(ge=1, description="drafted depths")
    top_k: int = Field(ge=1, description="children per node")
    width: int = Field(BEAM_WIDTH, ge=1, description="nodes expanded per layer")

    @property
    def max_kept(self) -> int | None:
        """Nothing is kept."""
        return 0

    def begin(self, ctx: StepContext, memory: State) -> tuple[DraftPlan, State]:
        """Plan the beam."""
        del ctx, memory
        return DraftPlan(self.levels, self.top_k, self.width), None

    def extend(
        self, state: State, layer: LayerView, passed_B: Tensor | None
    ) -> tuple[State, Frontier]:
        """Expand the best candidates."""
        del passed_B
        index_BF = layer.order_BW[:, : self.width]
        return state, Frontier(index_BF, layer.exists_BW.gather(1, index_BF))

    def select(self, state: State, forest: Forest) -> Tensor:
        """Keep nothing."""
        del state
        return forest.exists_BN & False


@dataclass(frozen=True, slots=True)
class _Sample:
    """What was drafted at one output position."""

    request: int
    position: int
    log_c_D: npt.NDArray[np.float32]
    token_M: npt.NDArray[np.int64]
    exists_M: npt.NDArray[np.bool_]
    parent_M: npt.NDArray[np.int64]
    depth_M: npt.NDArray[np.int64]


class BeamLog:
    """Notes every beam of a run; an engine's observer."""

    def __init__(self, drafter: TokenSource, levels: int) -> None:
        """Start empty.

        Args:
            drafter: knows the tokens of the candidates.
            levels: deepest depth, D.
        """
        self._drafter = drafter
        self._levels = levels
        self._samples: list[_Sample] = []

    def decided(self, step: DecidedStep) -> None:
        """Note the beams of a step, before its tokens are known."""
        forest = step.decision.forest
        if not forest.layers:
            return
        index, tokens = ForestIndex.of(forest), self._drafter.tokens()
        exists = forest.exists_BN.cpu().numpy()
        log_c = np.full((forest.num_requests, self._levels), -np.inf, dtype=np.float32)
        for layer in forest.layers:
            log_c[:, layer.depth - 1] = layer.best_B.cpu().numpy()
        self._samples += [
            _Sample(
                held.request.number,
                len(held.output),
                log_c[slot],
                tokens[slot],
                exists[slot],
                index.parent_BN[slot],
                index.depth_N,
            )
            for slot, held in step.served.items()
            if exists[slot].any()  # the last token needs no draft
        ]

    def samples(self, outputs: Mapping[int, Sequence[int]]) -> CalibrationSamples:
        """Label what was noted by what the target said, by request number.

        Raises:
            InputError: nothing was noted.
        """
        shape = (len(self._samples), self._levels)
        log_c, reached, accepted = (
            np.full(shape, -np.inf),
            np.zeros(shape, bool),
            np.zeros(shape, bool),
        )
        for n, sample in enumerate(self._samples):
            log_c[n] = sample.log_c_D
            reached[n], accepted[n] = _label(sample, outputs[sample.request], self._levels)
        request = np.array([sample.request for sample in self._samples], dtype=np.int64)
        return CalibrationSamples(log_c, reached, accepted, request)


def _label(
    sample: _Sample, output: Sequence[int], levels: int
) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_]]:
    """Reached and accepted [D] of one position."""
    accepted, reached = np.zeros(levels, bool), np.zeros(levels, bool)
    # The spare entry stands for the root, so that the roots' children find it at -1.
    on_path = np.zeros(len(sample.token_M) + 1, bool)
    on_path[-1] = True
    for depth in range(1, levels + 1):
        place = sample.position + depth - 1
        here = (sample.depth_M == depth) & sample.exists_M
        if place >= len(output) or not here.any():
            break  # behind the end nothing was accepted, and nothing rejected either
        reached[depth - 1] = depth == 1 or accepted[depth - 2]
        rows = np.flatnonzero(here & (sample.token_M == output[place]))
        on_path[rows] = on_path[sample.parent_M[rows]]
        accepted[depth - 1] = bool(on_path[rows].any())
    return reached, accepted


def warm_up(
    pair: ModelPair,
    policies: Sequence[Policy],
    settings: ServeSettings,
    requests: Sequence[ServeRequest],
    *,
    on_finished: Callable[[int], None] = lambda count: None,
) -> CalibrationSamples:
    """Decode requests plainly and note the beam at every position of their outputs.

    Args:
        pair: the models.
        policies: those that are not calibrated yet, at least one, say how deep and wide to look.
        settings: of the run; its budget is not used, and positions do not depend on its batch.
        requests: none of which is evaluated; all of them arrive at once.
        on_finished: called with the number of finished requests when it has grown.

    Raises:
        InputError: the outputs hold no depth that can be judged.
    """
    plans = [widest_plan(policy) for policy in policies if not policy.is_calibrated]
    levels = max(plan.levels for plan in plans)
    probe = Probe(levels=levels, top_k=max(plan.top_k for plan in plans))
    engine = build_engine(
        pair, Policy(name="probe", gate=OpenGate(), scheduler=probe), replace(settings, k_max=0)
    )
    log = BeamLog(engine.drafter, levels)
    engine.observer = log
    serve_all(engine, requests, on_finished=on_finished)
    outputs = {done.request.number: done.output for done in engine.finished}
    return log.samples(outputs)


def fit(
    policies: Sequence[Policy], samples: CalibrationSamples, settings: ServeSettings
) -> list[Policy]:
    """Fit the policies that need it to batch and budget of a run; others stay as they are."""
    ctx = CalibrationContext(settings.num_slots, settings.k_max)
    return [policy.calibrate(samples, ctx) for policy in policies]
