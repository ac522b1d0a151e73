"""Which positions of two recordings are the same state: same prompt, same output so far.

Up to and with the last common token the draft sees the same text in both; beyond it positions are
not comparable. Shape letters: M common positions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from echo_policies.errors import InputError
from traces.request_key import key_label, requests_by_key
from traces.schema import Trace, TraceHeader

Int1 = npt.NDArray[np.int64]

FORMAT: Final = (
    "tokenizer",
    "vocab_size",
    "levels",
    "beam_width",
    "root_width",
    "top_k",
    "chain_levels",
)
"""Header fields without which ranks, slots and tokens of two recordings mean different things."""


@dataclass(frozen=True, slots=True)
class Parting:
    """The first output token in which two recordings of a request differ."""

    token: int
    """Its place in the output, which is also the number of tokens that agree before it."""
    rank_one: int | None
    """Rank of the first recording's token in its draft's proposal; None for the token that comes
    out of prefill."""
    rank_other: int | None


@dataclass(frozen=True, slots=True)
class RequestPair:
    """One request that is in both recordings."""

    request: str
    index_one: int
    index_other: int
    tokens_one: int
    """Recorded tokens, look-ahead included."""
    tokens_other: int
    has_same_prompt: bool
    """Whether the prompts have equally many tokens; where not, nothing is compared."""
    parting: Parting | None
    """None where the outputs agree as far as both go."""
    positions: int
    """Positions that are compared: the common ones."""


@dataclass(frozen=True, slots=True, eq=False)
class Alignment:
    """The requests and positions that two recordings have in common."""

    pairs: tuple[RequestPair, ...]
    only_one: tuple[str, ...]
    """Requests of the first recording that the other lacks."""
    only_other: tuple[str, ...]
    row_one_M: Int1
    """Position in the first recording."""
    row_other_M: Int1
    pair_M: Int1
    """Pair that each common position belongs to."""
    offset_M: Int1
    """Place of its root in the output, from 0."""
    reach_M: Int1
    """Levels below the root at which the target's tokens are common too."""

    @property
    def num_positions(self) -> int:
        """Common positions, M."""
        return len(self.row_one_M)


def align(one: Trace, other: Trace, labels: tuple[str, str]) -> Alignment:
    """Pair up requests and positions.

    Args:
        one: a valid trace.
        other: a valid trace of the same format.
        labels: what messages call the two.

    Raises:
        InputError: the tokenizers, widths or levels differ, or a request occurs twice in one.
    """
    _check_format(one.header, other.header, labels)
    keys_one = requests_by_key(one, labels[0])
    keys_other = requests_by_key(other, labels[1])
    pairs = tuple(
        _pair(one, other, key_label(key), q, keys_other[key])
        for key, q in keys_one.items()
        if key in keys_other
    )
    offset = np.concatenate([np.zeros(0, np.int64), *(np.arange(pair.positions) for pair in pairs)])
    sizes = np.array([pair.positions for pair in pairs], np.int64)
    index = np.repeat(np.arange(len(pairs)), sizes)
    starts = [
        (one.positions(p.index_one).start, other.positions(p.index_other).start) for p in pairs
    ]
    start_one, start_other = np.array(starts, np.int64).reshape(-1, 2).T
    common = np.array([_common_tokens(pair) for pair in pairs], np.int64)
    return Alignment(
        pairs=pairs,
        only_one=tuple(key_label(key) for key in keys_one if key not in keys_other),
        only_other=tuple(key_label(key) for key in keys_other if key not in keys_one),
        row_one_M=start_one[index] + offset,
        row_other_M=start_other[index] + offset,
        pair_M=index,
        offset_M=offset,
        reach_M=common[index] - 1 - offset,
    )


def _check_format(one: TraceHeader, other: TraceHeader, labels: tuple[str, str]) -> None:
    for field in FORMAT:
        values = getattr(one, field), getattr(other, field)
        if values[0] != values[1]:
            raise InputError(
                f"Traces that are compared must agree in {field}; got {values[0]!r} in {labels[0]} "
                f"and {values[1]!r} in {labels[1]}. Record them alike."
            )


def _pair(one: Trace, other: Trace, request: str, q: int, r: int) -> RequestPair:
    tokens = _tokens(one, q), _tokens(other, r)
    shorter = min(len(tokens[0]), len(tokens[1]))
    differs = np.flatnonzero(tokens[0][:shorter] != tokens[1][:shorter])
    common = int(differs[0]) if differs.size else shorter
    is_same = one.header.requests[q].prompt_tokens == other.header.requests[r].prompt_tokens
    sizes = [where.stop - where.start for where in (one.positions(q), other.positions(r))]
    parting = None
    if differs.size and is_same:
        parting = Parting(common, _rank(one, q, common), _rank(other, r, common))
    return RequestPair(
        request=request,
        index_one=q,
        index_other=r,
        tokens_one=len(tokens[0]),
        tokens_other=len(tokens[1]),
        has_same_prompt=is_same,
        parting=parting,
        positions=min(common, *sizes) if is_same else 0,
    )


def _common_tokens(pair: RequestPair) -> int:
    if pair.parting is not None:
        return pair.parting.token
    return min(pair.tokens_one, pair.tokens_other)


def _tokens(trace: Trace, request: int) -> npt.NDArray[np.int32]:
    start, stop = trace.arrays.token_offset[request : request + 2]
    return trace.arrays.tokens[int(start) : int(stop)]


def _rank(trace: Trace, request: int, token: int) -> int | None:
    """Rank that the draft gave to an output token; None where no position proposes it."""
    where = trace.positions(request)
    if not 1 <= token <= where.stop - where.start:
        return None
    return int(trace.arrays.path_rank[where.start + token - 1, 0])
