"""Nodes of one request that are to be computed: tree rows that branch off at many positions.

Shape letters: K nodes, A ancestors.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_backend.ragged_pool import NO_ANCESTOR, Branches

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class NewNodes:
    """Tree rows behind those that the request has; rows of like ``visible_K`` are cheapest."""

    first_row: int
    """Tree rows so far; node i becomes row ``first_row + i``."""
    tokens_K: IntArray
    visible_K: IntArray
    """Tokens of the sequence that a node sees."""
    above_KA: IntArray
    """Tree rows above it, in any order and padded with NO_ANCESTOR."""

    @property
    def depth_K(self) -> IntArray:
        """Tree rows above each node."""
        depth_K: IntArray = (self.above_KA != NO_ANCESTOR).sum(axis=1)
        return depth_K

    @property
    def end_row(self) -> int:
        """Tree rows with these."""
        return self.first_row + len(self.tokens_K)

    def chunks(self, key: int, row_chunk: int) -> Iterator[tuple[slice, Branches]]:
        """Cut them into forwards of at most ``row_chunk`` rows: which ones, as a model takes them.

        Args:
            key: of the request.
            row_chunk: rows.
        """
        own_K, depth_K = np.arange(self.first_row, self.end_row), self.depth_K
        branch_KA = np.concatenate([own_K[:, None], self.above_KA], axis=1)
        for start in range(0, len(own_K), row_chunk):
            rows = slice(start, start + row_chunk)
            yield (
                rows,
                Branches(
                    key=key,
                    tokens_n=self.tokens_K[rows],
                    depth_n=depth_K[rows],
                    place_n=own_K[rows],
                    above_nA=branch_KA[rows],
                    visible_n=self.visible_K[rows],
                ),
            )
