"""What followed a context where the most of it stood before, by follower.

The text lies in one growing buffer with a fixed number of tokens that never occur before it, so
that a row of tokens ends at every place, the first ones included, and all are compared at once.

Shape letters: M places, W tokens of a row, N tokens of the text and room for more.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]

Seen = tuple[int, int, int]
"""Tokens of a context that stood before a follower, how often, and the follower's last place."""

BEFORE_TEXT: Final = int(np.iinfo(np.int32).min)
"""Stands before the text; no token."""

BEFORE_CONTEXT: Final = BEFORE_TEXT + 1
"""Stands before a context; neither a token nor what stands before the text."""

FIRST_ROOM: Final = 256
"""Tokens that fit before the buffer grows for the first time."""

FEW: Final = 128
"""Places up to which a loop is faster than sorting."""

LENGTH_BITS: Final = 16
"""Bits of a match's length beside its follower in one number."""


class LongestMatches:
    """A growing text, and the longest match of a context before each follower."""

    def __init__(self, longest: int) -> None:
        """Start with an empty text; matches of up to ``longest`` tokens are told apart."""
        self._width = longest + 1
        self._length = 0
        self._text_N = np.full(self._width + FIRST_ROOM, BEFORE_TEXT, dtype=np.int32)
        self._rows = self._view()

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        end = self._width + self._length + len(tokens)
        if end > len(self._text_N):
            grown_N = np.full(2 * end, BEFORE_TEXT, dtype=np.int32)
            grown_N[: len(self._text_N)] = self._text_N
            self._text_N = grown_N
            self._rows = self._view()
        self._text_N[end - len(tokens) : end] = tokens
        self._length += len(tokens)

    def followers(self, ends_M: IntArray, context: Sequence[int]) -> dict[int, Seen]:
        """What stood behind ``ends_M``, by follower, where most of the context stood before it.

        Args:
            ends_M: ascending places of tokens that are not the last of the text.
            context: tokens; of more than the ``longest``, the last ones count.

        Returns:
            For every token that stood behind one of the places: the longest match before it, how
            many matches it has of that length, and its place behind the last of these.
        """
        rows_MW = self._rows[ends_M]
        lengths_M = self._agreeing(rows_MW[:, :-1], context)
        group = _in_a_loop if len(ends_M) <= FEW else _by_sorting
        return group(rows_MW[:, -1], lengths_M, ends_M + 1)

    def _agreeing(self, rows_MW: npt.NDArray[np.int32], context: Sequence[int]) -> IntArray:
        last = context[1 - self._width :]
        context_W = [BEFORE_CONTEXT] * (self._width - len(last)) + [*last]
        # The first of a row never agrees, so there is always one that does not.
        differs_MW = rows_MW != np.array(context_W, dtype=np.int32)
        lengths_M: IntArray = differs_MW[:, ::-1].argmax(axis=1)
        return lengths_M

    def _view(self) -> npt.NDArray[np.int32]:
        """Row i holds the tokens up to place i, and the one behind it."""
        return np.lib.stride_tricks.sliding_window_view(self._text_N[1:], self._width + 1)


def _in_a_loop(
    followers_M: npt.NDArray[np.int32], lengths_M: IntArray, places_M: IntArray
) -> dict[int, Seen]:
    found: dict[int, Seen] = {}
    for token, length, place in zip(
        followers_M.tolist(), lengths_M.tolist(), places_M.tolist(), strict=True
    ):
        longest, count, _ = found.get(token, (-1, 0, 0))
        if length > longest:
            found[token] = (length, 1, place)
        elif length == longest:
            found[token] = (length, count + 1, place)
    return found


def _by_sorting(
    followers_M: npt.NDArray[np.int32], lengths_M: IntArray, places_M: IntArray
) -> dict[int, Seen]:
    keys_M = (followers_M.astype(np.int64) << LENGTH_BITS) | lengths_M
    order_M = keys_M.argsort(kind="stable")
    keys_M = keys_M[order_M]
    tokens_M = keys_M >> LENGTH_BITS
    # The last of a token's keys has its longest match, and of equal keys the last place.
    last = np.append(np.flatnonzero(tokens_M[1:] != tokens_M[:-1]), len(keys_M) - 1)
    counts = last + 1 - keys_M.searchsorted(keys_M[last])
    seen = zip(
        (keys_M[last] & ((1 << LENGTH_BITS) - 1)).tolist(),
        counts.tolist(),
        places_M[order_M[last]].tolist(),
        strict=True,
    )
    return dict(zip(tokens_M[last].tolist(), seen, strict=True))
