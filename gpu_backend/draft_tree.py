"""The draft model over one request: a committed prefix, and tree rows that branch off it.

Shape letters: K rows, A ancestors, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.attention import TreeRows
from gpu_backend.kv_store import KvStore
from gpu_backend.scoring import RowScores, Softmax, score_rows, score_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

IntArray = npt.NDArray[np.integer]


class DraftTree:
    """Keys, values and scores of one request's prefix and of the tree rows behind it.

    - ``prefill`` is called once and commits the prefix.
    - ``expand`` may then be called any number of times; each call adds tree rows that later
      rows can name as ancestors.

    Args:
        model: prepared by :func:`gpu_backend.model_preparation.prepare_draft`.
        prefix_capacity: tokens the prefix can hold.
        width: children kept per row.
        row_chunk: rows per forward; bounds the memory for logits at ``row_chunk * V``.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        prefix_capacity: int,
        width: int,
        row_chunk: int = 512,
    ) -> None:
        """Allocate an empty store; nothing is computed."""
        config = model.config
        heads = config.num_attention_heads
        self._model = model
        self._width = width
        self._row_chunk = row_chunk
        self._store = KvStore(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or heads,
            getattr(config, "head_dim", None) or config.hidden_size // heads,
            prefix_capacity=prefix_capacity,
            dtype=model.dtype,
            device=model.device,
        )

    @property
    def num_rows(self) -> int:
        """Tree rows so far; the next ``expand`` numbers its rows from here."""
        return self._store.num_tree

    @torch.inference_mode()
    def prefill(
        self, token_ids: list[int], first_scored: int
    ) -> tuple[RowScores, npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Commit the prefix and score its rows from ``first_scored`` on.

        Returns:
            Scores of the K scored rows, and rank and log-probability ``[K - 1]`` of the token
            that follows each of them, the last row's being unknown.
        """
        ids = self._tensor(np.asarray(token_ids))
        scores, ranks, logps = [], [], []
        for start in range(0, len(token_ids), self._row_chunk):
            rows = torch.arange(start, min(start + self._row_chunk, len(ids)), device=ids.device)
            kept = rows[rows >= first_scored]
            tree_rows = TreeRows.build(self._store, rows + 1, None, self._model.dtype)
            logits = self._forward(ids[rows], rows, tree_rows, kept - start)
            self._store.commit_prefix(len(rows))
            if not len(kept):
                continue
            softmax = Softmax.of(logits)
            scores.append(score_rows(logits, softmax, self._width))
            # The last token has no follower; any token will do for it, as its score is dropped.
            following = ids[(kept + 1).clamp_max(len(ids) - 1)]
            rank, logp = score_tokens(logits, softmax, following)
            ranks.append(rank)
            logps.append(logp)
        return _joined(scores), np.concatenate(ranks)[:-1], np.concatenate(logps)[:-1]

    @torch.inference_mode()
    def expand(
        self, tokens_K: IntArray, prefix_len_K: IntArray, ancestors_KA: IntArray
    ) -> RowScores:
        """Add tree rows and score them.

        Args:
            tokens_K: token of every row.
            prefix_len_K: prefix tokens it sees, at least 1; cheapest in ascending order.
            ancestors_KA: tree rows above it, in any order and padded with -1; the row itself is
                number ``num_rows`` + its index and is added here.

        Returns:
            Scores of the K rows.
        """
        own = self.num_rows + np.arange(len(tokens_K))
        seen_KA = np.concatenate([own[:, None], ancestors_KA], axis=1)
        positions_K = prefix_len_K + (ancestors_KA >= 0).sum(axis=1)
        scores = []
        for start in range(0, len(tokens_K), self._row_chunk):
            rows = slice(start, start + self._row_chunk)
            scores.append(
                self._expand_chunk(
                    tokens_K[rows], positions_K[rows], prefix_len_K[rows], seen_KA[rows]
                )
            )
        return _joined(scores)

    def _expand_chunk(
        self, tokens: IntArray, positions: IntArray, prefix_len: IntArray, seen_KA: IntArray
    ) -> RowScores:
        self._store.reserve_tree(len(tokens))
        tree_rows = TreeRows.build(
            self._store, self._tensor(prefix_len), self._tensor(seen_KA), self._model.dtype
        )
        everything = torch.arange(len(tokens), device=self._model.device)
        logits = self._forward(self._tensor(tokens), self._tensor(positions), tree_rows, everything)
        self._store.commit_tree(len(tokens))
        return score_rows(logits, Softmax.of(logits), self._width)

    def _forward(
        self, ids_K: Tensor, positions_K: Tensor, tree_rows: TreeRows, kept: Tensor
    ) -> Tensor:
        """Logits ``[len(kept), V]`` of the kept rows."""
        output = self._model(
            input_ids=ids_K[None],
            position_ids=positions_K[None],
            use_cache=False,
            logits_to_keep=kept,
            tree_rows=tree_rows,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self._model.device)


def _joined(parts: list[RowScores]) -> RowScores:
    return RowScores(
        np.concatenate([part.child_token for part in parts]),
        np.concatenate([part.child_logp for part in parts]),
        np.concatenate([part.entropy for part in parts]),
    )
