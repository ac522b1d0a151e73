"""Planted violations: for each a change of a valid trace, and the message that must name it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from tests.traces.build import Array, Sizes, random_trace
from traces.schema import NO_SLOT, PAST_END, Trace
from traces.store import make_trace

Change = Callable[[Trace], Trace]


def sample() -> Trace:
    """A valid trace that has every case that a change needs."""
    return random_trace(np.random.default_rng(3), 6, Sizes(max_tokens=12), entropies=True)


def put(name: str, index: Any, value: float) -> Change:
    """Set entries of one array."""

    def change(trace: Trace) -> Trace:
        array = getattr(trace.arrays, name).copy()
        array[index] = value
        return arrays(trace, **{name: array})

    return change


def arrays(trace: Trace, **changed: Any) -> Trace:
    return make_trace(trace.header, replace(trace.arrays, **changed))


def header(trace: Trace, **changed: Any) -> Trace:
    return make_trace(trace.header.model_copy(update=changed), trace.arrays)


def request(q: int, **changed: Any) -> Change:
    def change(trace: Trace) -> Trace:
        infos = list(trace.header.requests)
        infos[q] = infos[q].model_copy(update=changed)
        return header(trace, requests=tuple(infos))

    return change


def find(mask: Array) -> tuple[int, ...]:
    assert mask.any(), "the sample trace lacks the case"
    return tuple(int(i) for i in np.argwhere(mask)[0])


def of_reason(trace: Trace, reason: str) -> int:
    return next(q for q, i in enumerate(trace.header.requests) if i.finish_reason == reason)


# Changes that depend on where the sample trace has the case.


def empty(trace: Trace) -> Trace:
    return header(trace, requests=())


def no_positions(trace: Trace) -> Trace:
    kept = {
        name: getattr(trace.arrays, name)[:0]
        for name in ("root_logp", "slot_child", "child_logp", "chain_logp", "path_rank")
    }
    zeros = np.zeros_like(trace.arrays.position_offset)
    return arrays(trace, position_offset=zeros, **kept)


def other_dtype(trace: Trace) -> Trace:
    return arrays(trace, root_logp=trace.arrays.root_logp.astype(np.float32))


def foreign_byte_order(trace: Trace) -> Trace:
    return arrays(trace, tokens=trace.arrays.tokens.astype(">i4"))


def other_shape(trace: Trace) -> Trace:
    return arrays(trace, child_logp=trace.arrays.child_logp[..., :-1])


def flat_root(trace: Trace) -> Trace:
    return arrays(trace, root_logp=np.zeros((), np.float16))


def falling_offset(trace: Trace) -> Trace:
    offset = trace.arrays.position_offset
    return put("position_offset", 2, offset[1] - 1)(trace)


def short_tokens(trace: Trace) -> Trace:
    q = of_reason(trace, "stop")
    assert q < trace.num_requests - 1
    return put("token_offset", q + 1, trace.arrays.token_offset[q + 1] - 1)(trace)


def look_ahead_after_stop(trace: Trace) -> Trace:
    ahead = np.diff(trace.arrays.token_offset) - np.diff(trace.arrays.position_offset) - 1
    return request(int(np.flatnonzero(ahead)[0]), finish_reason="stop")(trace)


def too_long(trace: Trace) -> Trace:
    return request(of_reason(trace, "stop"), max_new_tokens=1)(trace)


def cut_before_length(trace: Trace) -> Trace:
    return request(of_reason(trace, "length"), max_new_tokens=99)(trace)


def two_splits(trace: Trace) -> Trace:
    first = trace.header.requests[0]
    same = {"task": first.task, "question_id": first.question_id}
    return request(1, **same)(trace)


def slot_twice(trace: Trace) -> Trace:
    p = int(np.flatnonzero(trace.arrays.slot_child[:, 0, 1] != NO_SLOT)[0])
    return put("slot_child", (p, 0, 1), trace.arrays.slot_child[p, 0, 0])(trace)


def hole(trace: Trace) -> Trace:
    """Empty a front slot of the last depth, where the chain is in the extra slot."""
    p, _ = find(trace.arrays.slot_child[:, -1, -1:] != NO_SLOT)
    for name, value in (("slot_child", NO_SLOT), ("child_logp", -np.inf), ("slot_entropy", 0)):
        trace = put(name, (p, -1, 0), value)(trace)
    return trace


def orphan(trace: Trace) -> Trace:
    """Move a beam slot under an empty extra slot, off the chain."""
    slots, header_ = trace.arrays.slot_child, trace.header
    W, k = header_.beam_width + 1, header_.top_k
    case = (slots[:, 0, W - 1] == NO_SLOT) & (slots[:, 1, W - 1] != NO_SLOT)
    p = int(np.flatnonzero(case)[0])
    child = slots.copy()
    child[p, 1, 0] = (W - 1) * k
    return arrays(trace, slot_child=child)


def empty_slot(trace: Trace) -> tuple[int, ...]:
    return find(trace.arrays.slot_child == NO_SLOT)


def filled_empty_slot(trace: Trace) -> Trace:
    p, d, w = empty_slot(trace)
    return put("child_logp", (p, d, w, 0), -1)(trace)


def entropy_of_empty_slot(trace: Trace) -> Trace:
    return put("slot_entropy", empty_slot(trace), 1)(trace)


def lost_chain(trace: Trace) -> Trace:
    """Empty the last depth's extra slot, on which nothing stands."""
    p, _ = find(trace.arrays.slot_child[:, -1, -1:] != NO_SLOT)
    for name, value in (("slot_child", NO_SLOT), ("child_logp", -np.inf), ("slot_entropy", 0)):
        trace = put(name, (p, -1, -1), value)(trace)
    return trace


