"""The nodes of one request, each computed by exactly one forward of the draft.

The context of a node is all the text before it, so positions share nodes: token x after output
token 7 is the same node seen from position 5 and from position 7, and every node on the target's
path is a row of the one teacher-forced forward.

Shape letters: P positions, C levels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_backend.draft_tree import DraftTree
from gpu_backend.growing_trie import GrowingTrie, IntArray
from gpu_backend.new_nodes import NewNodes
from gpu_backend.scoring import RowScores
from traces.schema import PAST_END


class NodeTrie(GrowingTrie):
    """A trie over the target's output and over everything the draft proposed beside it.

    Node ``i`` below the number of output tokens is output token i.
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
        known = output[1:] if shares_path else []
        super().__init__(
            scores,
            len(prompt) + 1 + np.arange(len(output)),
            max_branch,
            {(i, token): i + 1 for i, token in enumerate(known)},
        )
        self._tree = tree

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

    def _compute(self, parents_K: IntArray, nodes: NewNodes) -> RowScores:
        return self._tree.expand(nodes)
