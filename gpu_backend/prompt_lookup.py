"""Prompt lookup: what followed the same words earlier in prompt and output, with probabilities.

Plain prompt lookup copies what followed one earlier occurrence of the last few tokens. Here every
earlier occurrence counts, and longer matches outweigh shorter ones, by prediction by partial
matching (Cleary and Witten, 1984, IEEE Trans. Communications 32:396): under a context of n tokens
of which ``total`` occurrences had ``distinct`` followers, a follower seen ``count`` times has
probability ``count / (total + k(n) * distinct)``, and what is left goes to the next shorter
context, in which followers that were already named do not count. So the best child of the best
child is a lookup chain, and the wider tree stands for the retrieval family; no model runs at all.

Escape method C (Moffat, 1990, same journal 38:1917) has ``k(n) = 1`` at every order, so one
occurrence is worth 0.5 whatever matched. Where text is copied that is far too little, and after a
single token too much. The weight here falls with the order, :func:`escape_weight`.

Shape letters: M places; k children.
"""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from gpu_backend.longest_matches import LongestMatches

PROMPT_LOOKUP: Final = "prompt-lookup"
"""What commands take for a draft that is no model but looks the text up in itself."""

MAX_NGRAM: Final = 16
"""Longest context that is looked up, in tokens."""

ESCAPE_SCALE: Final = 2.0
"""Weight of a distinct follower of a single token, in occurrences."""

ESCAPE_POWER: Final = 1.5
"""How fast that weight falls with the length of the context."""

CONFIDENCE: Final = 0.5
"""Probability of what a lookup finds for which no draft model is asked (docs/results.md)."""

MODEL_LEVELS: Final = 2
"""Depths that a draft model proposes beside lookup; likewise."""

Counted = tuple[int, int, int]
"""How often a follower was seen behind a context, its last place, and the follower itself."""


def escape_weight(order: int) -> float:
    """Occurrences that each distinct follower of a context of ``order`` tokens counts for escape.

    Fitted to what followed in the texts of the recording ``qwen2.5-coder-1.5b``; docs/traces.md
    has the figures.
    """
    return ESCAPE_SCALE / float(order**ESCAPE_POWER)


@dataclass(frozen=True, slots=True)
class Followers:
    """What may follow a context, best first."""

    tokens: tuple[int, ...]
    """By (log-probability descending, latest occurrence first)."""
    log_probs: tuple[float, ...]
    """Their sum in probability is below 1: the rest is for tokens never seen after the context."""
    escape: float
    """Probability that some other token follows."""

    def entropy(self, vocab_size: int) -> float:
        """Nats, if every token that is not among them is equally likely."""
        named = -sum(math.exp(logp) * logp for logp in self.log_probs)
        others = vocab_size - len(self.tokens)
        if self.escape <= 0 or others <= 0:
            return named
        return named - self.escape * math.log(self.escape / others)


class ContextIndex:
    """A growing text, and what followed any context of it or of tokens drafted behind it.

    Kept are the text and the places of every pair of neighbours, so memory is linear in the text.
    Pairs say what followed the last token of a context. How much more of it agrees is compared at
    the places of its last two tokens, at all of them together.
    """

    def __init__(self, max_ngram: int = MAX_NGRAM) -> None:
        """Start with an empty text; contexts of 1 to ``max_ngram`` tokens will be known."""
        self._max_ngram = max_ngram
        self._text: list[int] = []
        self._matches = LongestMatches(max_ngram)
        self._places: dict[int, dict[int, array[int]]] = {}
        """By token and follower: where the follower stands, ascending."""

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        self._matches.extend(tokens)
        first = max(1, len(self._text))
        self._text.extend(tokens)
        for place in range(first, len(self._text)):
            after = self._places.setdefault(self._text[place - 1], {})
            token = self._text[place]
            if token in after:
                after[token].append(place)
            else:
                after[token] = array("q", (place,))

    def followers(self, drafted: Sequence[int] = (), length: int | None = None) -> Followers:
        """Look up what follows the text and ``drafted`` behind it.

        Args:
            drafted: tokens behind the text that are not part of it.
            length: use only so many tokens of the text, as if the rest had not come yet.
        """
        known = len(self._text) if length is None else length
        context = self._context(drafted, known)
        by_order = self._seen_behind(context, known)
        shares: list[tuple[float, int, int]] = []
        escape = 1.0
        for order in sorted(by_order, reverse=True):
            seen = by_order[order]
            weight = escape_weight(order) * len(seen)
            whole = sum(count for count, _, _ in seen) + weight
            shares += [(escape * count / whole, latest, token) for count, latest, token in seen]
            escape = escape * weight / whole
        shares.sort(reverse=True)
        return Followers(
            tokens=tuple(token for _, _, token in shares),
            log_probs=tuple(math.log(share) for share, _, _ in shares),
            escape=escape,
        )

    def _context(self, drafted: Sequence[int], known: int) -> list[int]:
        first = max(0, known - self._max_ngram)
        return [*self._text[first:known], *drafted][-self._max_ngram :]

    def _seen_behind(self, context: list[int], known: int) -> dict[int, list[Counted]]:
        """By order, the followers that no longer context had."""
        by_order: dict[int, list[Counted]] = defaultdict(list)
        ends_M = self._ends(context, known)
        longer = self._matches.followers(ends_M, context) if len(ends_M) else {}
        for token, (order, count, latest) in longer.items():
            by_order[order].append((count, latest, token))
        after = self._places.get(context[-1], {}) if context else {}
        for token, places in after.items():
            if token not in longer and (count := _num_below(places, known)):
                by_order[1].append((count, places[count - 1], token))
        return by_order

    def _ends(self, context: list[int], known: int) -> npt.NDArray[np.int64]:
        """Where the last two tokens of a context end in the known text, but at its end."""
        if len(context) <= 1:
            return np.empty(0, dtype=np.int64)
        places = self._places.get(context[-2], {}).get(context[-1], array("q"))
        return np.array(places, dtype=np.int64)[: _num_below(places, known - 1)]


def _num_below(places: Sequence[int], limit: int) -> int:
    """How many of ascending places are below a limit; mostly all are."""
    if not places or places[-1] < limit:
        return len(places)
    return bisect_left(places, limit)
