"""The serving engine: real models, continuous batching, one policy.

One :meth:`Engine.step` admits waiting requests into idle slots, reads a chunk of their prompts,
and, for the requests that are decoding: **draft** and **decide** (the session, with the policy's
gate and scheduler), **verify** (one forward of the target over all trees), **commit**.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from echo_policies.api import CostView, State
from echo_policies.session import Decision, Session
from echo_policies.step_feedback import step_feedback
from gpu_backend.ragged_model import Extension
from gpu_backend.serving_batch import Finished, FinishReason, ServeRequest, Serving, ServingBatch
from gpu_backend.serving_drafter import ServingDrafter
from gpu_backend.step_observer import DecidedStep, StepObserver
from gpu_backend.stopwatch import Stopwatch
from gpu_backend.verifier import Root, TargetVerifier
from traces.records import IDLE, RequestRecord, RunLog, StepTimes


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How one run is set up."""

    num_slots: int
    """Most requests served at a time, B."""
    k_max: int
    tree_rows: int
    """Nodes that the policy may keep of one request; their slots are reserved at admission."""
    stops: frozenset[int]
    """Tokens that end an output."""
    prefill_chunk: int | None = 512
    """Prompt tokens read per step, of all requests together; None reads whole prompts at once."""
    costs: CostView | None = None
    """What the policy may know of costs."""


