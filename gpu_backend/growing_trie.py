"""A trie of one request whose nodes are computed when they are first asked for.

Shape letters: N nodes, K nodes asked for, A ancestors, k children.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from gpu_backend.new_nodes import NewNodes
from gpu_backend.ragged_pool import NO_ANCESTOR
from gpu_backend.scoring import RowScores

IntArray = npt.NDArray[np.int64]


class GrowingTrie(ABC):
    """Nodes by number: those it starts with, which are rows of the sequence, then tree rows.

    The other nodes are added by :meth:`reach`, each by one row of one forward, in the order of
    the rows.

    Attributes:
        child_token: ``[N, k]`` int32, children in rank order.
        child_logp: ``[N, k]`` float16, their conditional log-probabilities.
        entropy: ``[N]`` float16, nats.
    """

    def __init__(
        self,
        scores: RowScores,
        visible_N: IntArray,
        max_branch: int,
        known: dict[tuple[int, int], int],
    ) -> None:
        """Start with the nodes of the sequence.

        Args:
            scores: of these nodes.
            visible_N: tokens of the sequence that each of them and all nodes below it see.
            max_branch: most tokens that a branch can have.
            known: number of a node by its parent and token, where both are of the sequence.
        """
        self.child_token = scores.child_token
        self.child_logp = scores.child_logp
        self.entropy = scores.entropy
        self._num_first = len(visible_N)
        self._visible_N = visible_N
        self._branch_NA = np.full((len(visible_N), max_branch), NO_ANCESTOR)
        self._number = known

    @property
    def num_nodes(self) -> int:
        """Nodes so far."""
        return len(self.entropy)

    def reach(self, parents_K: IntArray, tokens_K: npt.NDArray[np.integer]) -> IntArray:
        """Numbers of the nodes ``tokens_K`` under ``parents_K``, computing those that are new."""
        wanted = list(zip(parents_K.tolist(), tokens_K.tolist(), strict=True))
        new = [edge for edge in dict.fromkeys(wanted) if edge not in self._number]
        if new:
            # Rows of like prefix length share a chunk, whose cost follows the longest of them.
            new.sort(key=lambda edge: int(self._visible_N[edge[0]]))
            first = self.num_nodes
            self._add(np.array([e[0] for e in new]), np.array([e[1] for e in new]))
            self._number |= {edge: first + i for i, edge in enumerate(new)}
        return np.array([self._number[edge] for edge in wanted], dtype=np.int64)

    @abstractmethod
    def _compute(self, parents_K: IntArray, nodes: NewNodes) -> RowScores:
        """Run new nodes, whose parents have been run."""

    def _add(self, parents_K: IntArray, tokens_K: IntArray) -> None:
        above_KA, visible_K = self._branch_NA[parents_K], self._visible_N[parents_K]
        depth_K = (above_KA != NO_ANCESTOR).sum(axis=1)
        first_row = self.num_nodes - self._num_first
        nodes = NewNodes(first_row, tokens_K, visible_K, above_KA[:, : int(depth_K.max())])
        scores = self._compute(parents_K, nodes)
        number_K = np.arange(len(tokens_K))
        branch_KA = above_KA.copy()
        branch_KA[number_K, depth_K] = first_row + number_K
        self.child_token = np.concatenate([self.child_token, scores.child_token])
        self.child_logp = np.concatenate([self.child_logp, scores.child_logp])
        self.entropy = np.concatenate([self.entropy, scores.entropy])
        self._visible_N = np.concatenate([self._visible_N, visible_K])
        self._branch_NA = np.concatenate([self._branch_NA, branch_KA])
