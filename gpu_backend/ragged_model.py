"""A model over the rows of many requests: one flattened forward, keys and values in a pool.

Shape letters: R rows of all requests, n rows of one request, A ancestors, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.attention import AttentionRows
from gpu_backend.kv_pool import KvPool
from gpu_backend.kv_slots import SlotTable
from gpu_backend.models import context_limit
from gpu_backend.ragged_rows import RaggedRows
from gpu_backend.sequence_pass import Padded
from gpu_backend.sight import Sight
from gpu_backend.window_rows import WindowRows

if TYPE_CHECKING:
    from transformers import PreTrainedModel

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


class RaggedModel:
    """A decoder-only model prepared by :func:`gpu_backend.draft_tree.prepare_draft`.

    - :meth:`extend` writes rows and commits them; :meth:`branch` writes rows behind the sequences
      and leaves it to the caller to commit a path of them, or nothing.
    - Requests must have reserved their slots in :attr:`table`.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        num_slots: int,
        role: str = "target",
        block: int | None = None,
        pads: bool | None = None,
    ) -> None:
        """Allocate the pool; nothing is computed.

        Args:
            model: prepared for tree attention, in evaluation mode.
            vocab_size: real tokens, V; logits beyond are padding and are cut off.
            num_slots: tokens of all requests, tree rows included, that the pool holds.
            role: what messages call the model.
            block: slots of the largest request, for a layout that several can be read from at once.
            pads: gather what requests see and lay it out to the longest, instead of reading it in
                place; by default on a GPU.
        """
        self.table = SlotTable(num_slots, block)
        self.vocab_size = vocab_size
        self._role = role
        self._pads = model.device.type == "cuda" if pads is None else pads
        self._model = model
        self._pool = KvPool.of(model.config, num_slots, model.dtype, model.device)
        self._query_heads = model.config.num_attention_heads // self._pool.num_heads

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self._model.device

    def require_room(self, num_tokens: int, tree_rows: int) -> None:
        """Refuse a request that could never be served, before it is queued.

        Args:
            num_tokens: of prompt and longest output.
            tree_rows: draft tokens behind them.

        Raises:
            InputError: naming the limit and what the request needs.
        """
        limit = context_limit(self._model)
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

    @torch.inference_mode()
    def extend(
        self, extensions: Sequence[Extension], *, scores: bool | Sequence[bool] = True
    ) -> Tensor | None:
        """Append tokens to sequences, each of them at least one.

        Args:
            extensions: of different requests.
            scores: whether logits are wanted, of all or of each.

        Returns:
            Logits ``[scored requests, V]`` after each request's last token; None if none is scored.
        """
        table = self.table
        counts = [len(extension.tokens) for extension in extensions]
        starts = [table.length(extension.key) for extension in extensions]
        write = [table.spare(e.key, n) for e, n in zip(extensions, counts, strict=True)]
        sights = [
            Sight(n, start, table.seen(e.key, n))
            for e, n, start in zip(extensions, counts, starts, strict=True)
        ]
        is_scored = np.broadcast_to(scores, len(extensions))
        logits = self._forward(
            np.concatenate([np.asarray(e.tokens, dtype=np.int64) for e in extensions]),
            np.concatenate([s + np.arange(n) for s, n in zip(starts, counts, strict=True)]),
            self._rows(write, sights),
            (np.cumsum(counts) - 1)[is_scored],
        )
        for extension, count in zip(extensions, counts, strict=True):
            table.commit(extension.key, np.arange(count))
        return logits if is_scored.any() else None

    @torch.inference_mode()
    def branch(self, requests: Sequence[Branches]) -> Tensor:
        """Run tree rows of some requests, ragged; logits ``[R, V]`` of all of them in order."""
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
                )
            )
        positions = [table.length(r.key) + r.depth_n for r in requests]
        tokens = np.concatenate([r.tokens_n for r in requests])
        return self._forward(
            tokens, np.concatenate(positions), self._rows(write, sights), np.arange(len(tokens))
        )

    def _rows(self, write: list[IntArray], sights: list[Sight]) -> RaggedRows | WindowRows:
        write_R = self._tensor(np.concatenate(write))
        if not self._pads:
            return WindowRows.of(self._pool, write_R, sights, self._query_heads)
        branches = [sight.branch_nA for sight in sights if sight.branch_nA is not None]
        return RaggedRows(
            pool=self._pool,
            write_R=write_R,
            sequences=Padded.of(
                [sight.first_pass for sight in sights],
                [sight.num_rows for sight in sights],
                self.device,
                is_causal=not branches,
            ),
            ancestors_RA=self._tensor(_stacked(branches)) if branches else None,
        )

    def _forward(
        self, tokens_R: IntArray, positions_R: IntArray, rows: AttentionRows, kept: IntArray
    ) -> Tensor:
        """Logits ``[len(kept), V]`` of the kept rows, padding of the vocabulary cut off."""
        output = self._model(
            input_ids=self._tensor(tokens_R)[None],
            position_ids=self._tensor(positions_R)[None],
            use_cache=False,
            logits_to_keep=self._tensor(kept),
            tree_rows=rows,
        )
        logits: Tensor = output.logits[0, :, : self.vocab_size]
        return logits

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self.device)


def _is_chain(request: Branches) -> bool:
    """Whether every row sees all places up to its own, and the rows are consecutive.

    Such rows continue the sequence, so one causal pass does for them.
    """
    place_n = request.place_n
    seen_n = (request.above_nA != NO_ANCESTOR).sum(axis=1)
    is_consecutive = int(place_n[-1]) - int(place_n[0]) == len(place_n) - 1
    return is_consecutive and bool((seen_n == place_n + 1).all())


def _stacked(branches: list[IntArray]) -> IntArray:
    """Branches of all rows, padded to the longest: int64 [R, A]."""
    width = max(branch_nA.shape[1] for branch_nA in branches)
    padded = [
        np.pad(nA, ((0, 0), (0, width - nA.shape[1])), constant_values=NO_ANCESTOR)
        for nA in branches
    ]
    return np.concatenate(padded)
