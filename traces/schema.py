"""The recording format: what a real draft proposed and a real target kept, at every position.

Shape letters: Q requests, T tokens, P positions, D levels, W slots, k children, C chain levels.

A *position* p of a request is the state in which output token ``j`` is the last committed token
(the root, depth 0). The draft then proposes tokens for ``j + 1, j + 2, ...`` at depths 1, 2, ...
A request whose output has ``n`` tokens has the ``n - 1`` positions ``j = 0 .. n - 2``; its token 0
comes out of prefill.

Slots are the nodes that the recording expanded at one depth: the ``beam_width`` best by path
log-probability, and, in one further slot, the greedy-chain node where the beam does not hold it.
Children are ordered by (logit descending, token id ascending): a child's place is its *rank*.
Conditional log-probabilities are stored as float16, and the stored value is the truth: a live
drafter rounds its own in the same way before it adds them up.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Final, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field

SCHEMA_VERSION: Final = 1
"""Version of the format written by this package."""

OUTSIDE_VOCAB: Final = -1
"""Path rank of a token that the draft's vocabulary does not hold; its log-prob is ``-inf``."""

PAST_END: Final = -2
"""Path rank of a level beyond the end of the output (after a stop token)."""

NO_SLOT: Final = -1
"""Entry of ``slot_child`` for a slot that is empty."""

SOURCE_MARK: Final = "#"
"""A synthetic question id is the recorded task and id it is drawn from, this mark and a number."""

PositiveInt = Annotated[int, Field(ge=1)]


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class RequestInfo(_Frozen):
    """What is known of one recorded request, its text excluded."""

    task: str = Field(min_length=1)
    """Data set, such as ``humaneval``."""
    question_id: str
    turn: PositiveInt = 1
    """Turn of a dialogue; the prompt of a later turn holds the target's earlier answers."""
    prompt_tokens: PositiveInt
    max_new_tokens: PositiveInt
    finish_reason: Literal["stop", "length"]
    split: Literal["calibration", "evaluation"]

    @property
    def source(self) -> str:
        """The question that this request is a turn of, or was drawn from.

        It is what intervals resample: turns of one dialogue are not independent.
        """
        origin, mark, _ = self.question_id.partition(SOURCE_MARK)
        return origin if mark else f"{self.task}/{self.question_id}"


class Provenance(_Frozen):
    """Where the content comes from; every report repeats it."""

    kind: Literal["recorded", "synthetic"]
    generator: str
    """The program and version that wrote the trace."""
    date: str
    """ISO date."""
    device: str = ""
    libraries: dict[str, str] = {}
    seed: int | None = None
    sources: tuple[str, ...] = ()
    """Synthetic only: every published figure that was fitted to, with its source."""
    notes: tuple[str, ...] = ()


class ModelInfo(_Frozen):
    """One model of the pair."""

    name: str
    digest: str = ""
    """SHA-256 of the weights file, where it is one file."""
    dtype: str = ""
    """Arithmetic of the forward passes, such as ``float32``."""
    weights: str = ""
    """Form of the weights, such as ``GGUF Q4_K_M, dequantised``."""


class Costing(_Frozen):
    """What the trace is costed as unless the user says otherwise."""

    target: str
    """Name of a target in the simulator's catalogue."""
    hardware: str = "h100"
    tp: PositiveInt = 1


