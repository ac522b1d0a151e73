"""The nodes of one request under a head, each computed by exactly one forward.

A head feeds on its own guesses below a root, so what it says after a text depends on where it was
last told the truth: unlike a draft model's, its nodes belong to one position. That goes for the
target's path too: from a position on it is fed with the head's own states, through the true tokens.

Shape letters: T tokens, F features side by side, K new nodes, P positions, C levels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.eagle3.head_tree import HeadTree
from gpu_backend.growing_trie import GrowingTrie, IntArray
from gpu_backend.new_nodes import NewNodes
from gpu_backend.scoring import RowScores
from traces.schema import PAST_END


class HeadTrie(GrowingTrie):
    """Roots after every output token, and everything proposed below them.

    Node ``i`` below the number of output tokens is the root after output token i. Children are
    given by the target's ids.
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
        super().__init__(found.scores, len(prompt) + np.arange(len(output)), max_branch, {})
        self._tree = tree
        self._num_prompt = len(prompt)
        self._output = np.array(output)
        self._next_rank, self._next_logp, self._fed = found.rank_K, found.logp_K, found.fed_Kh

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

    def _compute(self, parents_K: IntArray, nodes: NewNodes) -> RowScores:
        # What the text has after a node on its path.
        ahead_K = nodes.visible_K - self._num_prompt + nodes.depth_K + 2
        following_K = self._output[np.minimum(ahead_K, len(self._output) - 1)]
        fed_Kh = self._fed[torch.from_numpy(parents_K).to(self._fed.device)]
        found = self._tree.expand(nodes, fed_Kh, following_K)
        self._next_rank = np.concatenate([self._next_rank, found.rank_K])
        self._next_logp = np.concatenate([self._next_logp, found.logp_K])
        self._fed = torch.cat([self._fed, found.fed_Kh])
        return found.scores
