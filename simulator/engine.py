"""A serving engine as a SimPy process: slots, steps, arrivals.

One iteration admits waiting requests, runs a decision step for the whole batch, lets the simulated
clock pass for what the step costs, and commits. A closed loop replaces a finished request at once
and leaves prefill out; an open loop has Poisson arrivals, a queue, and charges prefill.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Final, TypeAlias

import numpy as np
import simpy
import torch

from echo_policies.api import State, StepContext
from echo_policies.errors import InputError
from echo_policies.session import Decision, Session, Verifier
from echo_policies.step_feedback import step_feedback
from simulator.batch import Batch, RequestTable
from simulator.charge import PresentCosts, StepLoad, charge
from simulator.cost.protocol import StepCosts
from simulator.policy_ops import PolicyMeter
from traces.records import RequestRecord, RunLog, RunRecords, StepTimes
from traces.replay import RecordedDrafter, RecordedVerifier

Events: TypeAlias = Generator[simpy.Event, None, None]

MAX_STEPS: Final = 5_000_000
"""Batch steps after which a run is given up: arrivals outpace the engine."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one run is set up."""

    num_slots: int
    k_max: int
    context: int | None
    """Tokens of context charged per request; None charges prompt and output so far."""
    measured_requests: int
    """Requests to finish after warm-up."""
    pads_verify: bool
    """Verification is charged as if every tree were as large as the batch's largest."""
    drafts: bool
    """Whether the policy ever drafts, so that the draft model reads prompts too."""


@dataclass(slots=True)
class _Served:
    recorded: int
    arrival_s: float
    first_token_s: float


