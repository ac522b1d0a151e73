"""The recording's tokens in the place of the target's choice, and how far the target is from them.

Shape letters: N rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.audit import Margin

NO_TOKEN = -1
"""What follows the last recorded token; it matches no draft."""


@dataclass(frozen=True, slots=True)
class Recorded:
    """What one request is made to say."""

    prompt_tokens: int
    tokens: Sequence[int]
    """Output, look-ahead included."""


@dataclass(frozen=True, slots=True)
class RecordedTokens:
    """A :class:`gpu_backend.sampling.TokenRule` that says what was recorded.

    The seed of a request is its key here. What the target would have chosen is noted beside it.
    """

    recorded: Mapping[int, Recorded]
    gaps: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    """By request and output token: logits by which the target's best token lies above the recorded
    one; not a number where the target was not asked."""
    bests: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Logit of the best token, likewise."""

    def choose(self, logits_NV: Tensor, seed_N: Tensor, position_N: Tensor) -> Tensor:
        """int64 [N]: the recorded token of each row's request at its position."""
        places = [
            position - self.recorded[seed].prompt_tokens
            for seed, position in zip(seed_N.tolist(), position_N.tolist(), strict=True)
        ]
        tokens = [self._token(*at) for at in zip(seed_N.tolist(), places, strict=True)]
        token_N = torch.tensor(tokens, device=logits_NV.device)
        best_N = logits_NV.max(dim=1).values.double()
        said_N = logits_NV.gather(1, token_N.clamp(min=0)[:, None])[:, 0].double()
        gaps, bests = (best_N - said_N).tolist(), best_N.tolist()
        for seed, place, token, gap, best in zip(
            seed_N.tolist(), places, tokens, gaps, bests, strict=True
        ):
            if token != NO_TOKEN:
                # A row whose walk has ended is asked again for later places. Whoever asks last
                # for a place stands there: a place is walked through once, when it is committed.
                self._noted(self.gaps, seed)[place] = gap
                self._noted(self.bests, seed)[place] = best
        return token_N

    def near_ties(
        self, outputs: Mapping[int, int], margin: Margin
    ) -> tuple[npt.NDArray[np.float64], int, int]:
        """How often the target would have said something else.

        Args:
            outputs: emitted tokens by request.
            margin: what counts as a near-tie.

        Returns:
            Gaps in logits where the target's best token is another one, tokens in all, and how
            many of the gaps are beyond the margin.
        """
        gaps = np.concatenate([self.gaps[request][:n] for request, n in outputs.items()])
        bests = np.concatenate([self.bests[request][:n] for request, n in outputs.items()])
        differs = gaps > 0
        beyond = [
            not margin.allows(gap, best)
            for gap, best in zip(gaps[differs], bests[differs], strict=True)
        ]
        return gaps[differs], len(gaps), sum(beyond)

    def _token(self, seed: int, place: int) -> int:
        tokens = self.recorded[seed].tokens
        return int(tokens[place]) if place < len(tokens) else NO_TOKEN

    def _noted(
        self, notes: dict[int, npt.NDArray[np.float64]], seed: int
    ) -> npt.NDArray[np.float64]:
        return notes.setdefault(seed, np.full(len(self.recorded[seed].tokens), np.nan))
