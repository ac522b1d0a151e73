"""The nodes of one request under a head, each computed by exactly one forward.

A head feeds on its own guesses below a root, so what it says after a text depends on where it was
last told the truth: unlike a draft model's, its nodes belong to one position. That goes for the
target's path too: from a position on it is fed with the head's own states, through the true tokens.

Shape letters: N nodes, K nodes asked for, A ancestors, k children, P positions, C levels.
"""

from __future__ import annotations

from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.eagle3.head_tree import HeadScores, HeadTree
from traces.schema import PAST_END

_NO_ROW: Final = -1

IntArray = npt.NDArray[np.integer]


class HeadTrie:
    """Roots after every output token, and everything proposed below them.

    Node ``i`` below the number of output tokens is the root after output token i; the others were
    added by :meth:`reach`.

    Attributes:
        child_token: ``[N, k]`` int32, children in rank order, by the target's ids.
        child_logp: ``[N, k]`` float16, their conditional log-probabilities.
        entropy: ``[N]`` float16, nats.
    """

    def __init__(
        self,
        tree: HeadTree,
        prompt: list[int],
        output: list[int],
        features_TF: Tensor,
        max_branch: int,
    ) -> None:
        """Run the forward over all pairs of prompt and output.

        Args:
            tree: an empty tree; the trie owns it from here on.
            prompt: token ids, at least one.
            output: token ids of the target, look-ahead included.
            features_TF: the target's at every token of prompt and output.
            max_branch: most tokens that a branch can have.
        """
        text = np.array([*prompt, *output])
        # Behind the end any token will do: its score is never asked for.
        following = np.concatenate([text[2:], [0]])
        found = tree.prefill(text[1:], features_TF[:-1], following, len(prompt) - 1)
        self._tree = tree
        self._output = np.array(output)
        num_roots = len(output)
        self.child_token = found.scores.child_token
        self.child_logp = found.scores.child_logp
        self.entropy = found.scores.entropy
        self._next_rank, self._next_logp, self._fed = found.rank_K, found.logp_K, found.fed_Kh
        self._position = np.arange(num_roots)
        self._depth = np.zeros(num_roots, dtype=np.int64)
        self._num_prompt = len(prompt)
        self._branch_NA = np.full((num_roots, max_branch), _NO_ROW)
        self._number: dict[tuple[int, int], int] = {}

    @property
    def num_nodes(self) -> int:
        """Nodes so far, roots included."""
        return len(self.entropy)

    def path(
        self, num_positions: int, levels: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Rank and log-probability ``[P, C]`` of the target's token at every position and level.

        PAST_END and -inf where the output has ended.
        """
        rank = np.full((num_positions, levels), PAST_END, np.int32)
        logp = np.full((num_positions, levels), -np.inf, np.float16)
        node_P = np.arange(num_positions)
        for level in range(levels):
            at = np.arange(len(node_P))  # positions end from the last one on
            at = at[at + 1 + level < len(self._output)]
            node_P = node_P[at]
            rank[at, level], logp[at, level] = self._next_rank[node_P], self._next_logp[node_P]
            if level + 1 < levels:
                at = at[at + 2 + level < len(self._output)]
                node_P = self.reach(node_P[at], self._output[at + 1 + level])
        return rank, logp

    def reach(self, parents_K: IntArray, tokens_K: IntArray) -> npt.NDArray[np.int64]:
        """Numbers of the nodes ``tokens_K`` under ``parents_K``, computing those that are new."""
        wanted = list(zip(parents_K.tolist(), tokens_K.tolist(), strict=True))
        new = [edge for edge in dict.fromkeys(wanted) if edge not in self._number]
        if new:
            # Rows of like prefix length share a chunk, whose cost follows the longest of them.
            new.sort(key=lambda edge: int(self._position[edge[0]]))
            first = self.num_nodes
            self._compute(np.array([e[0] for e in new]), np.array([e[1] for e in new]))
            self._number.update({edge: first + i for i, edge in enumerate(new)})
        return np.array([self._number[edge] for edge in wanted], dtype=np.int64)

    def _compute(self, parents: IntArray, tokens: IntArray) -> None:
        position_K, above_KA = self._position[parents], self._branch_NA[parents]
        depth_K = self._depth[parents]
        ahead_K = position_K + depth_K + 2  # what the text has after a node on its path
        following = self._output[np.minimum(ahead_K, len(self._output) - 1)]
        first_row = self._tree.num_rows
        found = self._tree.expand(
            tokens,
            self._fed[torch.from_numpy(parents).to(self._fed.device)],
            self._num_prompt + position_K,
            above_KA[:, : int(depth_K.max())],
            following,
        )
        branch_KA = above_KA.copy()
        branch_KA[np.arange(len(tokens)), depth_K] = first_row + np.arange(len(tokens))
        self._append(found, position_K, depth_K + 1, branch_KA)

    def _append(
        self, found: HeadScores, position_K: IntArray, depth_K: IntArray, branch_KA: IntArray
    ) -> None:
        def longer(old: Any, new: Any) -> Any:
            return np.concatenate([old, new])

        self.child_token = longer(self.child_token, found.scores.child_token)
        self.child_logp = longer(self.child_logp, found.scores.child_logp)
        self.entropy = longer(self.entropy, found.scores.entropy)
        self._next_rank = longer(self._next_rank, found.rank_K)
        self._next_logp = longer(self._next_logp, found.logp_K)
        self._fed = torch.cat([self._fed, found.fed_Kh])
        self._position = longer(self._position, position_K)
        self._depth = longer(self._depth, depth_K)
        self._branch_NA = longer(self._branch_NA, branch_KA)
