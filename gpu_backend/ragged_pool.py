"""Where the rows of a ragged forward go: slots, positions and what each row sees.

Shape letters: R rows of all requests, n rows of one request, A ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.kv_pool import KvPool
from gpu_backend.kv_slots import SlotTable
from gpu_backend.prefix_backends.choice import AttentionName, choose_attention
from gpu_backend.prefix_backends.layout import LayOut
from gpu_backend.ragged_rows import RaggedRows
from gpu_backend.sequence_pass import Padded
from gpu_backend.sight import Sight
from gpu_backend.window_rows import WindowRows

IntArray = npt.NDArray[np.int64]

NO_ANCESTOR = -1
"""Padding of ancestor lists."""


@dataclass(frozen=True, slots=True)
class Extension:
    """Tokens that continue one request's sequence."""

    key: int
    tokens: Sequence[int]


@dataclass(frozen=True, slots=True)
class Branches:
    """Tree rows of one request that branch off its sequence; parents precede children."""

    key: int
    tokens_n: IntArray
    depth_n: IntArray
    """0 is the first position behind what the row sees of the sequence."""
    place_n: IntArray
    """Which spare slot the row is written to; ascending."""
    above_nA: IntArray
    """Places of the row's branch in any order, its own included, padded with NO_ANCESTOR."""
    visible_n: IntArray | None = None
    """Tokens of the sequence that the row sees; None: all of them, so that it branches off its end.
    """


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of one forward."""

    rows: RaggedRows | WindowRows
    position_R: IntArray


class RaggedPool:
    """Keys and values of many requests, and the places of rows among them.

    A model asks for places, writes its rows there, and commits those that continue a sequence;
    tree rows it leaves to the caller to commit, or nothing.
    """

    def __init__(
        self,
        pool: KvPool,
        *,
        query_heads: int,
        role: str,
        block: int | None,
        pads: bool | None,
        attention: AttentionName = "torch",
    ) -> None:
        """Start without requests.

        Args:
            pool: keys and values of the tokens of all requests, tree rows included.
            query_heads: of the model.
            role: what messages call the model.
            block: slots of the largest request, for a layout that several can be read from at once.
            pads: gather what requests see and lay it out to the longest, instead of reading it in
                place; by default on a GPU.
            attention: what reads the sequences, if not torch.

        Raises:
            InputError: that attention was asked for by name and cannot be used.
        """
        self.table = SlotTable(pool.num_slots, block)
        self._pool = pool
        self._role = role
        chosen = choose_attention(attention, pool.device, pool.dtype, pool.head_dim)
        library = chosen.lay_out(pool, query_heads)
        self._lay_out: LayOut = library or Padded.of
        is_on_gpu = pool.device.type == "cuda" or library is not None
        self._pads = is_on_gpu if pads is None else pads
        self._group_size = query_heads // pool.num_heads

    def require_room(self, num_tokens: int, tree_rows: int, limit: int | None = None) -> None:
        """Refuse a request that could never be served, before it is queued.

        Args:
            num_tokens: of prompt and longest output.
            tree_rows: draft tokens behind them.
            limit: positions of the model; None if they do not end.

        Raises:
            InputError: naming the limit and what the request needs.
        """
        if limit is not None and num_tokens > limit:
            raise InputError(
                f"{self._role}: prompt and output must fit in {limit} positions; a request needs "
                f"{num_tokens}. Lower max_new_tokens or leave the prompt out."
            )
        slots = num_tokens + tree_rows
        if slots > self.table.num_slots:
            raise InputError(
                f"{self._role}: a request must fit in the KV pool of {self.table.num_slots} token "
                f"slots; one needs {slots}. Give the pool more slots or the request fewer tokens."
            )

    def make_room(self, key: int, tree_rows: int) -> None:
        """Let a request have so many tree rows in all; where the pool must grow, it doubles.

        For a request whose tree has no known end: what is added is its alone, if it needs more
        than it was given at admission.
        """
        missing = self.table.length(key) + tree_rows - self.table.capacity(key)
        if missing <= 0:
            return
        added = max(missing, self.table.num_slots)
        self._pool.grow(self.table.num_slots + added)
        self.table.grow(key, added)

    def continuing(self, keys: Sequence[int], counts: Sequence[int]) -> PlacedRows:
        """Places of rows that continue sequences, at least one each; commit them afterwards."""
        table = self.table
        starts = [table.length(key) for key in keys]
        write = [table.spare(key, n) for key, n in zip(keys, counts, strict=True)]
        sights = [
            Sight(n, start, table.seen(key, n))
            for key, n, start in zip(keys, counts, starts, strict=True)
        ]
        positions = [s + np.arange(n) for s, n in zip(starts, counts, strict=True)]
        return PlacedRows(self._rows(write, sights), np.concatenate(positions))

    def commit(self, keys: Sequence[int], counts: Sequence[int]) -> None:
        """Make rows placed by :meth:`continuing` part of their sequences."""
        for key, count in zip(keys, counts, strict=True):
            self.table.commit(key, np.arange(count))

    def branching(self, requests: Sequence[Branches]) -> PlacedRows:
        """Places of tree rows of some requests, ragged."""
        table = self.table
        is_chain = [_is_chain(request) for request in requests]
        if self._pads and not all(is_chain):
            is_chain = [False] * len(requests)  # one pass for all or none
        write, sights = [], []
        for request, continues in zip(requests, is_chain, strict=True):
            room = int(request.place_n[-1]) + 1
            spare = table.spare(request.key, room)
            write.append(spare[request.place_n])
            above_nA = request.above_nA
            sights.append(
                Sight(
                    len(request.tokens_n),
                    table.length(request.key),
                    table.seen(request.key, room),
                    None if continues else np.where(above_nA < 0, NO_ANCESTOR, spare[above_nA]),
                    request.visible_n,
                )
            )
        positions = [
            (table.length(r.key) if r.visible_n is None else r.visible_n) + r.depth_n
            for r in requests
        ]
        return PlacedRows(self._rows(write, sights), np.concatenate(positions))

    def tensor(self, values: IntArray) -> Tensor:
        """Copy whole numbers to the pool's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._pool.device)

    def _rows(self, write: list[IntArray], sights: list[Sight]) -> RaggedRows | WindowRows:
        write_R = self.tensor(np.concatenate(write))
        if not self._pads:
            return WindowRows.of(self._pool, write_R, sights, self._group_size)
        branches = [sight.branch_nA for sight in sights if sight.branch_nA is not None]
        visible_R = _visible(sights)
        lay_out = self._lay_out
        if visible_R is not None:  # only torch can
            lay_out = partial(Padded.of, visible_R=visible_R)
        return RaggedRows(
            pool=self._pool,
            write_R=write_R,
            sequences=lay_out(
                [sight.first_pass for sight in sights],
                [sight.num_rows for sight in sights],
                self._pool.device,
                is_causal=not branches,
            ),
            ancestors_RA=self.tensor(_stacked(branches)) if branches else None,
        )


def _is_chain(request: Branches) -> bool:
    """Whether every row sees all places up to its own, and the rows are consecutive.

    Such rows continue the sequence, so one causal pass does for them.
    """
    if request.visible_n is not None:
        return False
    place_n = request.place_n
    seen_n = (request.above_nA != NO_ANCESTOR).sum(axis=1)
    is_consecutive = int(place_n[-1]) - int(place_n[0]) == len(place_n) - 1
    return is_consecutive and bool((seen_n == place_n + 1).all())


def _visible(sights: list[Sight]) -> IntArray | None:
    """How much of its request's sequence each row sees: int64 [R]; None: as the layout says."""
    if all(sight.visible_n is None for sight in sights):
        return None
    return np.concatenate([sight.visible for sight in sights])


def _stacked(branches: list[IntArray]) -> IntArray:
    """Branches of all rows, padded to the longest: int64 [R, A]."""
    width = max(branch_nA.shape[1] for branch_nA in branches)
    padded = [
        np.pad(nA, ((0, 0), (0, width - nA.shape[1])), constant_values=NO_ANCESTOR)
        for nA in branches
    ]
    return np.concatenate(padded)
