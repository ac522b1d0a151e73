"""The target model behind the decision loop: one ragged forward over all kept nodes.

Shape letters: B slots of the batch, N candidates of a request, R rows, n rows of one request,
F features side by side.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.forest import Forest
from gpu_backend.acceptance import Accepted, accept, not_numbers
from gpu_backend.ragged_model import Extension, RaggedModel
from gpu_backend.sampling import TokenRule
from gpu_backend.tree_layout import ForestIndex, lay_out


class TokenSource(Protocol):
    """Whoever knows the tokens of a step's candidates."""

    def tokens(self) -> npt.NDArray[np.int64]:
        """Token ids [B, N] of the candidates of all layers so far; any where there is none."""
        ...


@dataclass(frozen=True, slots=True)
class Root:
    """Where a request stands: its last committed token has no keys and values yet."""

    slot: int
    """Slot of the batch, which is also its key in the KV pools."""
    token: int
    seed: int


class TargetVerifier:
    """Accepts the longest path of each tree that plain sampling would have emitted.

    One step: :meth:`seek`, then the session's :meth:`verify`, then :attr:`accepted` says which
    tokens each request gets, and :meth:`commit` keeps the keys and values of those that go on.
    """

    def __init__(self, target: RaggedModel, drafter: TokenSource, rule: TokenRule) -> None:
        """Bind target and drafter.

        Args:
            target: the target over its pool.
            drafter: knows the tokens of the candidates.
            rule: how tokens are drawn.
        """
        self.target = target
        self._drafter = drafter
        self._rule = rule
        self._roots: Sequence[Root] = ()
        self.accepted: dict[int, Accepted] = {}
        """Outcome of the last step by slot."""
        self.features: dict[int, Tensor] = {}
        """Of the rows that were accepted in it, by slot; empty where the target has no taps."""
        self.num_nodes = 0
        """Candidate nodes that the last step verified, roots excluded."""

    def read(
        self, chunks: Sequence[Extension], ends: Sequence[bool]
    ) -> tuple[Sequence[Tensor], list[Tensor] | None]:
        """Read prompt tokens.

        Returns:
            Logits ``[V]`` after each chunk that is the end of its prompt, and features of every
            chunk's tokens; None where the target has no taps.
        """
        logits_EV, features = self.target.extend(chunks, scores=ends), self.target.features
        logits = () if logits_EV is None else tuple(logits_EV)
        if features is None:
            return logits, None
        return logits, list(torch.split(features, [len(chunk.tokens) for chunk in chunks]))

    def first_token(self, logits_V: Tensor, slot: int, seed: int) -> int:
        """Draw the first output token from the logits behind a whole prompt.

        Raises:
            InputError: the logits are no numbers.
        """
        position = self.target.table.length(slot)
        key = torch.tensor([seed, position], device=logits_V.device)[:, None]
        token = int(self._rule.choose(logits_V[None], key[0], key[1]))
        if logits_V[token].isnan():
            raise not_numbers(logits_V.dtype)
        return token

    def seek(self, roots: Sequence[Root]) -> None:
        """Say where the requests of the batch stand."""
        self._roots = roots
        self.accepted = {}

    def verify(self, forest: Forest, keep_BN: Tensor) -> Tensor:
        """int64 [B]: accepted draft tokens of every slot, before any stop rule."""
        keep, index = keep_BN.cpu().numpy(), ForestIndex.of(forest)
        tokens = self._drafter.tokens() if forest.layers else np.zeros(keep.shape, dtype=np.int64)
        trees = [
            lay_out(index, keep[root.slot], tokens[root.slot], root.slot, root.token)
            for root in self._roots
        ]
        self.num_nodes = sum(tree.num_rows - 1 for tree in trees)
        slots = [root.slot for root in self._roots]
        logits_RV = self.target.branch(
            [tree.branches(slot) for tree, slot in zip(trees, slots, strict=True)]
        )
        outcome = accept(
            logits_RV,
            trees,
            [root.seed for root in self._roots],
            [self.target.table.length(slot) for slot in slots],
            self._rule,
        )
        self.accepted = dict(zip(slots, outcome, strict=True))
        if self.target.features is not None:
            sizes = [tree.num_rows for tree in trees]
            kept = _kept(self.target.features, sizes, [part.rows for part in outcome])
            self.features = dict(zip(slots, kept, strict=True))
        accepted_B = torch.zeros(len(keep), dtype=torch.int64)
        for slot, part in self.accepted.items():
            accepted_B[slot] = part.num_drafts
        return accepted_B.to(keep_BN.device)

    def commit(self, slot: int) -> None:
        """Keep the keys and values of a request's root and accepted nodes."""
        self.target.table.commit(slot, self.accepted[slot].rows)


def _kept(
    features_RF: Tensor, sizes: Sequence[int], rows: Sequence[Sequence[int]]
) -> tuple[Tensor, ...]:
    """Some rows of every request's part, [n, F] each; one index, so one copy to the device."""
    starts = accumulate(sizes[:-1], initial=0)
    flat = [start + row for start, of_one in zip(starts, rows, strict=True) for row in of_one]
    kept_nF = features_RF[torch.tensor(flat, device=features_RF.device)]
    return torch.split(kept_nF, [len(of_one) for of_one in rows])
