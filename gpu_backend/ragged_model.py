"""A model over the rows of many requests: one flattened forward, keys and values in a pool.

Shape letters: R rows of all requests, V vocabulary, F features side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from gpu_backend.feature_taps import FeatureTaps
from gpu_backend.kv_pool import KvPool
from gpu_backend.kv_slots import SlotTable
from gpu_backend.models import context_limit
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.ragged_pool import (
    NO_ANCESTOR,
    Branches,
    Extension,
    IntArray,
    PlacedRows,
    RaggedPool,
)

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["NO_ANCESTOR", "Branches", "Extension", "RaggedModel"]


class RaggedModel:
    """A decoder-only model prepared by :func:`gpu_backend.model_preparation.prepare_model`.

    - :meth:`extend` writes rows and commits them; :meth:`branch` writes rows behind the sequences
      and leaves it to the caller to commit a path of them, or nothing.
    - Requests must have reserved their slots in :attr:`table`.

    Attributes:
        features: [R, F] of the rows of the newest forward; None without taps.
    """

    features: Tensor | None

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        num_slots: int,
        role: str = "target",
        block: int | None = None,
        pads: bool | None = None,
        attention: AttentionName = "torch",
        taps: Sequence[int] = (),
    ) -> None:
        """Allocate the pool; nothing is computed.

        Args:
            model: prepared for tree attention, in evaluation mode.
            vocab_size: real tokens, V; logits beyond are padding and are cut off.
            num_slots: tokens of all requests, tree rows included, that the pool holds.
            role: what messages call the model.
            block: slots of the largest request; see :class:`gpu_backend.ragged_pool.RaggedPool`.
            pads: see there.
            attention: likewise.
            taps: layers whose inputs are kept as features.

        Raises:
            InputError: that attention was asked for by name and cannot be used.
        """
        self.vocab_size = vocab_size
        self._model = model
        pool = KvPool.of(model.config, num_slots, model.dtype, model.device)
        self._places = RaggedPool(
            pool,
            query_heads=model.config.num_attention_heads,
            role=role,
            block=block,
            pads=pads,
            attention=attention,
        )
        layers = model.get_decoder().layers if taps else ()  # type: ignore[no-untyped-call]
        self._taps = FeatureTaps(layers, taps)
        self.features = None

    @property
    def table(self) -> SlotTable:
        """Which slots each request owns."""
        return self._places.table

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
        self._places.require_room(num_tokens, tree_rows, context_limit(self._model))

    def make_room(self, key: int, tree_rows: int) -> None:
        """Let a request have so many tree rows in all; the pool grows where it must."""
        self._places.make_room(key, tree_rows)

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
        is_scored = np.broadcast_to(scores, len(extensions))
        last = np.cumsum([len(extension.tokens) for extension in extensions]) - 1
        logits = self._extend(extensions, last[is_scored])
        return logits if is_scored.any() else None

    @torch.inference_mode()
    def extend_rows(self, extension: Extension, kept: IntArray) -> Tensor:
        """Append tokens to one sequence; logits ``[len(kept), V]`` of those number ``kept``."""
        return self._extend([extension], kept)

    @torch.inference_mode()
    def branch(self, requests: Sequence[Branches]) -> Tensor:
        """Run tree rows of some requests, ragged; logits ``[R, V]`` of all of them in order."""
        placed = self._places.branching(requests)
        tokens = np.concatenate([request.tokens_n for request in requests])
        return self._forward(tokens, placed, np.arange(len(tokens)))

    def _extend(self, extensions: Sequence[Extension], kept: IntArray) -> Tensor:
        keys = [extension.key for extension in extensions]
        counts = [len(extension.tokens) for extension in extensions]
        placed = self._places.continuing(keys, counts)
        tokens = np.concatenate([np.asarray(e.tokens, dtype=np.int64) for e in extensions])
        logits = self._forward(tokens, placed, kept)
        self._places.commit(keys, counts)
        return logits

    def _forward(self, tokens_R: IntArray, placed: PlacedRows, kept: IntArray) -> Tensor:
        """Logits ``[len(kept), V]`` of the kept rows, padding of the vocabulary cut off."""
        tensor = self._places.tensor
        with self._taps.listening():
            output = self._model(
                input_ids=tensor(tokens_R)[None],
                position_ids=tensor(placed.position_R)[None],
                use_cache=False,
                logits_to_keep=tensor(kept),
                tree_rows=placed.rows,
            )
        self.features = self._taps.take()
        logits: Tensor = output.logits[0, :, : self.vocab_size]
        return logits
