"""A head over the pairs of many requests: one flattened forward, keys and values in a pool.

Shape letters: R rows of all requests, n rows of one request, F features side by side, h hidden
size, D draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.kv_pool import KvPool
from gpu_backend.kv_slots import SlotTable
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.ragged_pool import Branches, IntArray, PlacedRows, RaggedPool


@dataclass(frozen=True, slots=True)
class PairRun:
    """Pairs that continue one request's sequence, at least one."""

    key: int
    tokens: Sequence[int]
    """Each the token after its feature's."""
    features_nF: Tensor


@dataclass(frozen=True, slots=True)
class HeadRows:
    """What the head says of some rows."""

    logits_RD: Tensor
    fed_Rh: Tensor
    """What the rows' children take in the place of features."""


class RaggedHead:
    """A head whose attention is :mod:`gpu_backend.attention`'s, over a pool of one layer.

    Its sequences are of pairs: the pair at position t is the target's feature there and the token
    after it, so a sequence is one shorter than the text. Requests must have reserved their slots
    in :attr:`table`.
    """

    def __init__(
        self,
        head: Eagle3Head,
        *,
        num_slots: int,
        block: int | None = None,
        pads: bool | None = None,
        attention: AttentionName = "torch",
    ) -> None:
        """Allocate the pool; nothing is computed.

        Args:
            head: in evaluation mode, made for tree attention.
            num_slots: pairs of all requests, tree rows included, that the pool holds.
            block: slots of the largest request; see :class:`gpu_backend.ragged_pool.RaggedPool`.
            pads: see there.
            attention: likewise.

        Raises:
            InputError: that attention was asked for by name and cannot be used.
        """
        # Linear layers may hold wider weights than the head computes with; norms do not.
        weight = next(head.norm.parameters())
        pool = KvPool.of(head.config.layer_config, num_slots, weight.dtype, weight.device)
        self._head = head
        self._places = RaggedPool(
            pool,
            query_heads=head.config.num_attention_heads,
            role="draft",
            block=block,
            pads=pads,
            attention=attention,
        )

    @property
    def table(self) -> SlotTable:
        """Which slots each request owns."""
        return self._places.table

    @property
    def taps(self) -> tuple[int, ...]:
        """Features of the target that it takes."""
        return self._head.config.taps

    @property
    def token_ids(self) -> Tensor:
        """int64 [D]: ids of the tokens that it proposes, ascending."""
        return self._head.token_ids

    def require_room(self, num_tokens: int, tree_rows: int) -> None:
        """Refuse a request that the pool cannot hold; positions do not end.

        Raises:
            InputError: naming the limit and what the request needs.
        """
        self._places.require_room(num_tokens, tree_rows)

    def make_room(self, key: int, tree_rows: int) -> None:
        """Let a request have so many tree rows in all; the pool grows where it must."""
        self._places.make_room(key, tree_rows)

    @torch.inference_mode()
    def extend(self, runs: Sequence[PairRun], *, scores: bool = True) -> HeadRows | None:
        """Append pairs to sequences.

        Returns:
            What is said of each request's last pair; None unless ``scores``.
        """
        last = np.cumsum([len(run.tokens) for run in runs]) - 1
        said = self._extend(runs, last if scores else last[:0])
        return said if scores else None

    @torch.inference_mode()
    def extend_rows(self, run: PairRun, kept: IntArray) -> HeadRows:
        """Append pairs to one sequence; what is said of those number ``kept``."""
        return self._extend([run], kept)

    @torch.inference_mode()
    def branch(self, requests: Sequence[Branches], fed_Rh: Tensor) -> HeadRows:
        """Run tree rows of some requests, ragged.

        Args:
            requests: the rows.
            fed_Rh: what the head said of each row's parent.
        """
        placed = self._places.branching(requests)
        tokens = np.concatenate([request.tokens_n for request in requests])
        return self._forward(tokens, fed_Rh, placed, np.arange(len(tokens)))

    def branch_of_nothing(self, requests: Sequence[Branches]) -> HeadRows:
        """Run tree rows whose parents said nothing; for timing."""
        num_rows = sum(len(request.tokens_n) for request in requests)
        size = self._head.config.hidden_size
        weight = next(self._head.norm.parameters())
        return self.branch(requests, weight.new_zeros((num_rows, size)))

    def _extend(self, runs: Sequence[PairRun], kept: IntArray) -> HeadRows:
        keys, counts = [run.key for run in runs], [len(run.tokens) for run in runs]
        placed = self._places.continuing(keys, counts)
        tokens = np.concatenate([np.asarray(run.tokens, dtype=np.int64) for run in runs])
        hidden_Rh = self._head.fuse(torch.cat([run.features_nF for run in runs]))
        said = self._forward(tokens, hidden_Rh, placed, kept)
        self._places.commit(keys, counts)
        return said

    def _forward(
        self, tokens_R: IntArray, hidden_Rh: Tensor, placed: PlacedRows, kept: IntArray
    ) -> HeadRows:
        tensor = self._places.tensor
        out = self._head(
            tensor(tokens_R)[None],
            hidden_Rh[None],
            tensor(placed.position_R)[None],
            attention_mask=None,
            tree_rows=placed.rows,
        )
        rows = tensor(kept)
        return HeadRows(self._head.logits(out.normed[0, rows]), out.fed[0, rows])
