"""Prompt lookup: what followed the same words earlier in prompt and output, with probabilities.

Plain prompt lookup copies what followed one earlier occurrence of the last few tokens. Here every
earlier occurrence counts, and longer matches outweigh shorter ones, by prediction by partial
matching with escape method C (Moffat, 1990, IEEE Trans. Communications 38:1917): under a context
of which ``total`` occurrences had ``distinct`` followers, a follower seen ``count`` times has
probability ``count / (total + distinct)``, and what is left goes to the next shorter context, in
which followers that were already named do not count. So the best child of the best child is a
lookup chain, and the wider tree stands for the retrieval family; no model runs at all.

Shape letters: k children.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Final

PROMPT_LOOKUP: Final = "prompt-lookup"
"""What commands take for a draft that is no model but looks the text up in itself."""

MAX_NGRAM: Final = 8
"""Longest context that is looked up, in tokens."""

CONFIDENCE: Final = 0.5
"""Probability of the best that a lookup finds for which no draft model is asked (docs/results.md)."""

MODEL_LEVELS: Final = 2
"""Depths that a draft model proposes beside lookup; likewise."""


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
    """Every context of a growing text, and where its followers stand."""

    def __init__(self, max_ngram: int = MAX_NGRAM) -> None:
        """Start with an empty text; contexts of 1 to ``max_ngram`` tokens will be known."""
        self._max_ngram = max_ngram
        self._text: list[int] = []
        self._places: dict[tuple[int, ...], list[int]] = defaultdict(list)

    def __len__(self) -> int:
        """Tokens of the text."""
        return len(self._text)

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens to the text."""
        for token in tokens:
            here = len(self._text)
            for length in range(1, min(self._max_ngram, here) + 1):
                self._places[tuple(self._text[here - length :])].append(here)
            self._text.append(token)

    def has_followed(self, drafted: Sequence[int], num_tokens: int) -> bool:
        """Whether the last ``num_tokens`` of the text and ``drafted`` stood in the text earlier.

        Something followed them then, and so does something behind every shorter context. A
        context longer than what is indexed counts by its last tokens that are.
        """
        size = min(num_tokens, self._max_ngram)
        context = (*self._text[max(0, len(self._text) - size) :], *drafted)[-size:]
        return len(context) == size and context in self._places

    def followers(self, drafted: Sequence[int] = (), length: int | None = None) -> Followers:
        """Look up what follows the text and ``drafted`` behind it.

        Args:
            drafted: tokens behind the text that are not part of it.
            length: use only so many tokens of the text, as if the rest had not come yet.
        """
        known = len(self._text) if length is None else length
        first = max(0, known - self._max_ngram)
        context = [*self._text[first:known], *drafted][-self._max_ngram :]
        found: dict[int, tuple[float, int]] = {}
        escape = 1.0
        for size in range(len(context), 0, -1):
            places = self._places.get(tuple(context[len(context) - size :]), ())
            # Places ascend, so those of the known text come first.
            seen = list(takewhile(lambda place: place < known, places))
            escape = self._add(seen, escape, found)
        ranked = sorted(found.items(), key=lambda item: (-item[1][0], -item[1][1]))
        return Followers(
            tokens=tuple(token for token, _ in ranked),
            log_probs=tuple(math.log(share) for _, (share, _) in ranked),
            escape=escape,
        )

    def _add(self, places: list[int], escape: float, found: dict[int, tuple[float, int]]) -> float:
        """Add the followers at ``places`` that are new, and return what is left to escape."""
        counts: Counter[int] = Counter()
        latest: dict[int, int] = {}
        for place in places:
            token = self._text[place]
            if token not in found:
                counts[token] += 1
                latest[token] = place
        if not counts:
            return escape
        whole = counts.total() + len(counts)
        for token, count in counts.items():
            found[token] = (escape * count / whole, latest[token])
        return escape * len(counts) / whole