class TraceHeader(_Frozen):
    """Everything about a trace but its arrays; stored as sorted JSON in one metadata key."""

    schema_version: Literal[1] = SCHEMA_VERSION
    name: str = Field(min_length=1)
    target: ModelInfo
    draft: ModelInfo
    drafter: Literal["draft_model", "eagle3", "prompt_lookup"]
    recorded_as: str = ""
    """Catalogue name that costs the recorded pair itself (``--target recorded``)."""
    costing: Costing
    """Default costing; a what-if where it differs from ``recorded_as``."""
    tokenizer: str = ""
    vocab_size: PositiveInt
    temperature: float = 0.0
    licence: str = ""
    levels: PositiveInt
    """Deepest recorded candidate depth, D."""
    beam_width: PositiveInt
    """Beam nodes per depth; the arrays have one more slot, for the greedy chain."""
    root_width: PositiveInt
    top_k: PositiveInt
    """Children recorded per expanded node."""
    chain_levels: PositiveInt
    """Levels of the greedy chain and of the target path, C >= D."""
    provenance: Provenance
    requests: tuple[RequestInfo, ...]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PositionArrays:
    """What is recorded at positions, one request's or those of a whole trace.

    Tokens go beyond the emitted output of ``n`` tokens (``n`` = number of positions + 1) when the
    output was cut by length, so that the path of the last positions is real.

    Depth-d candidates are the root's children for d = 1 (``root_width`` of them), and the
    children of the depth d - 1 slots for d > 1 (``W * k``, slot-major). ``slot_child[p, d - 1, w]``
    says which depth-d candidate slot w of depth d is, and ``child_logp[p, d - 1, w]`` holds the
    children of that slot, candidates of depth d + 1. W is ``beam_width + 1``.
    """

    tokens: npt.NDArray[np.int32]
    """[T] output tokens, look-ahead included."""
    root_logp: npt.NDArray[np.float16]
    """[P, root_width] children of the root, in rank order."""
    slot_child: npt.NDArray[np.int16]
    """[P, D - 1, W] which candidate each slot is, or NO_SLOT."""
    child_logp: npt.NDArray[np.float16]
    """[P, D - 1, W, k] conditional log-probabilities in rank order; -inf in empty slots."""
    chain_logp: npt.NDArray[np.float16]
    """[P, C] conditional log-probability of the greedy chain's node at depths 1..C."""
    path_rank: npt.NDArray[np.int32]
    """[P, C] rank of the target's token at depths 1..C given the true tokens before it."""
    path_logp: npt.NDArray[np.float16]
    """[P, C] its conditional log-probability; -inf where the rank is a sentinel."""
    root_entropy: npt.NDArray[np.float16] | None = None
    """[P] optional: entropy (nats) of the draft distribution at the root."""
    slot_entropy: npt.NDArray[np.float16] | None = None
    """[P, D - 1, W] optional: entropy (nats) at every slot, 0 in empty ones."""


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class TraceArrays(PositionArrays):
    """The arrays of a trace, all of them read-only.

    Request q owns positions ``position_offset[q]:position_offset[q + 1]`` and tokens
    ``token_offset[q]:token_offset[q + 1]``.
    """

    position_offset: npt.NDArray[np.int64]
    """[Q + 1]"""
    token_offset: npt.NDArray[np.int64]
    """[Q + 1]"""


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """A recording: header, arrays and the digest of both.

    ``digest`` is the SHA-256 over the header's JSON and the arrays' content, not over file bytes.
    """

    header: TraceHeader
    arrays: TraceArrays
    digest: str

    @property
    def num_requests(self) -> int:
        """Recorded requests, Q."""
        return len(self.header.requests)

    @property
    def num_positions(self) -> int:
        """Recorded positions, P."""
        return int(self.arrays.position_offset[-1])

    def positions(self, request: int) -> slice:
        """Positions of one request."""
        offset = self.arrays.position_offset
        return slice(int(offset[request]), int(offset[request + 1]))

    def output_tokens(self, request: int) -> npt.NDArray[np.int32]:
        """Emitted tokens of one request (its look-ahead cut off), first token included."""
        start = int(self.arrays.token_offset[request])
        where = self.positions(request)
        return self.arrays.tokens[start : start + (where.stop - where.start) + 1]

    def all_tokens(self, request: int) -> npt.NDArray[np.int32]:
        """Tokens of one request, look-ahead included."""
        start, stop = self.arrays.token_offset[request : request + 2]
        return self.arrays.tokens[start:stop]

    def split(
        self, name: Literal["calibration", "evaluation"], task: str | None = None
    ) -> list[int]:
        """Requests of one split, optionally of one task."""
        return [
            q
            for q, info in enumerate(self.header.requests)
            if info.split == name and (task is None or info.task == task)
        ]
