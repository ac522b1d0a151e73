"""The slots of a running batch: which request each holds and how far it is.

Shape letters: B slots, Q recorded requests.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from traces.records import IDLE
from traces.schema import Trace

Int1 = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class RequestTable:
    """What the engine needs of every recorded request, as arrays [Q]."""

    first_position: Int1
    num_tokens: Int1
    """Output tokens, the first one (from prefill) included."""
    max_new_tokens: Int1
    prompt_tokens: Int1

    @classmethod
    def of(cls, trace: Trace) -> RequestTable:
        """Read the table off a trace."""
        infos = trace.header.requests
        offset = trace.arrays.position_offset
        return cls(
            first_position=offset[:-1].copy(),
            num_tokens=np.diff(offset) + 1,
            max_new_tokens=np.array([info.max_new_tokens for info in infos], dtype=np.int64),
            prompt_tokens=np.array([info.prompt_tokens for info in infos], dtype=np.int64),
        )


class Batch:
    """B slots; tensors share memory with NumPy views, so that host and policy see the same.

    - ``done_B`` counts output tokens so far; a live request has at least one (from prefill).
    - A slot without a request is idle: its recorded request is ``IDLE`` and it counts nowhere.
    """

    def __init__(self, table: RequestTable, num_slots: int) -> None:
        """Make idle slots."""
        self._table = table
        self.request_B = np.full(num_slots, IDLE, dtype=np.int64)
        self.position_B = np.zeros(num_slots, dtype=np.int64)
        self.left_B = np.zeros(num_slots, dtype=np.int64)
        """Tokens until the recorded output ends; policies do not see it."""
        self.allowed_B = np.ones(num_slots, dtype=np.int64)
        """Tokens left of ``max_new_tokens``."""
        self.context_B = np.zeros(num_slots, dtype=np.int64)
        """Committed tokens, prompt included."""
        self.behind_B = np.zeros(num_slots, dtype=np.int64)
        """Committed tokens that the draft model has not read."""
        self.arrival_B = np.zeros(num_slots, dtype=np.int64)
        self.live_B = np.zeros(num_slots, dtype=bool)
        self.position_t, self.allowed_t, self.arrival_t, self.live_t = (
            torch.from_numpy(array)
            for array in (self.position_B, self.allowed_B, self.arrival_B, self.live_B)
        )

    @property
    def num_live(self) -> int:
        """Slots that hold a request."""
        return int(self.live_B.sum())

    @property
    def level_limit(self) -> int:
        """Most levels that any request has room for."""
        return int((self.allowed_B * self.live_B).max()) - 1

    def admit(self, slot: int, request: int, number: int, done: int = 1) -> None:
        """Put a recorded request into a slot.

        Args:
            slot: an idle slot.
            request: index of the recorded request.
            number: arrival number.
            done: output tokens that are there already; 1 right after prefill.
        """
        table = self._table
        self.request_B[slot] = request
        self.position_B[slot] = table.first_position[request] + done - 1
        self.left_B[slot] = table.num_tokens[request] - done
        self.allowed_B[slot] = max(int(table.max_new_tokens[request]) - done, 1)
        self.context_B[slot] = table.prompt_tokens[request] + done
        self.behind_B[slot] = 1
        self.arrival_B[slot] = number
        self.live_B[slot] = True

    def release(self, slot: int) -> None:
        """Empty a slot."""
        self.request_B[slot] = IDLE
        self.live_B[slot] = False
        self.position_B[slot] = self.left_B[slot] = 0
        self.context_B[slot] = self.behind_B[slot] = 0
        self.allowed_B[slot] = 1

    def commit(self, accepted_B: Tensor, *, has_drafted: bool) -> tuple[Int1, Int1]:
        """Advance every live request by its accepted tokens and the bonus token.

        Only tokens that are emitted count: an output that ends inside the block cuts the rest.

        Returns:
            emitted [B] and accepted [B].
        """
        accepted = np.asarray(accepted_B.numpy())
        emitted = np.minimum(accepted + 1, self.left_B)
        self.position_B += emitted
        self.left_B -= emitted
        self.allowed_B -= emitted
        np.maximum(self.allowed_B, 1, out=self.allowed_B)
        self.context_B += emitted
        if has_drafted:
            self.behind_B[:] = emitted
        else:
            self.behind_B += emitted
        return emitted, np.minimum(accepted, emitted)

    def finished(self) -> list[int]:
        """Slots whose request has emitted its whole output."""
        return [int(slot) for slot in np.flatnonzero(self.live_B & (self.left_B == 0))]