def early_end(trace: Trace) -> Trace:
    p, c = find(trace.arrays.path_rank[:, 1:] >= 0)
    trace = put("path_logp", (p, c + 1), -np.inf)(trace)
    return put("path_rank", (p, c + 1), PAST_END)(trace)


def rank_after_end(trace: Trace) -> Trace:
    where = find(trace.arrays.path_rank == PAST_END)
    trace = put("path_logp", where, -1)(trace)
    return put("path_rank", where, 0)(trace)


def logp_of_sentinel(trace: Trace) -> Trace:
    return put("path_logp", find(trace.arrays.path_rank < 0), -1)(trace)


def rank_without_logp(trace: Trace) -> Trace:
    return put("path_logp", find(trace.arrays.path_rank[:, 1:] >= 0), -np.inf)(trace)


def other_path_logp(trace: Trace) -> Trace:
    where = find(trace.arrays.path_rank[:, :1] == 0)
    return put("path_logp", where, -30)(trace)


BROKEN: dict[str, tuple[Change, str]] = {
    "no requests": (empty, r"header.requests must hold at least one request; got 0"),
    "no positions": (no_positions, r"root_logp must hold at least one position; got 0"),
    "levels": (lambda t: header(t, chain_levels=2), r"chain_levels must .* got 2 and 4"),
    "dtype": (other_dtype, r"root_logp must have dtype float16; got float32"),
    "byte order": (foreign_byte_order, r"tokens must have dtype int32; got >i4"),
    "shape": (other_shape, r"child_logp must have shape \(\d+, 3, 4, 4\) .* got \(\d+, 3, 4, 3\)"),
    "scalar": (flat_root, r"root_logp must have shape \(0, 8\) by the header; got \(\)"),
    "offset start": (put("token_offset", 0, 1), r"token_offset\[0\] must be 0; got 1"),
    "offset falls": (falling_offset, r"position_offset must be non-decreasing; entry 2 is \d+ aft"),
    "offset end": (
        put("token_offset", -1, 10**6),
        r"token_offset\[6\] must be \d+, .* got 1000000",
    ),
    "token missing": (short_tokens, r"request \d must have one more token than positions"),
    "look-ahead": (look_ahead_after_stop, r"look-ahead only after a length cut; got \d+ tokens"),
    "too long": (too_long, r"request \d must not exceed its max_new_tokens; got \d+ tokens, .* 1$"),
    "cut early": (cut_before_length, r"request \d ended by length.*max_new_tokens 99"),
    "two splits": (two_splits, r"chat question '0' must belong to one split; got evaluation in"),
    "token": (put("tokens", 5, 500), r"tokens\[5\] must lie in \[0, 500\); got 500"),
    "nan": (put("child_logp", (4, 1, 0, 2), np.nan), r"child_logp\[4, 1, 0, 2\] must not be NaN"),
    "nan entropy": (put("slot_entropy", (1, 1, 0), np.nan), r"slot_entropy\[1, 1, 0\] must not be"),
    "log-prob": (put("chain_logp", (2, 7), 0.25), r"chain_logp\[2, 7\] is a log-prob.*; got 0.25$"),
    "entropy": (put("root_entropy", 3, -1), r"root_entropy\[3\] is an entropy.*; got -1.0"),
    "root order": (put("root_logp", (1, 4), 0), r"root_logp\[1, 4\] must not exceed the rank bef"),
    "child order": (
        put("child_logp", (1, 1, 0, 3), 0),
        r"child_logp\[1, 1, 0, 3\] must not exceed",
    ),
    "slot range": (
        put("slot_child", (0, 0, 2), 8),
        r"slot_child\[0, 0, 2\] must be a candidate.*8$",
    ),
    "slot sentinel": (
        put("slot_child", (0, 2, 2), -2),
        r"slot_child\[0, 2, 2\] must be a cand.*-2$",
    ),
    "slot twice": (slot_twice, r"slot_child\[\d+, 0\] must not name a candidate twice; got \d+ tw"),
    "hole": (hole, r"slot_child\[\d+, 2, 0\] is an empty beam slot before a filled one; got -1"),
    "orphan": (
        orphan,
        r"slot_child\[\d+, 1, 0\] must descend from a slot that is not empty; got 12",
    ),
    "filled": (
        filled_empty_slot,
        r"child_logp\[.*\] belongs to an empty slot and must be -inf; go",
    ),
    "entropy of empty": (entropy_of_empty_slot, r"slot_entropy\[.*\] belongs to .* be 0; got 1.0"),
    "chain root": (
        put("chain_logp", (3, 0), -30),
        r"chain_logp\[3, 0\] must equal root_logp at ran",
    ),
    "chain slot": (
        lost_chain,
        r"slot_child\[\d+, \d\] must hold the greedy chain's node, candidate",
    ),
    "chain value": (put("chain_logp", (3, 2), -30), r"chain_logp\[3, 2\] must equal child_logp at"),
    "rank low": (put("path_rank", (2, 1), -3), r"path_rank\[2, 1\] must be a rank, .*; got -3"),
    "rank high": (put("path_rank", (2, 1), 500), r"path_rank\[2, 1\] must be a rank, .*; got 500"),
    "early end": (early_end, r"path_rank\[\d+, \d\] must be PAST_END \(-2\) exactly .*; got -2"),
    "late rank": (
        rank_after_end,
        r"path_rank\[\d+, \d\] must be PAST_END \(-2\) exactly .*; got 0",
    ),
    "sentinel": (logp_of_sentinel, r"path_logp\[\d+, \d\] must be -inf exactly where .*; got -1.0"),
    "rank alone": (rank_without_logp, r"path_logp\[\d+, \d\] must be -inf exactly .*; got -inf"),
    "path root": (
        other_path_logp,
        r"path_logp\[\d+, 0\] must equal root_logp at its rank; got -30",
    ),
}