class Engine:
    """Serves requests with one policy; drive it with :meth:`step` while :attr:`has_work`.

    Requests come in by :meth:`submit`, at any time, and leave through :attr:`finished`.
    """

    def __init__(
        self,
        session: Session,
        drafter: ServingDrafter,
        verifier: TargetVerifier,
        options: EngineOptions,
        watch: Stopwatch,
    ) -> None:
        """Wire the parts together.

        Args:
            session: the policy bound to the drafter.
            drafter: the drafter itself, for admission and commits.
            verifier: the target.
            options: how the run is set up.
            watch: its zero is the start of the run.
        """
        self._session = replace(session, measure=watch.part)
        self._memory: State = session.policy.scheduler.start()
        self.drafter = drafter
        self.observer: StepObserver | None = None
        self._verifier = verifier
        self._options = options
        self._watch = watch
        self._batch = ServingBatch(options.num_slots)
        self._waiting: deque[ServeRequest] = deque()
        self._num_admitted = 0
        self._steps = 0
        self._prefill_s = 0.0
        """Since the last decoding step."""
        self.log = RunLog()
        self.finished: list[Finished] = []

    @property
    def has_work(self) -> bool:
        """Whether a request waits or is being served."""
        return bool(self._waiting) or not self._batch.is_empty

    def now(self) -> float:
        """Seconds since the engine was made."""
        return self._watch.now()

    def submit(self, request: ServeRequest) -> None:
        """Put a request at the end of the queue.

        Raises:
            InputError: it can never be served, because a model's positions or KV pool are too few.
        """
        self._verifier.target.require_room(request.num_tokens, self._options.tree_rows)
        self.drafter.require_room(request.num_tokens)
        self._waiting.append(request)

    def abort(self, number: int) -> bool:
        """Drop a request wherever it is; False if it is not here (any more)."""
        for request in self._waiting:
            if request.number == number:
                self._waiting.remove(request)
                now = self._watch.now()
                self.finished.append(Finished(request, (), "abort", now, now))
                return True
        for slot, held in enumerate(self._batch.slots):
            if held is not None and held.request.number == number:
                self._leave(slot, "abort")
                return True
        return False

    def step(self) -> None:
        """Do one iteration.

        Raises:
            PolicyCrash: the policy raised.
            PolicyViolation: the policy broke its contract.
        """
        self._admit()
        with self._watch.part("prefill"):
            self._read_prompts()
        self._prefill_s += self._watch.take("prefill")
        if self._batch.decoding():
            self._decode()

    def check_integrity(self) -> None:
        """Check that no slot of a KV pool leaked; for tests and debugging."""
        served = [slot for slot, held in enumerate(self._batch.slots) if held is not None]
        self._verifier.target.table.check_integrity(served)
        self.drafter.check_integrity(served)

    def _admit(self) -> None:
        """First come, first served: who does not fit yet lets nobody past."""
        for slot in self._batch.idle():
            if not self._waiting:
                return
            request = self._waiting[0]
            if not self._reserve(slot, request):
                return
            self._waiting.popleft()
            self._batch.slots[slot] = Serving(request, self._num_admitted)
            self._num_admitted += 1

    def _reserve(self, slot: int, request: ServeRequest) -> bool:
        table = self._verifier.target.table
        if not table.reserve(slot, request.num_tokens + self._options.tree_rows):
            return False
        if self.drafter.admit(slot, request.num_tokens):
            return True
        table.release(slot)
        return False

    def _read_prompts(self) -> None:
        """Read the next chunk of prompts; those that end get their first output token."""
        room = self._options.prefill_chunk
        chunks, served = [], []
        for slot in self._batch.reading():
            held = self._batch.at(slot)
            tokens = held.request.prompt[held.num_read :]
            tokens = tokens if room is None else tokens[:room]
            if not tokens:
                break
            chunks.append(Extension(slot, tokens))
            served.append(held)
            held.num_read += len(tokens)
            room = None if room is None else room - len(tokens)
        if not chunks:
            return
        ends = [held.num_read == len(held.request.prompt) for held in served]
        logits, features = self._verifier.read(chunks, ends)
        self.drafter.read(chunks, features)
        ending = [chunk.key for chunk, is_end in zip(chunks, ends, strict=True) if is_end]
        for slot, logits_V in zip(ending, logits, strict=True):
            held = self._batch.at(slot)
            token = self._verifier.first_token(logits_V, slot, held.request.seed)
            held.first_token_s = self._watch.now()
            self._take(slot, [token])

    def _take(self, slot: int, tokens: list[int], features: Tensor | None = None) -> int:
        """Emit tokens of a request, which may end with them; returns how many were emitted.

        ``features`` are the target's at the positions before the tokens, for drafters with taps.
        """
        held = self._batch.at(slot)
        emitted = held.emit(tokens, self._options.stops)
        if held.finish_reason is not None:
            self._leave(slot, held.finish_reason)
        else:
            self.drafter.commit(slot, tokens, features)
        return emitted

    def _decode(self) -> None:
        batch, watch, options = self._batch, self._watch, self._options
        start = watch.now()
        slots = batch.decoding()
        request_B = np.full(batch.num_slots, IDLE, dtype=np.int64)
        request_B[slots] = [batch.at(slot).request.number for slot in slots]
        device = self._verifier.target.device
        self._verifier.seek(
            [Root(slot, batch.at(slot).output[-1], batch.at(slot).request.seed) for slot in slots]
        )
        with torch.inference_mode():
            with watch.part("decide"):
                ctx = batch.context(
                    options.k_max,
                    self._steps,
                    device,
                    costs=options.costs,
                    unread=self.drafter.unread,
                    looks_up=self.drafter.looks_up,
                )
                decision = self._session.decide(ctx, self._memory)
            if self.observer is not None:
                served = {slot: batch.at(slot) for slot in slots}
                self.observer.decided(DecidedStep(ctx, self._memory, decision, served))
            with watch.part("verify"):
                verified_B = self._verifier.verify(decision.forest, decision.keep_BN)
            emitted_B, accepted_B = self._commit(slots)
        times = self._times(start)
        self._write(decision, request_B, emitted_B, accepted_B, times)
        scheduler = self._session.policy.scheduler
        feedback = step_feedback(
            ctx,
            decision,
            times,
            accepted_B=verified_B,
            emitted_B=accepted_B,
            by_model=self.drafter.model_layers,
            draft_layers=self.drafter.num_forwards if decision.forest.layers else 0,
            counts=scheduler.uses_costs,
        )
        self._memory = scheduler.observe(self._memory, feedback)
        self._steps += 1

    def _commit(self, slots: list[int]) -> tuple[np.ndarray, np.ndarray]:
        """Emit what was accepted; returns emitted and accepted tokens [B] that were emitted."""
        emitted_B = np.zeros(self._batch.num_slots, dtype=np.int64)
        accepted_B = np.zeros_like(emitted_B)
        for slot in slots:
            accepted = self._verifier.accepted[slot]
            self._verifier.commit(slot)
            features = self._verifier.features.get(slot)
            emitted_B[slot] = self._take(slot, accepted.tokens, features)
            accepted_B[slot] = min(accepted.num_drafts, emitted_B[slot])
        return emitted_B, accepted_B

    def _leave(self, slot: int, reason: FinishReason) -> None:
        """Let a request go and take its slots back."""
        held, now = self._batch.at(slot), self._watch.now()
        self._verifier.target.table.release(slot)
        self.drafter.release(slot)
        self._batch.slots[slot] = None
        first_s = held.first_token_s if held.output else now
        self.finished.append(Finished(held.request, tuple(held.output), reason, first_s, now))
        if reason != "abort":
            self.log.requests.append(
                RequestRecord(
                    held.request.number,
                    held.request.arrival_s,
                    first_s,
                    now,
                    len(held.output),
                )
            )

    def _times(self, start: float) -> StepTimes:
        """Seconds of the step by part; what no part accounts for is the host's.

        Prompts that were read since the last step are charged to this one, as are those that the
        drafter has read only in it.
        """
        parts = [self._watch.take(name) for name in ("draft", "check", "decide", "verify")]
        late_s, before_s = self._watch.take("prefill"), self._prefill_s
        self._prefill_s = 0.0
        draft_s, check_s, select_s, verify_s = parts
        return StepTimes(
            draft_s=draft_s,
            check_s=check_s,
            select_s=select_s,
            verify_s=verify_s,
            host_s=max(self._watch.now() - start - sum(parts) - late_s, 0.0),
            prefill_s=before_s + late_s,
        )

    def _write(
        self,
        decision: Decision,
        request_B: np.ndarray,
        emitted_B: np.ndarray,
        accepted_B: np.ndarray,
        times: StepTimes,
    ) -> None:
        columns = (decision.verified_B, decision.drafted_B, decision.depth_B)
        verified, drafted, depth = (column.cpu().numpy() for column in columns)
        unrevealed = np.zeros_like(emitted_B)
        rows = [request_B, emitted_B, accepted_B, verified, drafted, depth, unrevealed]
        rows.append(decision.expanded_B.cpu().numpy())
        k_max = self._options.k_max
        self.log.times.append(times)
        was_clamped = bool(decision.was_clamped)
        self.log.batch.append((decision.levels, decision.checks, k_max, was_clamped))
        self.log.slots.append(np.array(rows, dtype=np.int32))
