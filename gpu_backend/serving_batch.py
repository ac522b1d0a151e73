"""The requests of a serving engine: what was asked, how far each is, which slot holds it.

A request passes through: *waiting* in the queue; *reading*, its prompt goes through the models in
chunks; *decoding*, from its first output token on; *finished*, by a stop token, by length or by
being aborted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import torch

from echo_policies.api import CostView, StepContext
from echo_policies.errors import InputError

FinishReason = Literal["stop", "length", "abort"]


@dataclass(frozen=True, slots=True)
class ServeRequest:
    """One prompt to answer."""

    number: int
    """Names the request in records and results; unique within a run."""
    prompt: Sequence[int]
    max_new_tokens: int
    seed: int = 0
    """Of the noise its tokens are drawn with."""
    arrival_s: float = 0.0
    """Seconds after the start of the run."""

    def __post_init__(self) -> None:
        """Refuse what cannot be answered.

        Raises:
            InputError: the prompt is empty, or no token is wanted.
        """
        if not self.prompt:
            raise InputError(
                f"A prompt must have at least one token; request {self.number} has none."
            )
        if self.max_new_tokens < 1:
            raise InputError(
                f"max_new_tokens must be at least 1; request {self.number} asks for "
                f"{self.max_new_tokens}."
            )

    @property
    def num_tokens(self) -> int:
        """Tokens of prompt and longest output."""
        return len(self.prompt) + self.max_new_tokens


@dataclass(slots=True)
class Serving:
    """A request in a slot."""

    request: ServeRequest
    arrival: int
    """Arrival number, for first-come orders."""
    num_read: int = 0
    """Prompt tokens read."""
    output: list[int] = field(default_factory=list)
    first_token_s: float = 0.0
    finish_reason: FinishReason | None = None

    @property
    def is_decoding(self) -> bool:
        """Whether the first output token is there, and more may come."""
        return bool(self.output) and self.finish_reason is None

    @property
    def remaining(self) -> int:
        """Output tokens left of ``max_new_tokens``."""
        return self.request.max_new_tokens - len(self.output)

    def emit(self, tokens: Sequence[int], stops: frozenset[int]) -> int:
        """Append tokens up to the first stop token or the length limit; returns how many.

        Whichever comes first ends the output; a stop token is part of it.
        """
        for count, token in enumerate(tokens, start=1):
            self.output.append(token)
            if token in stops:
                self.finish_reason = "stop"
            elif self.remaining == 0:
                self.finish_reason = "length"
            if self.finish_reason is not None:
                return count
        return len(tokens)


@dataclass(frozen=True, slots=True)
class Finished:
    """A request that has left the engine."""

    request: ServeRequest
    output: tuple[int, ...]
    finish_reason: FinishReason
    first_token_s: float
    finish_s: float


class ServingBatch:
    """``num_slots`` slots; the number of a slot is its request's key everywhere in the engine."""

    def __init__(self, num_slots: int) -> None:
        """Make idle slots."""
        self.slots: list[Serving | None] = [None] * num_slots

    @property
    def num_slots(self) -> int:
        """Most requests served at a time, B."""
        return len(self.slots)

    @property
    def is_empty(self) -> bool:
        """Whether no slot holds a request."""
        return not any(self.slots)

    def idle(self) -> list[int]:
        """Slots without a request."""
        return [slot for slot, held in enumerate(self.slots) if held is None]

    def reading(self) -> list[int]:
        """Slots whose prompt is not read yet, first come first."""
        found = [slot for slot, held in enumerate(self.slots) if held and not held.output]
        return sorted(found, key=lambda slot: self.at(slot).arrival)

    def decoding(self) -> list[int]:
        """Slots that take part in a step."""
        return [slot for slot, held in enumerate(self.slots) if held and held.is_decoding]

    def at(self, slot: int) -> Serving:
        """What a slot holds."""
        held = self.slots[slot]
        assert held is not None, f"slot {slot} is idle"
        return held

    def context(
        self,
        k_max: int,
        step: int,
        device: torch.device,
        *,
        costs: CostView | None = None,
        unread: tuple[int, ...] = (),
        looks_up: bool = False,
    ) -> StepContext:
        """What the policy may know at the start of a step; idle slots are not live.

        Args:
            k_max: of the batch.
            step: number of the step.
            device: of the tensors.
            costs: what the policy may know of them.
            unread: tokens by slot that the draft model is behind.
            looks_up: whether the drafter looks up where it can.
        """
        decoding = set(self.decoding())
        remaining = [
            held.remaining if held and slot in decoding else 1
            for slot, held in enumerate(self.slots)
        ]
        arrival = [held.arrival if held else 0 for held in self.slots]
        live = [slot in decoding for slot in range(self.num_slots)]
        return StepContext(
            k_max=k_max,
            step=step,
            live_B=torch.tensor(live, device=device),
            remaining_B=torch.tensor(remaining, device=device),
            arrival_B=torch.tensor(arrival, device=device),
            level_limit=max(remaining) - 1,
            num_live=len(decoding),
            costs=costs,
            remaining=tuple(remaining),
            unread=unread,
            looks_up=looks_up,
        )
