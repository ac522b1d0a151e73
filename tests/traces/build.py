"""Valid random traces: consistent beam, chain and path, so that every invariant holds.

The target's rank at each level is drawn from the draft's own conditional distribution, so the
draft is about calibrated, as a good one is. Shape letters as in `traces.schema`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from hypothesis import strategies as st

from traces.schema import (
    NO_SLOT,
    OUTSIDE_VOCAB,
    PAST_END,
    Costing,
    ModelInfo,
    Provenance,
    RequestInfo,
    Trace,
    TraceArrays,
    TraceHeader,
)
from traces.store import make_trace
from traces.validate import named_arrays

Array = npt.NDArray[Any]
TASKS = ("chat", "code", "maths")
OUTSIDE_SHARE = 0.03


@dataclass(frozen=True)
class Sizes:
    """Widths and levels of a trace to build."""

    levels: int = 4
    beam_width: int = 3
    root_width: int = 8
    top_k: int = 4
    chain_levels: int = 8
    vocab_size: int = 500
    min_tokens: int = 2
    max_tokens: int = 24


def random_trace(
    rng: np.random.Generator,
    requests: int = 6,
    sizes: Sizes | None = None,
    *,
    entropies: bool = False,
) -> Trace:
    """A valid trace of `requests` requests; equal generators give equal traces."""
    sizes = sizes or Sizes()
    infos, positions, counts = _requests(rng, requests, sizes)
    position_offset = np.concatenate([[0], np.cumsum(positions)]).astype(np.int64)
    token_offset = np.concatenate([[0], np.cumsum(counts)]).astype(np.int64)
    tokens = rng.integers(0, sizes.vocab_size, token_offset[-1]).astype(np.int32)
    root_logp = _conditionals(rng, (int(position_offset[-1]),), sizes.root_width)
    slots = _beam(rng, root_logp, sizes)
    path_rank, path_logp = _path(rng, root_logp, slots, sizes)
    index_PC = _token_index(position_offset, token_offset, sizes.chain_levels)
    ended_PC = index_PC >= np.repeat(token_offset[1:], positions)[:, None]
    outside_T = rng.random(len(tokens)) < OUTSIDE_SHARE
    path_rank[outside_T[np.minimum(index_PC, len(tokens) - 1)]] = OUTSIDE_VOCAB
    path_rank[ended_PC] = PAST_END
    path_logp[path_rank < 0] = -np.inf
    arrays = TraceArrays(
        position_offset=position_offset,
        token_offset=token_offset,
        tokens=tokens,
        root_logp=root_logp,
        slot_child=slots.child,
        child_logp=slots.logp,
        chain_logp=slots.chain_logp,
        path_rank=path_rank,
        path_logp=path_logp,
        **(_entropies(rng, slots) if entropies else {}),
    )
    return make_trace(_header(infos, sizes), arrays)


@st.composite
def traces(draw: st.DrawFn, max_requests: int = 4) -> Trace:
    """Strategy of valid traces over all sizes, the smallest ones included."""
    levels = draw(st.integers(1, 4))
    sizes = Sizes(
        levels=levels,
        beam_width=draw(st.integers(1, 4)),
        root_width=draw(st.integers(1, 6)),
        top_k=draw(st.integers(1, 4)),
        chain_levels=levels + draw(st.integers(0, 3)),
        max_tokens=draw(st.integers(2, 8)),
    )
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    return random_trace(
        rng, draw(st.integers(1, max_requests)), sizes, entropies=draw(st.booleans())
    )


@dataclass(frozen=True)
class _Slots:
    child: Array  # [P, D - 1, W]
    logp: Array  # [P, D - 1, W, k]
    chain_logp: Array  # [P, C]


def _requests(
    rng: np.random.Generator, requests: int, sizes: Sizes
) -> tuple[tuple[RequestInfo, ...], Array, Array]:
    """Request data, positions and tokens (look-ahead included) of each request."""
    infos, positions, counts = [], [], []
    for q in range(requests):
        output = int(rng.integers(sizes.min_tokens, sizes.max_tokens + 1))
        cut = bool(rng.random() < 0.5)
        # A look-ahead is shorter than the chain where a stop token ends it.
        ahead = sizes.chain_levels if rng.random() < 0.7 else int(rng.integers(sizes.levels + 1))
        infos.append(
            RequestInfo(
                task=TASKS[q % len(TASKS)],
                question_id=str(q),
                prompt_tokens=int(rng.integers(8, 512)),
                max_new_tokens=output if cut else output + int(rng.integers(0, 9)),
                finish_reason="length" if cut else "stop",
                split="calibration" if q % 3 == 1 else "evaluation",
            )
        )
        positions.append(output - 1)
        counts.append(output + ahead * cut)
    return tuple(infos), np.array(positions), np.array(counts)


def _conditionals(rng: np.random.Generator, shape: tuple[int, ...], k: int) -> Array:
    """Log-probs of the first `k` ranks of random distributions, float16; some have ties."""
    sharpness = rng.uniform(0.5, 4.0, (*shape, 1))
    logits = rng.gumbel(size=(*shape, k + 1)) * sharpness  # the last one is the tail's mass
    logits -= logits.max(axis=-1, keepdims=True)
    logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    logp = -np.sort(-logp[..., :k], axis=-1)
    coarse = rng.random((*shape, 1)) < 0.2
    return np.where(coarse, np.round(logp), logp).clip(max=0).astype(np.float16)


def _beam(rng: np.random.Generator, root_logp: Array, sizes: Sizes) -> _Slots:
    """Expand level by level: the best by path log-prob, then the chain where they lack it."""
    P, D, k = len(root_logp), sizes.levels, sizes.top_k
    W = sizes.beam_width + 1
    rows = np.arange(P)
    child = np.full((P, D - 1, W), NO_SLOT, np.int16)
    logp = np.full((P, D - 1, W, k), -np.inf, np.float16)
    chain_logp = _conditionals(rng, (P, sizes.chain_levels), 1)[..., 0]
    chain_logp[:, 0] = root_logp[:, 0]
    chain = np.zeros(P, np.int64)  # the chain node's candidate number
    scores = root_logp.astype(np.float32)  # path log-prob of every candidate
    for d in range(D - 1):
        best = np.argsort(-scores, axis=1, kind="stable")[:, : sizes.beam_width]
        best = np.where(np.take_along_axis(scores, best, axis=1) > -np.inf, best, NO_SLOT)
        child[:, d, : best.shape[1]] = best
        alone = ~(best == chain[:, None]).any(axis=1)
        child[alone, d, W - 1] = chain[alone]
        filled = child[:, d] != NO_SLOT
        logp[:, d][filled] = _conditionals(rng, (int(filled.sum()),), k)
        path = np.take_along_axis(scores, np.maximum(child[:, d], 0).astype(np.int64), axis=1)
        path = np.where(filled, path, -np.inf).astype(np.float32)
        path[:, W - 1] = -np.inf  # children of the extra slot do not compete for the beam
        scores = (path[..., None] + logp[:, d].astype(np.float32)).reshape(P, W * k)
        slot = (child[:, d] == chain[:, None]).argmax(axis=1)
        chain_logp[:, d + 1] = logp[rows, d, slot, 0]
        chain = slot * k
    return _Slots(child, logp, chain_logp)


def _path(
    rng: np.random.Generator, root_logp: Array, slots: _Slots, sizes: Sizes
) -> tuple[Array, Array]:
    """Rank and log-prob of the target's token by level, equal to the stored ones if revealed."""
    P, C, k = len(root_logp), sizes.chain_levels, sizes.top_k
    rows = np.arange(P)
    ranks, logps = np.zeros((P, C), np.int32), np.zeros((P, C), np.float16)
    given = root_logp  # conditionals at the path's node
    slot = np.zeros(P, np.int64)  # the slot of that node; -1 where it was not expanded
    for c in range(C):
        width = given.shape[1]
        mass = np.cumsum(np.exp(given.astype(np.float64)), axis=1)
        rank = (mass < rng.random((P, 1))).sum(axis=1)
        tail = rank == width
        logps[:, c] = given[rows, np.minimum(rank, width - 1)] - tail * np.float16(0.5)
        rank = rank + tail * (rng.geometric(0.2, P) - 1)
        ranks[:, c] = rank
        given = _conditionals(rng, (P,), k)
        if c < sizes.levels - 1:
            candidate = np.where((slot >= 0) & (rank < width), slot * width * (c > 0) + rank, -2)
            held = slots.child[:, c] == candidate[:, None]
            slot = np.where(held.any(axis=1), held.argmax(axis=1), -1)
            given = np.where(slot[:, None] >= 0, slots.logp[rows, c, np.maximum(slot, 0)], given)
    return ranks, logps


