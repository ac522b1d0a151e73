"""The draft model over one request: a committed prefix, and tree rows that branch off it.

Shape letters: K rows, V vocabulary.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from gpu_backend.new_nodes import NewNodes
from gpu_backend.ragged_model import Extension, RaggedModel
from gpu_backend.scoring import RowScores, Softmax, score_rows, score_tokens

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_KEY: Final = 0
"""Of the only request in the pool."""


class DraftTree:
    """Keys, values and scores of one request's prefix and of the tree rows behind it.

    - :meth:`prefill` is called once and commits the prefix.
    - :meth:`expand` may then be called any number of times; each call adds tree rows that later
      rows can name as ancestors.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        prefix_capacity: int,
        width: int,
        row_chunk: int = 512,
    ) -> None:
        """Allocate the pool; nothing is computed.

        Args:
            model: prepared by :func:`gpu_backend.model_preparation.prepare_model`.
            prefix_capacity: tokens the prefix can hold.
            width: children kept per row.
            row_chunk: rows per forward; bounds the memory for logits at ``row_chunk * V``.
        """
        self._width = width
        self._row_chunk = row_chunk
        self._ragged = RaggedModel(
            model,
            vocab_size=model.config.vocab_size,  # the head is cut already
            num_slots=prefix_capacity,
            role="draft",
            pads=True,  # read in place, the window of a row would hold the whole tree
        )
        self._ragged.table.reserve(_KEY, prefix_capacity)

    @torch.inference_mode()
    def prefill(
        self, token_ids: list[int], first_scored: int
    ) -> tuple[RowScores, npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Commit the prefix and score its rows from ``first_scored`` on.

        Returns:
            Scores of the K scored rows, and rank and log-probability ``[K - 1]`` of the token
            that follows each of them, the last row's being unknown.
        """
        # The last token has no follower; any token will do for it, as its score is dropped.
        following = torch.tensor([*token_ids[1:], token_ids[-1]], device=self._ragged.device)
        scores, ranks, logps = [], [], []
        for start in range(0, len(token_ids), self._row_chunk):
            chunk = token_ids[start : start + self._row_chunk]
            kept = np.arange(max(first_scored - start, 0), len(chunk))
            logits = self._ragged.extend_rows(Extension(_KEY, chunk), kept)
            if not len(kept):
                continue
            softmax = Softmax.of(logits)
            scores.append(score_rows(logits, softmax, self._width))
            rank, logp = score_tokens(logits, softmax, following[start + torch.from_numpy(kept)])
            ranks.append(rank)
            logps.append(logp)
        return RowScores.joined(scores), np.concatenate(ranks)[:-1], np.concatenate(logps)[:-1]

    @torch.inference_mode()
    def expand(self, nodes: NewNodes) -> RowScores:
        """Add tree rows and score them."""
        self._ragged.make_room(_KEY, nodes.end_row)
        scores = []
        for _, branches in nodes.chunks(_KEY, self._row_chunk):
            logits = self._ragged.branch([branches])
            scores.append(score_rows(logits, Softmax.of(logits), self._width))
        return RowScores.joined(scores)
