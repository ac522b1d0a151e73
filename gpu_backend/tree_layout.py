"""From a step's plan to the rows of the verify forward: every root and every kept node.

Shape letters: B requests, N candidates of a request, n rows of one request, A ancestors.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from echo_policies.forest import Forest
from gpu_backend.ragged_model import NO_ANCESTOR, Branches

IntArray = npt.NDArray[np.int64]

NO_PARENT = -1


@dataclass(frozen=True, slots=True)
class ForestIndex:
    """Where the candidates of a forest hang, on the host."""

    parent_BN: IntArray
    """Flat index of the parent; NO_PARENT for children of the root."""
    depth_N: IntArray

    @classmethod
    def of(cls, forest: Forest) -> ForestIndex:
        """Number the candidates of all layers depth-major, as forests do."""
        parents, depths, start = [], [], 0
        for layer in forest.layers:
            shape = (forest.num_requests, layer.width)
            if layer.parent_BW is None:
                parents.append(np.full(shape, NO_PARENT, dtype=np.int64))
            else:
                parents.append(
                    layer.parent_BW.cpu().numpy() + (start - forest.widths[len(parents) - 1])
                )
            depths.append(np.full(layer.width, layer.depth, dtype=np.int64))
            start += layer.width
        if not parents:
            none = np.zeros(0, dtype=np.int64)
            return cls(np.zeros((forest.num_requests, 0), dtype=np.int64), none)
        return cls(np.concatenate(parents, axis=1), np.concatenate(depths))


@dataclass(frozen=True, slots=True)
class TreeRows:
    """The rows of one request: row 0 is its root, then its kept nodes, depth by depth."""

    tokens_n: IntArray
    parent_n: IntArray
    """Row of the parent; NO_PARENT for the root."""
    depth_n: IntArray

    @property
    def num_rows(self) -> int:
        """Rows, the root's included."""
        return len(self.tokens_n)

    def branches(self, key: int) -> Branches:
        """The rows as a model takes them."""
        return Branches(
            key=key,
            tokens_n=self.tokens_n,
            depth_n=self.depth_n,
            place_n=np.arange(self.num_rows),
            above_nA=ancestors(self.parent_n, self.depth_n),
        )


def lay_out(
    index: ForestIndex, keep_N: npt.NDArray[np.bool_], tokens_N: IntArray, request: int, root: int
) -> TreeRows:
    """Rows of one request's kept nodes, which must be closed under ancestors.

    Args:
        index: of the whole forest.
        keep_N: the request's kept candidates.
        tokens_N: their token ids.
        request: which of the forest's requests this is.
        root: token id of the last committed token.
    """
    nodes = np.flatnonzero(keep_N)
    # The spare entry at the end stands for the root, so that NO_PARENT finds it.
    row_of = np.zeros(len(keep_N) + 1, dtype=np.int64)
    row_of[nodes] = 1 + np.arange(len(nodes))
    return TreeRows(
        tokens_n=np.concatenate([[root], tokens_N[nodes]]),
        parent_n=np.concatenate([[NO_PARENT], row_of[index.parent_BN[request, nodes]]]),
        depth_n=np.concatenate([[0], index.depth_N[nodes]]),
    )


def ancestors(parent_n: IntArray, depth_n: IntArray) -> IntArray:
    """Rows on the way from each row to the root, both included: int64 [n, A], column by depth."""
    above_nA = np.full((len(parent_n), int(depth_n.max()) + 1), NO_ANCESTOR, dtype=np.int64)
    for depth in range(above_nA.shape[1]):
        rows = np.flatnonzero(depth_n == depth)
        if depth:
            above_nA[rows, :depth] = above_nA[parent_n[rows], :depth]
        above_nA[rows, depth] = rows
    return above_nA
