"""An independent draft model for a whole batch: catches up on what was committed, then drafts.

Its pool holds every committed token it has read. Before a draft it reads what it is behind, which
ends with the last committed token; the nodes it expands are tree rows behind that, forgotten after
the step. Accepted tokens are read again as part of the sequence, so its keys and values are those
of plain text whatever was drafted, accepted or skipped before.

Shape letters: B slots of the batch, F expanded nodes of a layer, W candidates of a layer,
N candidates of all layers, A ancestors, R rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from gpu_backend.candidates import Candidates, Children, candidates
from gpu_backend.ragged_model import Branches, Extension, RaggedModel

IntArray = npt.NDArray[np.int64]


def draft_rows(plan: DraftPlan) -> int:
    """Nodes below the root that a plan may expand for one request."""
    if plan.template is not None:
        return sum(plan.template.expanded[1:])
    return max(plan.levels - 1, 0) * plan.width


class BatchDrafter:
    """Drafts for every slot of a batch from a model over a pool of its own.

    Log-probabilities are rounded to float16 before they are added and children are ranked by
    (logit descending, token id ascending), as recordings have them.
    """

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
        self.draft = draft
        self._num_slots = num_slots
        self._tree_rows = tree_rows
        self._row_chunk = row_chunk
        self._behind: list[list[int]] = [[] for _ in range(num_slots)]
        self._plan = DraftPlan(levels=0)
        self._used_B = np.zeros(num_slots, dtype=np.int64)
        self._above_BFA = np.zeros((num_slots, 1, 0), dtype=np.int64)
        """Places of the newest expanded nodes' branches; A is 0 for the roots."""
        self._place_BW = np.zeros((num_slots, 0), dtype=np.int64)
        """Which of these nodes each candidate of the newest layer is a child of."""
        self.token_layers: list[IntArray] = []
        """Token ids [B, W] of the candidates of every depth of this step."""
        self.revealed: list[tuple[Children, Frontier | None]] = []
        """Children of this step's expansions, the roots' first, and which nodes were expanded."""
        self.num_forwards = 0
        """Layers of this step that the model ran for."""

    @property
    def signals(self) -> frozenset[str]:
        """Ranks, path log-probabilities and entropies."""
        return frozenset({"ranks", "path_logp", "entropy"})

    def objection(self, plan: DraftPlan) -> str | None:
        """Refuse plans that expand more nodes than there is room for."""
        rows = draft_rows(plan)
        if rows > self._tree_rows:
            return f"expands {rows} nodes of a request, but {self._tree_rows} have room"
        return None

    def require_room(self, num_tokens: int) -> None:
        """Refuse a request that the draft's positions or its pool cannot hold."""
        self.draft.require_room(num_tokens, self._tree_rows)

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Reserve room for a request's tokens and its tree rows."""
        return self.draft.table.reserve(slot, num_tokens + self._tree_rows)

    def read(self, chunks: Sequence[Extension]) -> None:
        """Read prompt tokens."""
        self.draft.extend(chunks, scores=False)

    def commit(self, slot: int, tokens: Sequence[int]) -> None:
        """Note tokens to be read before the next draft."""
        self._behind[slot] += tokens

    def release(self, slot: int) -> None:
        """Forget a request."""
        self._behind[slot] = []
        self.draft.table.release(slot)

    def check_integrity(self, slots: Sequence[int]) -> None:
        """Check the pool's slots, and that no other request is behind."""
        self.draft.table.check_integrity(slots)
        behind = [slot for slot, tokens in enumerate(self._behind) if tokens]
        assert set(behind) <= set(slots), "tokens of a request that has left"

    def tokens(self) -> IntArray:
        """Token ids [B, N] of the step's candidates."""
        return np.concatenate(self.token_layers, axis=1)

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Catch up, and return the roots' children."""
        self.revealed = []
        children = self.roots(plan, drafting_B)
        self.revealed.append((children, None))
        return self.keep(candidates(plan, children, None, None))

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Run the frontier's nodes, and return their children."""
        children = self.grow(layer, frontier)
        self.revealed.append((children, frontier))
        return self.keep(candidates(self._plan, children, layer, frontier))

    def roots(self, plan: DraftPlan, drafting_B: Tensor) -> Children:
        """Start a step: catch up with these requests, and score their roots' children."""
        self._plan, self.token_layers = plan, []
        self._used_B[:] = 0
        self._above_BFA = np.zeros((self._num_slots, 1, 0), dtype=np.int64)
        logits_RV = self._catch_up(_true(drafting_B))
        self.num_forwards = int(logits_RV is not None)
        return Children.of(logits_RV, drafting_B[:, None], plan.top_k)

    def grow(self, layer: LayerView, frontier: Frontier) -> Children:
        """Run nodes of the newest layer, whose parents it has run, and score their children."""
        index_BF, mask_BF = frontier.index_BF.cpu().numpy(), frontier.mask_BF.cpu().numpy()
        self._above_BFA = self._branches(index_BF, mask_BF)
        rows = [
            self._rows(slot, layer.depth, index_BF[slot], mask_BF[slot])
            for slot in _true(frontier.mask_BF.any(1))
        ]
        self._used_B += mask_BF.sum(axis=1)
        logits_RV = self.draft.branch(rows) if rows else None
        self.num_forwards += bool(rows)
        return Children.of(logits_RV, frontier.mask_BF, self._plan.top_k)

    def keep(self, layer: Candidates) -> LayerView:
        """Remember what only the drafter knows of a layer."""
        self.token_layers.append(layer.token_BW.cpu().numpy())
        self._place_BW = layer.place_BW.cpu().numpy()
        return layer.view

    def _catch_up(self, slots: list[int]) -> Tensor | None:
        """Read what each request is behind; logits after its last committed token."""
        if not slots:
            return None
        most = max(1, self._row_chunk // len(slots))
        while long := [slot for slot in slots if len(self._behind[slot]) > most]:
            self.read([Extension(slot, self._behind[slot][:most]) for slot in long])
            for slot in long:
                del self._behind[slot][:most]
        logits = self.draft.extend([Extension(slot, self._behind[slot]) for slot in slots])
        for slot in slots:
            self._behind[slot] = []
        return logits

    def _branches(self, index_BF: IntArray, mask_BF: npt.NDArray[np.bool_]) -> IntArray:
        """Branches of the nodes to expand, themselves last: [B, F, A]; any where masked out."""
        parent_BF = np.take_along_axis(self._place_BW, index_BF, axis=1)
        above_BFA = np.take_along_axis(self._above_BFA, parent_BF[..., None], axis=1)
        place_BF = self._used_B[:, None] + np.cumsum(mask_BF, axis=1) - 1
        return np.concatenate([above_BFA, place_BF[..., None]], axis=2)

    def _rows(
        self, slot: int, depth: int, index_F: IntArray, mask_F: npt.NDArray[np.bool_]
    ) -> Branches:
        """Tree rows of one request's chosen candidates."""
        above_nA = self._above_BFA[slot, mask_F]
        return Branches(
            key=slot,
            tokens_n=self.token_layers[-1][slot, index_F[mask_F]],
            # The sequence ends with the root, so depth 1 is the first place behind it.
            depth_n=np.full(len(above_nA), depth - 1, dtype=np.int64),
            place_n=above_nA[:, -1],
            above_nA=above_nA,
        )


def _true(mask_B: Tensor) -> list[int]:
    return np.flatnonzero(mask_B.cpu().numpy()).tolist()
