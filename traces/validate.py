"""What every trace must satisfy, checked when it is loaded.

Here: the stages, the layout (header, dtypes, shapes) and the requests (offsets, lengths, splits);
`traces.invariants` has the content. Each invariant is one function that returns one message naming
the array, the index and the value of the first violation, or ``None``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from typing import Final

import numpy as np

from echo_policies.errors import TraceError
from traces.invariants import CONTENT, Array, Invariant
from traces.schema import Trace, TraceArrays, TraceHeader

DTYPES: Final[dict[str, str]] = {
    "position_offset": "int64",
    "token_offset": "int64",
    "tokens": "int32",
    "slot_child": "int16",
    "path_rank": "int32",
}
"""Arrays that are not float16."""


ADVICE: Final = "The file is damaged or its writer is faulty: record or generate it again."


def validate(trace: Trace) -> None:
    """Check every invariant of a trace.

    Raises:
        TraceError: at the first violation.
    """
    for message in violations(trace.header, trace.arrays):
        raise TraceError(f"Trace {trace.header.name!r}: {message}. {ADVICE}")


def check(trace: Trace) -> list[str]:
    """One message per broken invariant; an empty list for a valid trace."""
    return list(violations(trace.header, trace.arrays))


def violations(header: TraceHeader, arrays: TraceArrays) -> Iterator[str]:
    """Yield one message per broken invariant, stage by stage.

    A stage presupposes the ones before it, so nothing follows a stage with a violation.
    """
    for stage in STAGES:
        broken = False
        for invariant in stage:
            # Comparing a NaN is no accident here: finding it is one of the invariants.
            with np.errstate(invalid="ignore"):
                message = invariant(header, arrays)
            if message is not None:
                broken = True
                yield message
        if broken:
            return


def named_arrays(arrays: TraceArrays) -> dict[str, Array]:
    """The arrays that are present, by name, in the order of the format."""
    pairs = ((field.name, getattr(arrays, field.name)) for field in fields(arrays))
    return {name: array for name, array in pairs if array is not None}


def expected_shapes(header: TraceHeader, arrays: TraceArrays) -> dict[str, tuple[int, ...]]:
    """Shape of every array; P and T are taken from ``root_logp`` and ``tokens``."""
    P = len(arrays.root_logp) if arrays.root_logp.ndim else 0
    Q, D, W, C = len(header.requests), header.levels, header.beam_width + 1, header.chain_levels
    return {
        "position_offset": (Q + 1,),
        "token_offset": (Q + 1,),
        "tokens": (arrays.tokens.size,),
        "root_logp": (P, header.root_width),
        "slot_child": (P, D - 1, W),
        "child_logp": (P, D - 1, W, header.top_k),
        "chain_logp": (P, C),
        "path_rank": (P, C),
        "path_logp": (P, C),
        "root_entropy": (P,),
        "slot_entropy": (P, D - 1, W),
    }


# Layout: the header agrees with itself and with the arrays' types and shapes.


def _not_empty(header: TraceHeader, arrays: TraceArrays) -> str | None:
    if not header.requests:
        return "header.requests must hold at least one request; got 0"
    if arrays.root_logp.ndim and not len(arrays.root_logp):
        return "root_logp must hold at least one position; got 0"
    return None


def _levels(header: TraceHeader, _: TraceArrays) -> str | None:
    if header.chain_levels < header.levels:
        given = f"{header.chain_levels} and {header.levels}"
        return f"header.chain_levels must be at least header.levels; got {given}"
    return None


def _dtypes(_: TraceHeader, arrays: TraceArrays) -> str | None:
    for name, array in named_arrays(arrays).items():
        dtype = DTYPES.get(name, "float16")
        if array.dtype != np.dtype(dtype):
            return f"{name} must have dtype {dtype}; got {array.dtype}"
    return None


def _shapes(header: TraceHeader, arrays: TraceArrays) -> str | None:
    shapes = expected_shapes(header, arrays)
    for name, array in named_arrays(arrays).items():
        if array.shape != shapes[name]:
            return f"{name} must have shape {shapes[name]} by the header; got {array.shape}"
    return None


# Requests: offsets, lengths and splits.


def _offsets(name: str, total: str) -> Invariant:
    def invariant(_: TraceHeader, arrays: TraceArrays) -> str | None:
        offset: Array = getattr(arrays, name)
        if offset[0] != 0:
            return f"{name}[0] must be 0; got {offset[0]}"
        falls = np.flatnonzero(offset[1:] < offset[:-1])
        if falls.size:
            q = int(falls[0]) + 1
            return f"{name} must be non-decreasing; entry {q} is {offset[q]} after {offset[q - 1]}"
        size = len(getattr(arrays, total))
        if offset[-1] != size:
            rows = f"the {size} rows of {total}"
            return f"{name}[{len(offset) - 1}] must be {size}, {rows}; got {offset[-1]}"
        return None

    return invariant


def _token_counts(header: TraceHeader, arrays: TraceArrays) -> str | None:
    tokens, positions = np.diff(arrays.token_offset), np.diff(arrays.position_offset)
    for q, info in enumerate(header.requests):
        surplus = int(tokens[q] - positions[q] - 1)
        if surplus < 0:
            given = f"{tokens[q]} tokens for {positions[q]} positions"
            return f"request {q} must have one more token than positions, or more; got {given}"
        if surplus and info.finish_reason != "length":
            given = f"{surplus} tokens of it and finish_reason {info.finish_reason!r}"
            return f"request {q} may have look-ahead only after a length cut; got {given}"
    return None


def _lengths(header: TraceHeader, arrays: TraceArrays) -> str | None:
    outputs = np.diff(arrays.position_offset) + 1
    for q, info in enumerate(header.requests):
        cut = info.max_new_tokens
        given = f"{outputs[q]} tokens, max_new_tokens {cut}"
        if outputs[q] > cut:
            return f"request {q} must not exceed its max_new_tokens; got {given}"
        if info.finish_reason == "length" and outputs[q] != cut:
            return f"request {q} ended by length, so it must fill max_new_tokens; got {given}"
    return None


def _splits(header: TraceHeader, _: TraceArrays) -> str | None:
    seen: dict[tuple[str, str], tuple[int, str]] = {}
    for q, info in enumerate(header.requests):
        first, split = seen.setdefault((info.task, info.question_id), (q, info.split))
        if split != info.split:
            what = f"{info.task} question {info.question_id!r}"
            given = f"{split} in request {first} and {info.split} in request {q}"
            return f"{what} must belong to one split; got {given}"
    return None


LAYOUT: Final[tuple[Invariant, ...]] = (_not_empty, _levels, _dtypes, _shapes)
OFFSETS: Final[tuple[Invariant, ...]] = (
    _offsets("position_offset", "root_logp"),
    _offsets("token_offset", "tokens"),
)
REQUESTS: Final[tuple[Invariant, ...]] = (_token_counts, _lengths, _splits)
STAGES: Final = (LAYOUT, OFFSETS, REQUESTS, CONTENT)
