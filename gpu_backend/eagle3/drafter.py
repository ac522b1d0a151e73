"""An EAGLE-3 head for a whole batch: reads pairs of target features and tokens, then drafts.

Before a draft, the pairs that were committed since the last one are read with the target's own
features; the last of them stands at the root and gives its children. Below, a node takes what the
head said of its parent in the place of features: a guess, forgotten after the step. Accepted
tokens are read again, with the features that verification gave.

Shape letters: B slots of the batch, F expanded nodes of a layer, R rows, h hidden size, D draft
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.eagle3.pending import PendingPairs
from gpu_backend.eagle3.ragged_head import HeadRows, PairRun, RaggedHead
from gpu_backend.ragged_pool import Branches, Extension
from gpu_backend.tree_drafter import TreeDrafter

IntArray = npt.NDArray[np.int64]


class EagleDrafter(TreeDrafter):
    """Drafts for every slot of a batch from a head that reads the target's features."""

    def __init__(
        self, head: RaggedHead, num_slots: int, *, tree_rows: int, row_chunk: int = 512
    ) -> None:
        """Bind the head.

        Args:
            head: over its pool.
            num_slots: slots of the batch, B.
            tree_rows: expanded nodes that every request has room for.
            row_chunk: pairs per forward while catching up.
        """
        super().__init__(head, num_slots, tree_rows, head.token_ids)
        self.head = head
        self._row_chunk = row_chunk
        self._pending = [PendingPairs() for _ in range(num_slots)]
        self._fed_BFh = torch.zeros((num_slots, 1, 0))
        """What the head said of the newest expanded nodes; any where nothing was."""

    @property
    def taps(self) -> tuple[int, ...]:
        """Target features, by the layer whose input they are."""
        return self.head.taps

    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None = None) -> None:
        """Read prompt tokens at once, for features that wait take more room than their pairs.

        The last feature of each request waits for the next token.
        """
        assert features is not None, "a head reads the target's features"
        for chunk, features_nF in zip(chunks, features, strict=True):
            self._pending[chunk.key].add(chunk.tokens, features_nF)
        self._read([chunk.key for chunk in chunks], scores=False)

    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Note tokens, and features of the positions before them, to be read before a draft."""
        self._pending[slot].add(tokens, features)

    def _forget(self, slot: int) -> None:
        self._pending[slot] = PendingPairs()

    @property
    def unread(self) -> tuple[int, ...]:
        """Pairs by slot that the head has not read yet."""
        return tuple(pending.num_pairs for pending in self._pending)

    def _catch_up(self, drafting_B: Tensor) -> Tensor | None:
        slots = np.flatnonzero(drafting_B.cpu().numpy()).tolist()
        if not slots:
            return None
        most = max(1, self._row_chunk // len(slots))
        while long := [slot for slot in slots if self._pending[slot].num_pairs > most]:
            self._read(long, scores=False, most=most)
        return self._remember(self._read(slots, scores=True), drafting_B[:, None])

    def _run(self, rows: list[Branches], parent_BF: IntArray, mask_BF: Tensor) -> Tensor:
        parents = torch.from_numpy(parent_BF).to(mask_BF.device)[mask_BF]
        fed_Rh = self._fed_BFh[mask_BF.nonzero()[:, 0], parents]
        return self._remember(self.head.branch(rows, fed_Rh), mask_BF)

    def _read(self, slots: list[int], *, scores: bool, most: int | None = None) -> HeadRows | None:
        """Read complete pairs of these requests, at most so many of each."""
        runs = []
        for slot in slots:
            pending = self._pending[slot]
            count = pending.num_pairs if most is None else min(most, pending.num_pairs)
            if count:
                runs.append(PairRun(slot, *pending.take(count)))
        return self.head.extend(runs, scores=scores) if runs else None

    def _remember(self, said: HeadRows | None, mask_BF: Tensor) -> Tensor:
        """Keep what the children of these nodes will take."""
        assert said is not None, "the last committed token is always among what is pending"
        self._fed_BFh = said.fed_Rh.new_zeros((*mask_BF.shape, said.fed_Rh.shape[1]))
        self._fed_BFh[mask_BF] = said.fed_Rh
        return said.logits_RD
