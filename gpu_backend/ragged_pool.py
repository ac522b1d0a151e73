"""Where the rows of a ragged forward go: slots, positions and what each row sees.

Shape letters: R rows of all requests, n rows of one request, A ancestors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.kv_pool import KvPool
from gpu_backend.kv_slots import SlotTable
from gpu_backend.ragged_rows import RaggedRows
from gpu_backend.sequence_pass import ByRequest, Padded

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
    """Tree rows of one request, behind its sequence; parents precede children."""

    key: int
    tokens_n: IntArray
    depth_n: IntArray
    """0 is the first position behind the sequence."""
    place_n: IntArray
    """Which spare slot the row is written to; ascending."""
    above_nA: IntArray
    """Places of the row's branch in any order, its own included, padded with NO_ANCESTOR."""


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """Rows of one forward."""

    rows: RaggedRows
    position_R: IntArray
    last: IntArray
    """Each request's last row."""


class RaggedPool:
    """Keys and values of many requests, and the places of rows among them.

    A model asks for places, writes its rows there, and commits those that continue a sequence;
    tree rows it leaves to the caller to commit, or nothing.
    """

    def __init__(self, pool: KvPool, num_slots: int, *, role: str, pads: bool | None) -> None:
        """Start without requests.

        Args:
            pool: keys and values of ``num_slots`` tokens.
            num_slots: tokens of all requests, tree rows included.
            role: what messages call the model.
            pads: lay requests out to the longest, instead of one product for each; by default on
                a GPU.
        """
        self.table = SlotTable(num_slots)
        self._pool = pool
        self._role = role
        self._layout = (
            Padded if (pool.device.type == "cuda" if pads is None else pads) else ByRequest
        )

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

    def continuing(self, keys: Sequence[int], counts: Sequence[int]) -> PlacedRows:
        """Places of rows that continue sequences, at least one each; commit them afterwards."""
        table = self.table
        starts = [table.length(key) for key in keys]
        write = [table.spare(key, n) for key, n in zip(keys, counts, strict=True)]
        seen = [table.seen(key, n) for key, n in zip(keys, counts, strict=True)]
        positions = [s + np.arange(n) for s, n in zip(starts, counts, strict=True)]
        return PlacedRows(
            self._rows(write, seen, None), np.concatenate(positions), np.cumsum(counts) - 1
        )

    def commit(self, keys: Sequence[int], counts: Sequence[int]) -> None:
        """Make rows placed by :meth:`continuing` part of their sequences."""
        for key, count in zip(keys, counts, strict=True):
            self.table.commit(key, np.arange(count))

    def branching(self, requests: Sequence[Branches]) -> PlacedRows:
        """Places of tree rows of some requests, ragged."""
        table = self.table
        is_causal = all(_is_chain(request) for request in requests)
        write, seen, above = [], [], []
        width = max(request.above_nA.shape[1] for request in requests)
        for request in requests:
            room = int(request.place_n[-1]) + 1
            spare = table.spare(request.key, room)
            write.append(spare[request.place_n])
            seen.append(table.seen(request.key, room if is_causal else 0))
            padding = ((0, 0), (0, width - request.above_nA.shape[1]))
            places = np.pad(request.above_nA, padding, constant_values=NO_ANCESTOR)
            above.append(np.where(places < 0, NO_ANCESTOR, spare[places]))
        positions = [table.length(r.key) + r.depth_n for r in requests]
        return PlacedRows(
            self._rows(write, seen, None if is_causal else np.concatenate(above)),
            np.concatenate(positions),
            np.cumsum([len(request.tokens_n) for request in requests]) - 1,
        )

    def tensor(self, values: IntArray) -> Tensor:
        """Copy whole numbers to the pool's device."""
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._pool.device)

    def _rows(
        self, write: list[IntArray], seen: list[IntArray], ancestors_RA: IntArray | None
    ) -> RaggedRows:
        return RaggedRows(
            pool=self._pool,
            write_R=self.tensor(np.concatenate(write)),
            sequences=self._layout.of(
                seen, list(map(len, write)), self._pool.device, is_causal=ancestors_RA is None
            ),
            ancestors_RA=None if ancestors_RA is None else self.tensor(ancestors_RA),
        )


def _is_chain(request: Branches) -> bool:
    """Whether every row sees all places up to its own, and the rows are consecutive.

    Such rows continue the sequence, so one causal pass does for them.
    """
    place_n = request.place_n
    seen_n = (request.above_nA != NO_ANCESTOR).sum(axis=1)
    is_consecutive = int(place_n[-1]) - int(place_n[0]) == len(place_n) - 1
    return is_consecutive and bool((seen_n == place_n + 1).all())
