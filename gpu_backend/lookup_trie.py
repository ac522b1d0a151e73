"""The nodes of one request that prompt lookup can propose, for the recorder.

A lookup knows only the text up to its position, so positions share no nodes.

Shape letters: N nodes, K nodes asked for, k children, P positions, C levels.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from gpu_backend.prompt_lookup import ContextIndex, Followers
from gpu_backend.scoring import NO_TOKEN
from traces.schema import OUTSIDE_VOCAB, PAST_END

IntArray = npt.NDArray[np.integer]


class LookupTrie:
    """Nodes by number; node ``i`` below ``num_path`` is output token i as a root.

    Attributes:
        child_token: ``[N, k]`` int32, children in rank order, NO_TOKEN where there are fewer.
        child_logp: ``[N, k]`` float16, their conditional log-probabilities, -inf where none.
        entropy: ``[N]`` float16, nats.
    """

    def __init__(
        self, prompt: list[int], output: list[int], *, width: int, vocab_size: int
    ) -> None:
        """Index prompt and output and look up every root.

        Args:
            prompt: token ids, at least one.
            output: token ids of the target, look-ahead included.
            width: children kept per node.
            vocab_size: real tokens.
        """
        self._index = ContextIndex()
        self._index.extend(prompt + output)
        self._output = output
        self._prompt_len = len(prompt)
        self._width = width
        self._vocab_size = vocab_size
        self._number: dict[tuple[int, int], int] = {}
        self._branch: list[tuple[int, tuple[int, ...]]] = []
        self.child_token = np.zeros((0, width), np.int32)
        self.child_logp = np.zeros((0, width), np.float16)
        self.entropy = np.zeros(0, np.float16)
        self._append([(root, ()) for root in range(len(output))])

    def reach(self, parents_K: IntArray, tokens_K: IntArray) -> npt.NDArray[np.int64]:
        """Numbers of the nodes ``tokens_K`` under ``parents_K``, looking up those that are new."""
        wanted = list(zip(parents_K.tolist(), tokens_K.tolist(), strict=True))
        new = [edge for edge in dict.fromkeys(wanted) if edge not in self._number]
        first = len(self._branch)
        branches = [self._branch[parent] for parent, _ in new]
        self._append(
            [
                (root, (*drafted, token))
                for (root, drafted), (_, token) in zip(branches, new, strict=True)
            ]
        )
        self._number.update({edge: first + i for i, edge in enumerate(new)})
        return np.array([self._number[edge] for edge in wanted], dtype=np.int64)

    def path(
        self, num_positions: int, levels: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Rank and log-probability ``[P, C]`` of the target's token at every position and level.

        OUTSIDE_VOCAB and -inf where the lookup does not propose it at all, PAST_END and -inf where
        the output has ended.
        """
        rank = np.full((num_positions, levels), PAST_END, np.int32)
        logp = np.full((num_positions, levels), -np.inf, np.float16)
        for p in range(num_positions):
            for level, token in enumerate(self._output[p + 1 : p + 1 + levels]):
                found = self._look_up(p, tuple(self._output[p + 1 : p + 1 + level]))
                rank[p, level] = OUTSIDE_VOCAB
                if token in found.tokens:
                    rank[p, level] = found.tokens.index(token)
                    logp[p, level] = found.log_probs[rank[p, level]]
        return rank, logp

    def _look_up(self, root: int, drafted: tuple[int, ...]) -> Followers:
        return self._index.followers(drafted, self._prompt_len + root + 1)

    def _append(self, branches: list[tuple[int, tuple[int, ...]]]) -> None:
        if not branches:
            return
        tokens = np.full((len(branches), self._width), NO_TOKEN, np.int32)
        logp = np.full((len(branches), self._width), -np.inf, np.float16)
        entropy = np.zeros(len(branches), np.float16)
        for i, (root, drafted) in enumerate(branches):
            found = self._look_up(root, drafted)
            count = min(self._width, len(found.tokens))
            tokens[i, :count] = found.tokens[:count]
            logp[i, :count] = found.log_probs[:count]
            entropy[i] = found.entropy(self._vocab_size)
        self._branch += branches
        self.child_token = np.concatenate([self.child_token, tokens])
        self.child_logp = np.concatenate([self.child_logp, logp])
        self.entropy = np.concatenate([self.entropy, entropy])
