"""Features and tokens of one request that are not paired yet.

Feature t is paired with token t + 1, so the two streams are one apart: the first token has no
pair, and the newest feature waits for the token that the target emits after it.

Shape letters: n rows, F features side by side.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


class PendingPairs:
    """The two streams of one request, as far as they have not been read."""

    def __init__(self) -> None:
        """Start before the first token."""
        self._tokens: list[int] = []
        self._features: list[Tensor] = []
        self._num_features = 0
        self._has_begun = False

    @property
    def num_pairs(self) -> int:
        """Pairs that are complete."""
        return min(len(self._tokens), self._num_features)

    def add(self, tokens: Sequence[int], features_nF: Tensor | None) -> None:
        """Go on with the streams.

        Args:
            tokens: the next of the text.
            features_nF: the next of the target's; None for none.
        """
        self._tokens += tokens if self._has_begun else tokens[1:]
        self._has_begun = True
        if features_nF is not None:
            self._features.append(features_nF)
            self._num_features += len(features_nF)

    def take(self, count: int) -> tuple[list[int], Tensor]:
        """Take so many complete pairs out: their tokens, and their features [n, F]."""
        features = torch.cat(self._features)
        # A copy, because a view would hold the memory of everything that was paired with it.
        self._features = [features[count:].clone()] if len(features) > count else []
        self._num_features -= count
        tokens, self._tokens = self._tokens[:count], self._tokens[count:]
        return tokens, features[:count]
