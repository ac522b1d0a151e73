"""Invariants of a trace's content: log-probabilities, slots, chain and path.

Each function returns one message naming the array, the index and the value of the first violation,
or ``None``; all of them presuppose that shapes, dtypes and offsets are right. `traces.validate`
runs them. Shape letters as in `traces.schema`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from traces.schema import NO_SLOT, OUTSIDE_VOCAB, PAST_END, TraceArrays, TraceHeader

Array = npt.NDArray[Any]
Mask = npt.NDArray[np.bool_]
Invariant = Callable[[TraceHeader, TraceArrays], str | None]

LOG_PROBS: Final = ("root_logp", "child_logp", "chain_logp", "path_logp")
ENTROPIES: Final = ("root_entropy", "slot_entropy")


def _present(arrays: TraceArrays, names: tuple[str, ...]) -> Iterator[tuple[str, Array]]:
    for name in names:
        array = getattr(arrays, name)
        if array is not None:
            yield name, array


def _first(name: str, wrong: Mask, rule: str, values: Array) -> str | None:
    """Message for the first True of a mask over ``values``, with the number of the others."""
    if not wrong.any():
        return None
    index = np.unravel_index(int(wrong.argmax()), wrong.shape)
    others = int(wrong.sum()) - 1
    more = f" ({others} more like it)" if others else ""
    where = ", ".join(str(int(i)) for i in index)
    return f"{name}[{where}] {rule}; got {values[index]}{more}"


def _tokens(header: TraceHeader, arrays: TraceArrays) -> str | None:
    wrong = (arrays.tokens < 0) | (arrays.tokens >= header.vocab_size)
    return _first("tokens", wrong, f"must lie in [0, {header.vocab_size})", arrays.tokens)


def _no_nan(_: TraceHeader, arrays: TraceArrays) -> str | None:
    for name, array in _present(arrays, LOG_PROBS + ENTROPIES):
        if message := _first(name, np.isnan(array), "must not be NaN", array):
            return message
    return None


def _log_probs(_: TraceHeader, arrays: TraceArrays) -> str | None:
    for name, array in _present(arrays, LOG_PROBS):
        if message := _first(name, array > 0, "is a log-probability, at most 0", array):
            return message
    return None


def _entropies(_: TraceHeader, arrays: TraceArrays) -> str | None:
    for name, array in _present(arrays, ENTROPIES):
        wrong = (array < 0) | np.isinf(array)
        if message := _first(name, wrong, "is an entropy, finite and at least 0", array):
            return message
    return None


def _rank_order(_: TraceHeader, arrays: TraceArrays) -> str | None:
    for name, array in _present(arrays, ("root_logp", "child_logp")):
        rises = np.zeros(array.shape, np.bool_)
        np.greater(array[..., 1:], array[..., :-1], out=rises[..., 1:])
        if message := _first(name, rises, "must not exceed the rank before it", array):
            return message
    return None


def _slot_range(header: TraceHeader, arrays: TraceArrays) -> str | None:
    slots = arrays.slot_child
    limit_D = np.full((slots.shape[1], 1), (header.beam_width + 1) * header.top_k)
    limit_D[:1] = header.root_width
    wrong = (slots < NO_SLOT) | (slots >= limit_D)
    rule = f"must be a candidate of its depth or NO_SLOT ({NO_SLOT})"
    return _first("slot_child", wrong, rule, slots)


def _slot_unique(_: TraceHeader, arrays: TraceArrays) -> str | None:
    slots = np.sort(arrays.slot_child, axis=2)
    twice = (slots[..., 1:] == slots[..., :-1]) & (slots[..., 1:] != NO_SLOT)
    if not twice.any():
        return None
    p, d, w = (int(i) for i in np.unravel_index(int(twice.argmax()), twice.shape))
    return f"slot_child[{p}, {d}] must not name a candidate twice; got {slots[p, d, w]} twice"


def _slot_front(header: TraceHeader, arrays: TraceArrays) -> str | None:
    beam = arrays.slot_child[..., : header.beam_width]
    hole = np.zeros(beam.shape, np.bool_)
    hole[..., :-1] = (beam[..., :-1] == NO_SLOT) & (beam[..., 1:] != NO_SLOT)
    return _first("slot_child", hole, "is an empty beam slot before a filled one", beam)


def _slot_parent(header: TraceHeader, arrays: TraceArrays) -> str | None:
    slots = arrays.slot_child
    parent = np.clip(slots[:, 1:] // header.top_k, 0, header.beam_width).astype(np.intp)
    orphan = np.zeros(slots.shape, np.bool_)
    orphan[:, 1:] = np.take_along_axis(slots[:, :-1], parent, axis=2) == NO_SLOT
    orphan &= slots != NO_SLOT
    return _first("slot_child", orphan, "must descend from a slot that is not empty", slots)


def _empty_slots(_: TraceHeader, arrays: TraceArrays) -> str | None:
    empty = arrays.slot_child == NO_SLOT
    wrong = empty[..., None] & (arrays.child_logp != -np.inf)
    rule = "belongs to an empty slot and must be"
    if message := _first("child_logp", wrong, f"{rule} -inf", arrays.child_logp):
        return message
    if arrays.slot_entropy is None:
        return None
    wrong = empty & (arrays.slot_entropy != 0)
    return _first("slot_entropy", wrong, f"{rule} 0", arrays.slot_entropy)


def _chain_root(_: TraceHeader, arrays: TraceArrays) -> str | None:
    wrong = np.zeros(arrays.chain_logp.shape, np.bool_)
    wrong[:, 0] = arrays.chain_logp[:, 0] != arrays.root_logp[:, 0]
    return _first("chain_logp", wrong, "must equal root_logp at rank 0", arrays.chain_logp)


def _chain_slots(header: TraceHeader, arrays: TraceArrays) -> str | None:
    candidate = np.zeros(len(arrays.chain_logp), np.intp)
    row = np.arange(len(candidate))
    for d in range(header.levels - 1):
        goes_on = arrays.chain_logp[:, d] != -np.inf
        held = arrays.slot_child[:, d] == candidate[:, None]
        lost = goes_on & ~held.any(axis=1)
        if lost.any():
            p = int(lost.argmax())
            rule = f"must hold the greedy chain's node, candidate {candidate[p]}"
            return f"slot_child[{p}, {d}] {rule}; got {arrays.slot_child[p, d].tolist()}"
        slot = held.argmax(axis=1)
        wrong = np.zeros(arrays.chain_logp.shape, np.bool_)
        next_logp = arrays.child_logp[row, d, slot, 0]
        wrong[:, d + 1] = goes_on & (arrays.chain_logp[:, d + 1] != next_logp)
        rule = "must equal child_logp at rank 0 of the chain's slot"
        if message := _first("chain_logp", wrong, rule, arrays.chain_logp):
            return message
        candidate = slot * header.top_k
    return None


def _path_ranks(header: TraceHeader, arrays: TraceArrays) -> str | None:
    ranks = arrays.path_rank
    wrong = (ranks < min(OUTSIDE_VOCAB, PAST_END)) | (ranks >= header.vocab_size)
    rule = f"must be a rank, OUTSIDE_VOCAB ({OUTSIDE_VOCAB}) or PAST_END ({PAST_END})"
    return _first("path_rank", wrong, rule, ranks)


def _path_end(_: TraceHeader, arrays: TraceArrays) -> str | None:
    positions = np.diff(arrays.position_offset)
    root = np.arange(len(arrays.path_rank)) - np.repeat(arrays.position_offset[:-1], positions)
    tokens = np.repeat(np.diff(arrays.token_offset), positions)
    levels = np.arange(1, arrays.path_rank.shape[1] + 1)
    ended = root[:, None] + levels >= tokens[:, None]
    wrong = (arrays.path_rank == PAST_END) != ended
    rule = f"must be PAST_END ({PAST_END}) exactly where the request has no token left"
    return _first("path_rank", wrong, rule, arrays.path_rank)


def _path_sentinels(_: TraceHeader, arrays: TraceArrays) -> str | None:
    wrong = (arrays.path_rank < 0) != (arrays.path_logp == -np.inf)
    rule = "must be -inf exactly where path_rank is a sentinel"
    return _first("path_logp", wrong, rule, arrays.path_logp)


def _path_root(header: TraceHeader, arrays: TraceArrays) -> str | None:
    rank = arrays.path_rank[:, 0]
    stored = (rank >= 0) & (rank < header.root_width)
    column = np.clip(rank, 0, header.root_width - 1)[:, None].astype(np.intp)
    root_logp = np.take_along_axis(arrays.root_logp, column, axis=1)[:, 0]
    wrong = np.zeros(arrays.path_logp.shape, np.bool_)
    wrong[:, 0] = stored & (arrays.path_logp[:, 0] != root_logp)
    return _first("path_logp", wrong, "must equal root_logp at its rank", arrays.path_logp)


SLOTS: Final[tuple[Invariant, ...]] = (
    _slot_range,
    _slot_unique,
    _slot_front,
    _slot_parent,
    _empty_slots,
)
CONTENT: Final[tuple[Invariant, ...]] = (
    _tokens,
    _no_nan,
    _log_probs,
    _entropies,
    _rank_order,
    *SLOTS,
    _chain_root,
    _chain_slots,
    _path_ranks,
    _path_end,
    _path_sentinels,
    _path_root,
)
