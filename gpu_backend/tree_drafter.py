"""Drafting for a whole batch by forwards of some model: what does not depend on the model.

The model's pool holds what is committed. The nodes that a step expands are tree rows behind that,
forgotten after the step: keys and values are those of the committed text whatever was drafted,
accepted or skipped before.

Shape letters: B slots of the batch, F expanded nodes of a layer, W candidates of a layer,
N candidates of all layers, A ancestors, R rows, V tokens that the model proposes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from gpu_backend.candidates import Children
from gpu_backend.draft_step import DraftStep, StepDrafter
from gpu_backend.kv_slots import SlotTable
from gpu_backend.ragged_pool import Branches, Extension

IntArray = npt.NDArray[np.int64]


def draft_rows(plan: DraftPlan) -> int:
    """Nodes below the root that a plan may expand for one request."""
    if plan.template is not None:
        return sum(plan.template.expanded[1:])
    return max(plan.levels - 1, 0) * plan.width


def slots_asked(plan: DraftPlan, like_B: Tensor) -> Tensor:
    """bool [B]: slots that a plan lets a model run for, on the device of ``like_B``."""
    if plan.model_slots is None:
        return torch.ones_like(like_B)
    asked = [slot in plan.model_slots for slot in range(len(like_B))]
    return torch.tensor(asked, device=like_B.device)


class DraftPool(Protocol):
    """A model over a pool, as far as admission goes."""

    @property
    def table(self) -> SlotTable:
        """Which slots each request owns."""
        ...

    def require_room(self, num_tokens: int, tree_rows: int) -> None:
        """Refuse a request that could never be served."""
        ...


class TreeDrafter(StepDrafter, ABC):
    """Drafts for every slot of a batch from a model over a pool of its own.

    Log-probabilities are rounded to float16 before they are added and children are ranked by
    (logit descending, token id ascending), as recordings have them.
    """

    looks_up: bool = False
    """It does nothing but ask its model."""

    def __init__(
        self, pool: DraftPool, num_slots: int, tree_rows: int, token_ids_V: Tensor | None = None
    ) -> None:
        """Start without requests.

        Args:
            pool: the draft model.
            num_slots: slots of the batch, B.
            tree_rows: expanded nodes that every request has room for.
            token_ids_V: ids of the tokens that logits stand for, ascending; None if they stand
                for all of them.
        """
        self._pool = pool
        self._num_slots = num_slots
        self._tree_rows = tree_rows
        self._token_ids_V = token_ids_V
        self.step = DraftStep(num_slots)
        self._used_B = np.zeros(num_slots, dtype=np.int64)
        self._above_BFA = np.zeros((num_slots, 1, 0), dtype=np.int64)
        """Places of the newest expanded nodes' branches; A is 0 for the roots."""
        self.num_forwards = 0
        """Layers of this step that the model ran for."""

    def objection(self, plan: DraftPlan) -> str | None:
        """Refuse plans that expand more nodes than there is room for."""
        rows = draft_rows(plan)
        if rows > self._tree_rows:
            return f"expands {rows} nodes of a request, but {self._tree_rows} have room"
        return None

    def require_room(self, num_tokens: int) -> None:
        """Refuse a request that the draft's positions or its pool cannot hold."""
        self._pool.require_room(num_tokens, self._tree_rows)

    def admit(self, slot: int, num_tokens: int) -> bool:
        """Reserve room for a request's tokens and its tree rows."""
        return self._pool.table.reserve(slot, num_tokens + self._tree_rows)

    def release(self, slot: int) -> None:
        """Forget a request."""
        self._forget(slot)
        self._pool.table.release(slot)

    def check_integrity(self, slots: Sequence[int]) -> None:
        """Check the pool's slots, and that no other request is behind."""
        self._pool.table.check_integrity(slots)
        behind = {slot for slot, count in enumerate(self.unread) if count}
        assert behind <= set(slots), "tokens of a request that has left"

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Catch up, and return the roots' children."""
        asked_B = drafting_B & slots_asked(plan, drafting_B)
        return self.step.reveal(self.roots(plan, asked_B), asked_B[:, None])

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Run the frontier's nodes, and return their children."""
        return self.step.reveal(self.grow(layer, frontier), frontier.mask_BF, layer, frontier)

    def roots(self, plan: DraftPlan, drafting_B: Tensor) -> Children:
        """Start a step: catch up with these requests, and score their roots' children."""
        self.step.start(plan)
        self._used_B[:] = 0
        self._above_BFA = np.zeros((self._num_slots, 1, 0), dtype=np.int64)
        logits_RV = self._catch_up(drafting_B)
        self.num_forwards = int(logits_RV is not None)
        return self._children(logits_RV, drafting_B[:, None])

    def grow(self, layer: LayerView, frontier: Frontier) -> Children:
        """Run nodes of the newest layer, whose parents have been run, and score their children."""
        index_BF, mask_BF = frontier.index_BF.cpu().numpy(), frontier.mask_BF.cpu().numpy()
        parent_BF = self.step.parents(index_BF)
        above_BFA = np.take_along_axis(self._above_BFA, parent_BF[..., None], axis=1)
        place_BF = self._used_B[:, None] + np.cumsum(mask_BF, axis=1) - 1
        self._above_BFA = np.concatenate([above_BFA, place_BF[..., None]], axis=2)
        self._used_B += mask_BF.sum(axis=1)
        rows = [
            self._rows(slot, layer.depth, index_BF[slot], mask_BF[slot])
            for slot in np.flatnonzero(mask_BF.any(axis=1)).tolist()
        ]
        logits_RV = self._run(rows, parent_BF, frontier.mask_BF) if rows else None
        self.num_forwards += bool(rows)
        return self._children(logits_RV, frontier.mask_BF)

    @property
    @abstractmethod
    def taps(self) -> tuple[int, ...]:
        """Features of the target that it reads, by the layer whose input they are; ascending."""

    @abstractmethod
    def read(self, chunks: Sequence[Extension], features: Sequence[Tensor] | None = None) -> None:
        """Take in prompt tokens, and the target's features of them where it has taps."""

    @abstractmethod
    def commit(self, slot: int, tokens: Sequence[int], features: Tensor | None = None) -> None:
        """Note emitted tokens, and features of the positions before them, to be read later."""

    @abstractmethod
    def _catch_up(self, drafting_B: Tensor) -> Tensor | None:
        """Logits [R, V] after the last committed tokens of these requests; None without any."""

    @abstractmethod
    def _run(self, rows: list[Branches], parent_BF: IntArray, mask_BF: Tensor) -> Tensor:
        """Logits [R, V] of tree rows.

        Args:
            rows: of all requests that have any, together the True entries of ``mask_BF`` in order.
            parent_BF: which of the nodes run before is the parent.
            mask_BF: the nodes to run.
        """

    @abstractmethod
    def _forget(self, slot: int) -> None:
        """Forget what a request is behind."""

    @property
    @abstractmethod
    def unread(self) -> tuple[int, ...]:
        """Tokens by slot that the model has not read yet."""

    def _children(self, logits_RV: Tensor | None, mask_BF: Tensor) -> Children:
        return Children.of(logits_RV, mask_BF, self.step.plan.top_k, self._token_ids_V)

    def _rows(
        self, slot: int, depth: int, index_F: IntArray, mask_F: npt.NDArray[np.bool_]
    ) -> Branches:
        """Tree rows of one request's chosen candidates."""
        above_nA = self._above_BFA[slot, mask_F]
        return Branches(
            key=slot,
            tokens_n=self.step.token_layers[-1][slot, index_F[mask_F]],
            # What is committed ends with the root, so depth 1 is the first place behind it.
            depth_n=np.full(len(above_nA), depth - 1, dtype=np.int64),
            place_n=above_nA[:, -1],
            above_nA=above_nA,
        )
