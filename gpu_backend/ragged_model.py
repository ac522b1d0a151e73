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
from gpu_backend.kv_pool import KvPool
from gpu_backend.kv_slots import SlotTable
from gpu_backend.models import context_limit
from gpu_backend.ragged_rows import RaggedRows
from gpu_backend.sequence_pass import ByRequest, Padded

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
        pads: bool | None = None,
    ) -> None:
        """Allocate the pool; nothing is computed.

        Args:
            model: prepared for tree attention, in evaluation mode.
            vocab_size: real tokens, V; logits beyond are padding and are cut off.
            num_slots: tokens of all requests, tree rows included, that the pool holds.
            role: what messages call the model.
            pads: lay requests out to the longest, instead of one product for each; by default on
                a GPU.
        """
        self.table = SlotTable(num_slots)
        self.vocab_size = vocab_size
        self._role = role
        self._pads = model.device.type == "cuda" if pads is None else pads
        self._model = model
        self._pool = KvPool.of(model.config, num_slots, model.dtype, model.device)

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
    def extend(self, extensions: Sequence[Extension], *, scores: bool = True) -> Tensor | None:
        """Append tokens to sequences, each of them at least one.

        Returns:
            Logits ``[requests, V]`` after each request's last token; None unless ``scores``.
        """
        table = self.table
        counts = [len(extension.tokens) for extension in extensions]
        starts = [table.length(extension.key) for extension in extensions]
        write = [table.spare(e.key, n) for e, n in zip(extensions, counts, strict=True)]
        seen = [table.seen(e.key, n) for e, n in zip(extensions, counts, strict=True)]
        rows = self._rows(write, seen, None)
        last = np.cumsum(counts) - 1
        logits = self._forward(
            np.concatenate([np.asarray(e.tokens, dtype=np.int64) for e in extensions]),
            np.concatenate([s + np.arange(n) for s, n in zip(starts, counts, strict=True)]),
            rows,
            last if scores else last[:0],
        )
        for extension, count in zip(extensions, counts, strict=True):
            table.commit(extension.key, np.arange(count))
        return logits if scores else None

    @torch.inference_mode()
    def branch(self, requests: Sequence[Branches]) -> Tensor:
        """Run tree rows of some requests, ragged; logits ``[R, V]`` of all of them in order."""
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
        rows = self._rows(write, seen, None if is_causal else np.concatenate(above))
        positions = [table.length(r.key) + r.depth_n for r in requests]
        tokens = np.concatenate([r.tokens_n for r in requests])
        return self._forward(tokens, np.concatenate(positions), rows, np.arange(len(tokens)))

    def _rows(
        self, write: list[IntArray], seen: list[IntArray], ancestors_RA: IntArray | None
    ) -> RaggedRows:
        layout = Padded if self._pads else ByRequest
        return RaggedRows(
            pool=self._pool,
            write_R=self._tensor(np.concatenate(write)),
            sequences=layout.of(
                seen, list(map(len, write)), self.device, is_causal=ancestors_RA is None
            ),
            ancestors_RA=None if ancestors_RA is None else self._tensor(ancestors_RA),
        )

    def _forward(
        self, tokens_R: IntArray, positions_R: IntArray, rows: RaggedRows, kept: IntArray
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
