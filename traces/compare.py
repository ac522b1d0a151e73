"""Two recordings of the same prompts, put side by side: the content of ``simulate traces compare``.

Nothing is printed here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from traces.alignment import Alignment, RequestPair, align
from traces.content_difference import ContentDifference, content_difference
from traces.header import FieldDifference, differing_fields
from traces.policy_difference import PolicyDifference, Replaying, policy_differences
from traces.schema import RequestInfo, Trace
from traces.validate import named_arrays

TOKEN_ARRAYS: Final = ("tokens",)
OFFSETS: Final = ("position_offset", "token_offset")


@dataclass(frozen=True, slots=True)
class Comparison:
    """Where two recordings differ."""

    digests: tuple[str, str]
    is_identical: bool
    """The same requests, with the same data and equal arrays, in whichever order;
    headers may still differ in the fields listed."""
    header_fields: tuple[FieldDifference, ...]
    only_one: tuple[str, ...]
    """Requests of the first recording that the other lacks."""
    only_other: tuple[str, ...]
    request_fields: dict[str, int]
    """Common requests whose data differ in a field, such as ``max_new_tokens``."""
    arrays_in_one_only: tuple[str, ...]
    """Optional arrays that one recording lacks."""
    requests: tuple[RequestPair, ...]
    """Every common request."""
    positions: int
    """Positions that are compared."""
    content: ContentDifference | None
    """None without a common position."""
    replaying: Replaying
    policies: tuple[PolicyDifference, ...]


def compare(
    one: Trace,
    other: Trace,
    *,
    labels: tuple[str, str],
    policies: Sequence[str] | None = None,
    replaying: Replaying | None = None,
) -> Comparison:
    """Compare two recordings request by request.

    Args:
        one: a valid trace.
        other: a valid trace with the same tokenizer, widths and levels.
        labels: what messages call the two.
        policies: policies to replay on both; a representative set by default.
        replaying: how many positions are replayed, and in which batches.

    Raises:
        InputError: the formats differ, a request occurs twice in one recording, or a policy that
            was asked for cannot be replayed.
    """
    replaying = replaying or Replaying()
    alignment = align(one, other, labels)
    request_fields = _request_fields(one, other, alignment)
    return Comparison(
        digests=(one.digest, other.digest),
        is_identical=not (alignment.only_one or alignment.only_other or request_fields)
        and all(_same_arrays(one, other, pair) for pair in alignment.pairs),
        header_fields=tuple(differing_fields(one.header, other.header)),
        only_one=alignment.only_one,
        only_other=alignment.only_other,
        request_fields=request_fields,
        arrays_in_one_only=tuple(
            sorted(named_arrays(one.arrays).keys() ^ named_arrays(other.arrays).keys())
        ),
        requests=alignment.pairs,
        positions=alignment.num_positions,
        content=content_difference(one, other, alignment),
        replaying=replaying,
        policies=policy_differences(one, other, alignment, policies, replaying),
    )


def _request_fields(one: Trace, other: Trace, alignment: Alignment) -> dict[str, int]:
    counts: Counter[str] = Counter()
    for pair in alignment.pairs:
        infos = one.header.requests[pair.index_one], other.header.requests[pair.index_other]
        counts.update(
            name
            for name in RequestInfo.model_fields
            if getattr(infos[0], name) != getattr(infos[1], name)
        )
    return dict(sorted(counts.items()))


def _same_arrays(one: Trace, other: Trace, pair: RequestPair) -> bool:
    arrays = named_arrays(one.arrays), named_arrays(other.arrays)
    if arrays[0].keys() != arrays[1].keys():
        return False
    sides = (one, pair.index_one), (other, pair.index_other)
    for name in arrays[0].keys() - set(OFFSETS):
        rows = [_rows(trace, request, name) for trace, request in sides]
        if not np.array_equal(arrays[0][name][rows[0]], arrays[1][name][rows[1]]):
            return False
    return True


def _rows(trace: Trace, request: int, name: str) -> slice:
    """A request's rows of one array."""
    if name not in TOKEN_ARRAYS:
        return trace.positions(request)
    start, stop = trace.arrays.token_offset[request : request + 2]
    return slice(int(start), int(stop))
