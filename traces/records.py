"""What an engine writes down: one row per batch step, one per request in it, one per request.

Shape letters: S batch steps, B slots.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Final

import numpy as np
import numpy.typing as npt

IDLE: Final = -1
"""Recorded request of a slot that holds none."""

Float1 = npt.NDArray[np.float64]
Int1 = npt.NDArray[np.int64]
Int2 = npt.NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one batch step, by what they were spent on."""

    draft_s: float = 0.0
    check_s: float = 0.0
    select_s: float = 0.0
    """The policy's own operations, at every level and at the end."""
    pack_s: float = 0.0
    """Index tensors of the verify batch, built from the kept nodes."""
    verify_s: float = 0.0
    compact_s: float = 0.0
    """Keys and values of accepted nodes, moved into place."""
    host_s: float = 0.0
    prefill_s: float = 0.0

    @property
    def total_s(self) -> float:
        """Length of the step."""
        return (
            self.draft_s
            + self.check_s
            + self.select_s
            + self.pack_s
            + self.verify_s
            + self.compact_s
            + self.host_s
            + self.prefill_s
        )


SPLIT: Final = tuple(entry.name for entry in fields(StepTimes))
"""Names of the parts of a step's time, in the order of the table."""


SLOT_COLUMNS: Final = (
    "request",
    "emitted",
    "accepted",
    "verified",
    "drafted",
    "depth",
    "unrevealed",
    "expanded",
)
"""What is written down of every slot at every step."""


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One served request."""

    recorded: int
    """Index of the recorded request that was replayed."""
    arrival_s: float
    first_token_s: float
    finish_s: float
    tokens: int
    """Output tokens, the first one (from prefill) included."""

    @property
    def ttft_s(self) -> float:
        """Time to first token: queueing and prefill."""
        return self.first_token_s - self.arrival_s

    @property
    def tpot_s(self) -> float:
        """Time per output token after the first."""
        return (self.finish_s - self.first_token_s) / max(self.tokens - 1, 1)


@dataclass(frozen=True, slots=True, eq=False)
class RunRecords:
    """The measured part of one run of one policy; warm-up is left out."""

    times_SX: npt.NDArray[np.float64]
    """[S, 8] seconds of each batch step in the order of ``SPLIT``."""
    levels_S: Int1
    """Draft levels charged."""
    checks_S: Int1
    """Gate checks charged."""
    k_max_S: Int1
    clamped_S: npt.NDArray[np.bool_]
    request_SB: Int2
    """Recorded request in each slot, or IDLE."""
    emitted_SB: Int2
    accepted_SB: Int2
    """Accepted draft tokens that were emitted."""
    verified_SB: Int2
    """Candidate nodes verified, K_i."""
    drafted_SB: Int2
    """Candidate nodes generated."""
    depth_SB: Int2
    """Levels that had candidates; 0 where the request did not draft."""
    unrevealed_SB: Int2
    """Expanded nodes whose children the recording does not know."""
    expanded_SB: Int2
    """Expanded nodes, root included."""
    requests: tuple[RequestRecord, ...]
    """Requests that finished in the measured part."""
    idle_s: float = 0.0
    """Time without any request, in an open loop."""
    warm_up_steps: int = 0
    """Batch steps that were simulated before these and dropped."""

    @property
    def step_s(self) -> Float1:
        """Length of each batch step."""
        return np.asarray(self.times_SX.sum(axis=1), dtype=np.float64)

    @property
    def live_SB(self) -> npt.NDArray[np.bool_]:
        """Whether a slot held a request."""
        return np.asarray(self.request_SB != IDLE)


@dataclass(slots=True)
class RunLog:
    """Collects a run's records step by step, then freezes them."""

    times: list[StepTimes] = field(default_factory=list)
    batch: list[tuple[int, int, int, bool]] = field(default_factory=list)
    """(levels, checks, k_max, was_clamped) per step."""
    slots: list[npt.NDArray[np.int32]] = field(default_factory=list)
    """[8, B] per step, in the order of ``SLOT_COLUMNS``."""
    requests: list[RequestRecord] = field(default_factory=list)
    idle_s: float = 0.0
    warm_up_steps: int = 0

    def end_warm_up(self) -> None:
        """Forget everything but how many steps there were."""
        self.warm_up_steps = len(self.times)
        self.times.clear()
        self.batch.clear()
        self.slots.clear()
        self.requests.clear()
        self.idle_s = 0.0

    def freeze(self) -> RunRecords:
        """Return the records as arrays."""
        levels, checks, k_max, was_clamped = np.array(self.batch, dtype=np.int64).T
        columns = dict(zip(SLOT_COLUMNS, np.stack(self.slots, axis=1), strict=True))
        return RunRecords(
            times_SX=np.array([[getattr(t, name) for name in SPLIT] for t in self.times]),
            levels_S=levels,
            checks_S=checks,
            k_max_S=k_max,
            clamped_S=was_clamped.astype(bool),
            request_SB=columns["request"],
            emitted_SB=columns["emitted"],
            accepted_SB=columns["accepted"],
            verified_SB=columns["verified"],
            drafted_SB=columns["drafted"],
            depth_SB=columns["depth"],
            unrevealed_SB=columns["unrevealed"],
            expanded_SB=columns["expanded"],
            requests=tuple(self.requests),
            idle_s=self.idle_s,
            warm_up_steps=self.warm_up_steps,
        )
