"""A head over one request: a committed sequence of pairs, and tree rows that branch off it.

Shape letters: K rows, F features side by side, h hidden size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.eagle3.head import Eagle3Head
from gpu_backend.eagle3.ragged_head import HeadRows, PairRun, RaggedHead
from gpu_backend.new_nodes import NewNodes
from gpu_backend.scoring import NO_TOKEN, RowScores, Softmax, score_rows, score_tokens

IntArray = npt.NDArray[np.int64]

_KEY: Final = 0
"""Of the only request in the pool."""


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
            RowScores.joined([part.scores for part in parts]),
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
        """Allocate the pool; nothing is computed.

        Args:
            head: in evaluation mode, made for tree attention.
            capacity: pairs that the sequence can hold.
            width: children kept per row.
            row_chunk: rows per forward.
        """
        self._width = width
        self._row_chunk = row_chunk
        # Read in place, the window of a row would hold the whole tree.
        self._ragged = RaggedHead(head, num_slots=capacity, pads=True)
        self._ragged.table.reserve(_KEY, capacity)
        ids = head.token_ids
        self._draft_id_V = torch.full((head.config.vocab_size,), len(ids), device=ids.device)
        self._draft_id_V[ids] = torch.arange(len(ids), device=ids.device)

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
            rows = slice(start, start + self._row_chunk)
            run = PairRun(_KEY, tokens_K[rows].tolist(), features_KF[rows])
            kept = np.arange(max(first_scored - start, 0), len(run.tokens))
            said = self._ragged.extend_rows(run, kept)
            if len(kept):
                parts.append(self._score(said, following_K[start + kept]))
        return HeadScores.joined(parts)

    @torch.inference_mode()
    def expand(self, nodes: NewNodes, fed_Kh: Tensor, following_K: IntArray) -> HeadScores:
        """Add tree rows and score them.

        Args:
            nodes: the rows, behind the sequence of pairs.
            fed_Kh: what the head said of their parents.
            following_K: the tokens that the text goes on with.
        """
        self._ragged.make_room(_KEY, nodes.end_row)
        parts = []
        for rows, branches in nodes.chunks(_KEY, self._row_chunk):
            said = self._ragged.branch([branches], fed_Kh[rows])
            parts.append(self._score(said, following_K[rows]))
        return HeadScores.joined(parts)

    def _score(self, said: HeadRows, following_K: IntArray) -> HeadScores:
        logits = said.logits_RD
        softmax = Softmax.of(logits)
        scores = score_rows(logits, softmax, self._width)
        following = torch.from_numpy(following_K).to(self._draft_id_V.device)
        rank, logp = score_tokens(logits, softmax, self._draft_id_V[following])
        ids = self._ragged.token_ids.cpu().numpy()
        token = np.where(scores.child_token == NO_TOKEN, NO_TOKEN, ids[scores.child_token])
        by_id = RowScores(token.astype(np.int32), scores.child_logp, scores.entropy)
        return HeadScores(by_id, rank, logp, said.fed_Rh)