def _token_index(position_offset: Array, token_offset: Array, levels: int) -> Array:
    """[P, C] index of the token that each level of each position's path stands for."""
    positions = np.diff(position_offset)
    shift = np.repeat(token_offset[:-1] - position_offset[:-1], positions)
    root = np.arange(position_offset[-1]) + shift
    index: Array = root[:, None] + np.arange(1, levels + 1)
    return index


def _entropies(rng: np.random.Generator, slots: _Slots) -> dict[str, Array]:
    filled = slots.child != NO_SLOT
    return {
        "root_entropy": rng.gamma(2.0, 0.5, len(filled)).astype(np.float16),
        "slot_entropy": (rng.gamma(2.0, 0.5, filled.shape) * filled).astype(np.float16),
    }


def _header(infos: tuple[RequestInfo, ...], sizes: Sizes) -> TraceHeader:
    return TraceHeader(
        name="random",
        target=ModelInfo(name="test-target", dtype="float32"),
        draft=ModelInfo(name="test-draft", dtype="float32"),
        drafter="draft_model",
        costing=Costing(target="qwen3-235b"),
        vocab_size=sizes.vocab_size,
        levels=sizes.levels,
        beam_width=sizes.beam_width,
        root_width=sizes.root_width,
        top_k=sizes.top_k,
        chain_levels=sizes.chain_levels,
        provenance=Provenance(
            kind="synthetic", generator="tests.traces.build", date="2025-01-01", seed=0
        ),
        requests=infos,
    )


def subset(trace: Trace, requests: Sequence[int]) -> Trace:
    """Some requests of a trace, in the order given."""
    arrays: dict[str, Array] = {}
    for name, array in named_arrays(trace.arrays).items():
        if name.endswith("_offset"):
            sizes = np.diff(array)[list(requests)]
            arrays[name] = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
            continue
        offset = trace.arrays.token_offset if name == "tokens" else trace.arrays.position_offset
        arrays[name] = np.concatenate([array[offset[q] : offset[q + 1]] for q in requests])
    infos = tuple(trace.header.requests[q] for q in requests)
    header = trace.header.model_copy(update={"requests": infos})
    return make_trace(header, TraceArrays(**arrays))
