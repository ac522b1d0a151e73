"""A head over one request: a committed sequence of pairs, and tree rows that branch off it.

Shape letters: K rows, F features side by side, h hidden size, A ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.attention import TreeRows
from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.kv_store import KvStore
from gpu_backend.scoring import NO_TOKEN, RowScores, Softmax, score_rows, score_tokens

IntArray = npt.NDArray[np.integer]


@dataclass(frozen=True, slots=True)
class HeadScores:
    """What is kept of K rows."""

    scores: RowScores
    """Children by the target's token ids."""
    rank_K: npt.NDArray[np.int32]
    """Rank of the token that the text goes on with; a sentinel where it cannot be proposed."""
    logp_K: npt.NDArray[np.float16]
    """Its log-probability; -inf where it cannot be proposed."""
    fed_Kh: Tensor
    """What the rows' children take in the place of features."""

    @staticmethod
    def joined(parts: list[HeadScores]) -> HeadScores:
        """Rows behind one another."""
        return HeadScores(
            RowScores(
                np.concatenate([part.scores.child_token for part in parts]),
                np.concatenate([part.scores.child_logp for part in parts]),
                np.concatenate([part.scores.entropy for part in parts]),
            ),
            np.concatenate([part.rank_K for part in parts]),
            np.concatenate([part.logp_K for part in parts]),
            torch.cat([part.fed_Kh for part in parts]),
        )


class HeadTree:
    """Keys, values and scores of one request's pairs and of the tree rows behind them.

    :meth:`prefill` is called once; :meth:`expand` may then be called any number of times.
    """

    def __init__(
        self, head: Eagle3Head, *, capacity: int, width: int, row_chunk: int = 512
    ) -> None:
        """Allocate an empty store; nothing is computed.

        Args:
            head: in evaluation mode, made for tree attention.
            capacity: pairs that the sequence can hold.
            width: children kept per row.
            row_chunk: rows per forward.
        """
        config = head.config
        # Linear layers may hold wider weights than the head computes with; norms do not.
        weight = next(head.norm.parameters())
        self._head = head
        self._width = width
        self._row_chunk = row_chunk
        self._dtype, self._device = weight.dtype, weight.device
        self._store = KvStore(
            1,
            config.num_key_value_heads,
            config.head_dim,
            prefix_capacity=capacity,
            dtype=weight.dtype,
            device=weight.device,
        )
        ids = head.token_ids
        self._draft_id_V = torch.full((config.vocab_size,), len(ids), device=ids.device)
        self._draft_id_V[ids] = torch.arange(len(ids), device=ids.device)

    @property
    def num_rows(self) -> int:
        """Tree rows so far; the next :meth:`expand` numbers its rows from here."""
        return self._store.num_tree

    @torch.inference_mode()
    def prefill(
        self, tokens_K: IntArray, features_KF: Tensor, following_K: IntArray, first_scored: int
    ) -> HeadScores:
        """Commit the sequence and score its rows from ``first_scored`` on.

        Args:
            tokens_K: of the pairs, each the token after its feature's.
            features_KF: the target's.
            following_K: the token after each of ``tokens_K``.
            first_scored: number of a row.
        """
        parts = []
        for start in range(0, len(tokens_K), self._row_chunk):
            rows = np.arange(start, min(start + self._row_chunk, len(tokens_K)))
            layout = TreeRows.build(self._store, self._tensor(rows + 1), None, self._dtype)
            hidden_Kh = self._head.fuse(features_KF[start : start + len(rows)])
            normed, fed = self._forward(tokens_K[rows], hidden_Kh, rows, layout)
            self._store.commit_prefix(len(rows))
            kept = rows[rows >= first_scored] - start
            if len(kept):
                parts.append(self._score(normed[kept], fed[kept], following_K[start + kept]))
        return HeadScores.joined(parts)

    @torch.inference_mode()
    def expand(
        self,
        tokens_K: IntArray,
        fed_Kh: Tensor,
        prefix_len_K: IntArray,
        ancestors_KA: IntArray,
        following_K: IntArray,
    ) -> HeadScores:
        """Add tree rows and score them.

        Args:
            tokens_K: token of every row.
            fed_Kh: what the head said of its parent.
            prefix_len_K: pairs of the sequence that it sees, at least 1.
            ancestors_KA: tree rows above it, padded with -1.
            following_K: the token that the text goes on with.
        """
        own = self.num_rows + np.arange(len(tokens_K))
        seen_KA = np.concatenate([own[:, None], ancestors_KA], axis=1)
        positions_K = prefix_len_K + (ancestors_KA >= 0).sum(axis=1)
        parts = []
        for start in range(0, len(tokens_K), self._row_chunk):
            rows = slice(start, start + self._row_chunk)
            self._store.reserve_tree(len(tokens_K[rows]))
            layout = TreeRows.build(
                self._store,
                self._tensor(prefix_len_K[rows]),
                self._tensor(seen_KA[rows]),
                self._dtype,
            )
            out = self._forward(tokens_K[rows], fed_Kh[rows], positions_K[rows], layout)
            self._store.commit_tree(len(tokens_K[rows]))
            parts.append(self._score(*out, following_K[rows]))
        return HeadScores.joined(parts)

    def _forward(
        self, tokens_K: IntArray, hidden_Kh: Tensor, positions_K: IntArray, layout: TreeRows
    ) -> tuple[Tensor, Tensor]:
        """What the output layer and the next step take, ``[K, h]`` each."""
        out = self._head(
            self._tensor(tokens_K)[None],
            hidden_Kh[None],
            self._tensor(positions_K)[None],
            attention_mask=None,
            tree_rows=layout,
        )
        return out.normed[0], out.fed[0]

    def _score(self, normed_Kh: Tensor, fed_Kh: Tensor, following_K: IntArray) -> HeadScores:
        logits = self._head.logits(normed_Kh)
        softmax = Softmax.of(logits)
        scores = score_rows(logits, softmax, self._width)
        following = self._draft_id_V[self._tensor(following_K)]
        rank, logp = score_tokens(logits, softmax, following)
        ids = self._head.token_ids.cpu().numpy()
        token = np.where(scores.child_token == NO_TOKEN, NO_TOKEN, ids[scores.child_token])
        by_id = RowScores(token.astype(np.int32), scores.child_logp, scores.entropy)
        return HeadScores(by_id, rank, logp, fed_Kh)

    def _tensor(self, values: IntArray) -> Tensor:
        return torch.as_tensor(np.asarray(values, dtype=np.int64), device=self._device)