class Engine:
    """Runs one policy at one batch size; :meth:`run` may be called once.

    - *Warm-up* lasts until every first request of every slot has finished (in an open loop: until
      as many requests as there are slots have); its records are dropped.
    - The run ends when ``measured_requests`` have finished after warm-up.
    """

    def __init__(
        self,
        *,
        session: Session,
        drafter: RecordedDrafter,
        cost: StepCosts,
        meter: PolicyMeter,
        table: RequestTable,
        options: EngineOptions,
        stream: Iterator[int],
        rng: np.random.Generator,
        gaps: Iterator[float] | None = None,
        on_request: Callable[[], None] | None = None,
    ) -> None:
        """Wire the parts together.

        Args:
            session: the policy bound to ``drafter``.
            drafter: the recording.
            cost: seconds of every part of a step.
            meter: counts the operations of the policy's own code.
            table: lengths of the recorded requests.
            options: how the run is set up.
            stream: recorded requests in the order in which they are served.
            rng: start phases of the first requests of a closed loop.
            gaps: seconds between arrivals; None is a closed loop.
            on_request: called with no argument whenever a measured request finishes.
        """
        self._session = session
        self._drafter = drafter
        self._verifier: Verifier = RecordedVerifier(drafter)
        self._cost = cost
        self._meter = meter
        self._table = table
        self._options = options
        self._stream = stream
        self._rng = rng
        self._gaps = gaps
        self._on_request = on_request or (lambda: None)
        self._env = simpy.Environment()
        self._batch = Batch(table, options.num_slots)
        self._served: list[_Served | None] = [None] * options.num_slots
        self._queue: deque[tuple[int, float]] = deque()
        self._arrived = self._env.event()
        self._log = RunLog()
        self._number = 0
        self._warming: set[int] = set(range(options.num_slots))
        self._finished = 0

    def run(self) -> RunRecords:
        """Simulate, and return the records of the measured part.

        Raises:
            PolicyViolation: the policy broke its contract.
            InputError: the run does not end, because requests arrive faster than they finish.
        """
        if self._gaps is not None:
            self._env.process(self._arrivals(self._gaps))
        with torch.inference_mode():
            self._env.run(self._env.process(self._serve()))
        return self._log.freeze()

    def _arrivals(self, gaps: Iterator[float]) -> Events:
        # The queue is first come, first served: whoever arrives after the last request that this
        # run can start changes nothing, so overload ends too.
        enough = 3 * self._options.num_slots + self._options.measured_requests
        for gap in islice(gaps, enough):
            yield self._env.timeout(gap)
            self._queue.append((next(self._stream), self._env.now))
            if not self._arrived.triggered:
                self._arrived.succeed()

    def _serve(self) -> Events:
        memory = self._session.policy.scheduler.start()
        self._fill_first()
        for step in range(MAX_STEPS):
            prefill_s = yield from self._admit()
            ctx, decision, accepted_B, times = self._step(step, self._present_costs(), memory)
            yield self._env.timeout(times.total_s)
            times = replace(times, prefill_s=prefill_s)
            memory = self._commit(ctx, decision, accepted_B, times, memory)
            # Many slots may finish in the step that ends the warm-up, which is not recorded.
            if self._finished >= self._options.measured_requests and self._log.times:
                return
        raise InputError(
            f"The run did not finish {self._options.measured_requests} requests in {MAX_STEPS} "
            "steps; lower the rate or the number of requests."
        )

    def _fill_first(self) -> None:
        """Closed loop: start every slot somewhere inside its first request."""
        if self._gaps is not None:
            return
        for slot in range(self._options.num_slots):
            request = next(self._stream)
            done = int(self._rng.integers(1, max(int(self._table.num_tokens[request]), 2)))
            self._place(slot, request, self._env.now, done)

    def _admit(self) -> Generator[simpy.Event, None, float]:
        """Fill idle slots; in an open loop wait for work first. Returns seconds of prefill."""
        if self._gaps is None:
            for slot in np.flatnonzero(~self._batch.live_B):
                self._place(int(slot), next(self._stream), self._env.now)
            return 0.0
        if not self._queue and self._batch.num_live == 0:
            idle_from = self._env.now
            self._arrived = self._env.event()
            yield self._arrived
            self._log.idle_s += self._env.now - idle_from
        prefill_s = 0.0
        for slot in np.flatnonzero(~self._batch.live_B):
            if not self._queue:
                break
            request, arrival_s = self._queue.popleft()
            seconds = self._prefill_s(request)
            yield self._env.timeout(seconds)
            prefill_s += seconds
            self._place(int(slot), request, arrival_s)
        return prefill_s

    def _prefill_s(self, request: int) -> float:
        prompt = self._options.context or int(self._table.prompt_tokens[request])
        draft_s = self._cost.draft_prefill_s(prompt) if self._options.drafts else 0.0
        return self._cost.prefill_s(prompt) + draft_s

    def _place(self, slot: int, request: int, arrival_s: float, done: int = 1) -> None:
        self._batch.admit(slot, request, self._number, done)
        self._served[slot] = _Served(request, arrival_s, self._env.now)
        self._number += 1

    def _present_costs(self) -> PresentCosts:
        live, context = self._batch.num_live, self._options.context
        kv_tokens = live * context if context else int(self._batch.context_B.sum())
        return PresentCosts(self._cost, live, kv_tokens)

    def _step(
        self, step: int, costs: PresentCosts, memory: State
    ) -> tuple[StepContext, Decision, torch.Tensor, StepTimes]:
        batch, options, live = self._batch, self._options, self._batch.num_live
        ctx = StepContext(
            k_max=options.k_max,
            step=step,
            # A copy, for slots empty while what was shown of the step is still looked at.
            live_B=batch.live_t.clone(),
            remaining_B=batch.allowed_t,
            arrival_B=batch.arrival_t,
            level_limit=batch.level_limit,
            num_live=live,
            costs=costs,
            remaining=tuple(batch.allowed_B.tolist()),
        )
        self._drafter.seek(batch.position_t)
        decision = self._session.decide(ctx, memory)
        accepted_B = self._verifier.verify(decision.forest, decision.keep_BN)
        load = StepLoad(
            live=live,
            kv_tokens=costs.kv_tokens,
            behind_tokens=int(batch.behind_B.sum()),
            verified=(
                live * int(decision.verified_B.max())
                if options.pads_verify
                else int(decision.verified_B.sum())
            ),
            accepted=int(accepted_B.sum()),
            ops=self._meter.ops(decision, ctx, memory, batch.position_t),
        )
        return ctx, decision, accepted_B, charge(self._cost, decision, load)

    def _commit(
        self,
        ctx: StepContext,
        decision: Decision,
        accepted_B: torch.Tensor,
        times: StepTimes,
        memory: State,
    ) -> State:
        batch = self._batch
        request_B = batch.request_B.copy()
        emitted_B, counted_B = batch.commit(accepted_B, has_drafted=decision.levels > 0)
        self._log.times.append(times)
        self._log.batch.append(
            (decision.levels, decision.checks, self._options.k_max, bool(decision.was_clamped))
        )
        columns = (
            decision.verified_B,
            decision.drafted_B,
            decision.depth_B,
            self._drafter.unrevealed_B,
            decision.expanded_B,
        )
        rows = [request_B, emitted_B, counted_B, *(column.numpy() for column in columns)]
        self._log.slots.append(np.array(rows, dtype=np.int32))
        scheduler = self._session.policy.scheduler
        feedback = step_feedback(
            ctx,
            decision,
            times,
            accepted_B=accepted_B,
            emitted_B=counted_B,
            by_model=[layer.exists_BW for layer in decision.forest.layers],
            draft_layers=decision.levels,
            counts=scheduler.uses_costs,
        )
        for slot in batch.finished():
            self._finish(slot)
        return scheduler.observe(memory, feedback)

    def _finish(self, slot: int) -> None:
        served = self._served[slot]
        assert served is not None, "a live slot serves a request"
        self._batch.release(slot)
        if self._warming:
            self._leave_warm_up(slot)
            return
        self._log.requests.append(
            RequestRecord(
                served.recorded,
                served.arrival_s,
                served.first_token_s,
                self._env.now,
                int(self._table.num_tokens[served.recorded]),
            )
        )
        self._finished += 1
        self._on_request()

    def _leave_warm_up(self, slot: int) -> None:
        self._warming.discard(slot if self._gaps is None else max(self._warming))
        if not self._warming:
            self._log.end_warm_up()
