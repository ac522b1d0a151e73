"""The nodes of one request, each computed by exactly one forward of the draft.

The context of a node is all the text before it, so positions share nodes: token x after output
token 7 is the same node seen from position 5 and from position 7, and every node on the target's
path is a row of the one teacher-forced forward.

Shape letters: N nodes, K nodes asked for, A ancestors, k children, P positions, C levels.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from gpu_backend.draft_tree import DraftTree
from gpu_backend.scoring import RowScores
from traces.schema import PAST_END

_NO_ROW: Final = -1

IntArray = npt.NDArray[np.integer]


class NodeTrie:
    """A trie over the target's output and over everything the draft proposed beside it.

    Node ``i`` below ``num_path`` is output token i; the others were added by :meth:`reach`.

    Attributes:
        child_token: ``[N, k]`` int32, children in rank order.
        child_logp: ``[N, k]`` float16, their conditional log-probabilities.
        entropy: ``[N]`` float16, nats.
    """

    def __init__(
        self,
        tree: DraftTree,
        prompt: list[int],
        output: list[int],
        max_branch: int,
        *,
        shares_path: bool = True,
    ) -> None:
        """Run the teacher-forced forward over prompt and output.

        Args:
            tree: an empty draft tree; the trie owns it from here on.
            prompt: token ids, at least one.
            output: token ids of the target, look-ahead included.
            max_branch: most tokens that a branch off the path can have.
            shares_path: nodes on the path are rows of the teacher-forced forward; else they are
                computed again, as a drafter that does not know the text would.
        """
        scores, self._path_rank, self._path_logp = tree.prefill(prompt + output, len(prompt))
        num_path = len(output)
        self._tree = tree
        self.child_token = scores.child_token
        self.child_logp = scores.child_logp
        self.entropy = scores.entropy
        self._prefix_len = len(prompt) + 1 + np.arange(num_path)
        self._branch_NA = np.full((num_path, max_branch), _NO_ROW)
        known = output[1:] if shares_path else []
        self._number = {(i, token): i + 1 for i, token in enumerate(known)}

    @property
    def num_nodes(self) -> int:
        """Nodes so far, path included."""
        return len(self.entropy)

    def path(
        self, num_positions: int, levels: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Rank and log-probability ``[P, C]`` of the target's token at every position and level.

        PAST_END and -inf where the output has ended.
        """
        if num_positions == 0:
            return np.zeros((0, levels), np.int32), np.zeros((0, levels), np.float16)
        edge_PC = np.arange(num_positions)[:, None] + np.arange(levels)
        past_PC = edge_PC >= len(self._path_rank)
        edge_PC = np.where(past_PC, 0, edge_PC)
        rank = np.where(past_PC, np.int32(PAST_END), self._path_rank[edge_PC])
        logp = np.where(past_PC, np.float16(-np.inf), self._path_logp[edge_PC])
        return rank.astype(np.int32), logp.astype(np.float16)

    def reach(self, parents_K: IntArray, tokens_K: IntArray) -> npt.NDArray[np.int64]:
        """Numbers of the nodes ``tokens_K`` under ``parents_K``, computing those that are new."""
        wanted = list(zip(parents_K.tolist(), tokens_K.tolist(), strict=True))
        new = [edge for edge in dict.fromkeys(wanted) if edge not in self._number]
        if new:
            # Rows of like prefix length share a chunk, whose cost follows the longest of them.
            new.sort(key=lambda edge: int(self._prefix_len[edge[0]]))
            self._compute(np.array([e[0] for e in new]), np.array([e[1] for e in new]))
            self._number.update({edge: self.num_nodes - len(new) + i for i, edge in enumerate(new)})
        return np.array([self._number[edge] for edge in wanted], dtype=np.int64)

    def _compute(self, parents: IntArray, tokens: IntArray) -> None:
        prefix_len = self._prefix_len[parents]
        above_KA = self._branch_NA[parents]
        depth_K = (above_KA != _NO_ROW).sum(axis=1)
        first_row = self._tree.num_rows
        scores = self._tree.expand(tokens, prefix_len, above_KA[:, : int(depth_K.max())])
        branch_KA = above_KA.copy()
        branch_KA[np.arange(len(tokens)), depth_K] = first_row + np.arange(len(tokens))
        self._append(scores, prefix_len, branch_KA)

    def _append(self, scores: RowScores, prefix_len: IntArray, branch_KA: IntArray) -> None:
        def longer(old: Any, new: Any) -> Any:
            return np.concatenate([old, new])

        self.child_token = longer(self.child_token, scores.child_token)
        self.child_logp = longer(self.child_logp, scores.child_logp)
        self.entropy = longer(self.entropy, scores.entropy)
        self._prefix_len = longer(self._prefix_len, prefix_len)
        self._branch_NA = longer(self._branch_NA, branch_KA)
