"""An independent draft model for a whole batch: catches up on what was committed, then drafts.

Its pool holds every committed token it has read. Before a draft it reads what it is behind, which
ends with the last committed token. Accepted tokens are read again as part of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from gpu_backend.ragged_model import Branches, Extension, RaggedModel
from gpu_backend.tree_drafter import TreeDrafter

IntArray = npt.NDArray[np.int64]


class BatchDrafter(TreeDrafter):
    """Drafts for every slot of a batch from a model that reads tokens."""

    def __init__(
        self, draft: RaggedModel, num_slots: int, *, tree_rows: int, row_chunk: int = 512
    ) -> None:
        """Bind the model.

        Args:
            draft: the draft model over its pool.
            num_slots: slots of the batch, B.
            tree_rows: expanded nodes that every request has room for.
            row_chunk: tokens per forward while catching up.
        """
        super().__init__(draft, num_slots, tree_rows)
        self.draft = draft
        self._row_chunk = row_chunk
        self._unread: list[list[int]] = [[] for _ in range(num_slots)]

    @property
    def taps(self) -> tuple[int, ...]:
        """It reads no features of the target."""
        return ()

    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None = None) -> None:
        """Read prompt tokens."""
        del features
        self.draft.extend(chunks, scores=False)

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Note tokens to be read before the next draft."""
        del features
        self._unread[slot] += tokens

    def _forget(self, slot: int) -> None:
        self._unread[slot] = []

    def _behind(self) -> set[int]:
        return {slot for slot, tokens in enumerate(self._unread) if tokens}

    def _catch_up(self, drafting_B: Tensor) -> Tensor | None:
        slots = np.flatnonzero(drafting_B.cpu().numpy()).tolist()
        if not slots:
            return None
        most = max(1, self._row_chunk // len(slots))
        while long := [slot for slot in slots if len(self._unread[slot]) > most]:
            self.read([Extension(slot, self._unread[slot][:most]) for slot in long])
            for slot in long:
                del self._unread[slot][:most]
        logits = self.draft.extend([Extension(slot, self._unread[slot]) for slot in slots])
        for slot in slots:
            self._unread[slot] = []
        return logits

    def _run(self, rows: list[Branches], parent_BF: IntArray, mask_BF: Tensor) -> Tensor:
        del parent_BF, mask_BF
        return self.draft.branch(rows)
