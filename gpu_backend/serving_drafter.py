"""What the serving engine asks of a drafter, beyond the decision loop's protocol.

Slots of the batch name requests. A request's life: :meth:`~ServingDrafter.admit`, its prompt in
chunks by :meth:`~ServingDrafter.read`, its output in pieces by :meth:`~ServingDrafter.commit`,
:meth:`~ServingDrafter.release` on every way out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn, Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from echo_policies.session import Drafter
from gpu_backend.candidates import Children
from gpu_backend.ragged_model import Extension


class ServingDrafter(Drafter, Protocol):
    """Proposes candidates for the requests of a batch.

    A drafter may be any number of tokens behind when :meth:`begin` is called, the last committed
    token always among them; what it then reads is its own business.
    """

    @property
    def taps(self) -> tuple[int, ...]:
        """Features of the target that it reads, by the layer whose input they are; ascending."""
        ...

    @property
    def token_layers(self) -> Sequence[npt.NDArray[np.int64]]:
        """Token ids [B, W] of the candidates of every depth of the step."""
        ...

    @property
    def revealed(self) -> Sequence[tuple[Children, Frontier | None]]:
        """Children of the step's expansions, the roots' first, and which nodes were expanded."""
        ...

    @property
    def model_layers(self) -> Sequence[Tensor]:
        """Which candidates of every depth of the step a model proposed, bool [B, W]."""
        ...

    @property
    def num_forwards(self) -> int:
        """Layers of the step that took a forward of a draft model."""
        ...

    @property
    def unread(self) -> tuple[int, ...]:
        """Tokens by slot that a model must read before it can draft; empty without a model."""
        ...

    @property
    def looks_up(self) -> bool:
        """Whether candidates are looked up where they can be, with a model for the others."""
        ...

    def require_room(self, num_tokens: int) -> None:
        """Refuse a request of so many tokens if it can never be served.

        Raises:
            InputError: naming the limit.
        """
        ...

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Make room for a request of so many tokens in all; False while there is none."""
        ...

    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None) -> None:
        """Take in prompt tokens; called before the request's first output token is known.

        Args:
            chunks: the tokens.
            features: of each chunk's tokens, ``[tokens, taps * width]``; None without taps.
        """
        ...

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        """Take in emitted tokens, at least one; the last of them is the root of the next draft.

        Args:
            slot: the request.
            tokens: emitted since the last call.
            features: of the positions that the target has run since then, ``[tokens, taps *
                width]``: each token's predecessor. None without taps, and for the first output
                token, as the prompt's features have come by :meth:`read`.
        """
        ...

    def release(self, slot: int) -> None:
        """Forget a request."""
        ...

    def check_integrity(self, slots: Sequence[int]) -> None:
        """Check that exactly these requests hold room; for tests and debugging."""
        ...

    def tokens(self) -> npt.NDArray[np.int64]:
        """Token ids [B, N] of the step's candidates, depth-major; any where there is none."""
        ...


class NoDrafter:
    """Drafts nothing: plain decoding needs no draft model and pays for none."""

    signals: frozenset[str] = frozenset({"ranks", "path_logp", "entropy"})
    """All of them, so that a policy is refused for what is missing: a draft model."""
    taps: tuple[int, ...] = ()
    token_layers: tuple[npt.NDArray[np.int64], ...] = ()
    revealed: tuple[tuple[Children, Frontier | None], ...] = ()
    model_layers: tuple[Tensor, ...] = ()
    num_forwards: int = 0
    unread: tuple[int, ...] = ()
    looks_up: bool = False

    def objection(self, plan: DraftPlan) -> str | None:
        """Refuse every plan that drafts."""
        return "drafts, but there is no draft model; give --draft" if plan.levels else None

    def require_room(self, num_tokens: int) -> None:
        """Refuses nothing."""

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Needs no room."""
        del slot, num_tokens
        return True

    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None) -> None:
        """Reads nothing."""

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None) -> None:
        """Keeps nothing."""

    def release(self, slot: int) -> None:
        """Holds nothing."""

    def check_integrity(self, slots: Sequence[int]) -> None:
        """Holds nothing."""

    def tokens(self) -> NoReturn:
        """Never called: there are no candidates."""
        raise NotImplementedError

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> NoReturn:
        """Never called: the session drafts no level."""
        raise NotImplementedError

    def expand(self, layer: LayerView, frontier: Frontier) -> NoReturn:
        """Never called."""
        raise NotImplementedError
