"""Keys and values of one request: the committed prefix, and the draft tree's rows behind it."""

from __future__ import annotations

import torch
from torch import Tensor

_FIRST_TREE_ROWS = 1024


class KvStore:
    """Keys and values of every layer, after rope and not repeated for grouped queries.

    - The *prefix* is one sequence: ``[kv_heads, S, head_dim]`` per layer, capacity fixed.
    - *Tree rows* are gathered by index: ``[N, kv_heads, head_dim]`` per layer, grown by doubling.
    - A forward first reserves its rows, every layer writes them, then the forward commits them.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        prefix_capacity: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate an empty store for a prefix of at most ``prefix_capacity`` tokens."""

        def empty(*shape: int) -> Tensor:
            return torch.empty(shape, dtype=dtype, device=device)

        prefix = (num_kv_heads, prefix_capacity, head_dim)
        tree = (_FIRST_TREE_ROWS, num_kv_heads, head_dim)
        self._prefix = [(empty(*prefix), empty(*prefix)) for _ in range(num_layers)]
        self._tree = [(empty(*tree), empty(*tree)) for _ in range(num_layers)]
        self.num_prefix = 0
        self.num_tree = 0

    def prefix(self, layer: int, length: int) -> tuple[Tensor, Tensor]:
        """Keys and values of the first ``length`` prefix tokens, ``[kv_heads, length, hd]``."""
        keys, values = self._prefix[layer]
        return keys[:, :length], values[:, :length]

    def gather(self, layer: int, rows_KA: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of tree rows, ``[K, A, kv_heads, hd]``; every index must be >= 0."""
        keys, values = self._tree[layer]
        shape = (*rows_KA.shape, *keys.shape[1:])
        flat = rows_KA.reshape(-1)
        return keys.index_select(0, flat).view(shape), values.index_select(0, flat).view(shape)

    def write_prefix(self, layer: int, key_HKd: Tensor, value_HKd: Tensor) -> None:
        """Write rows right behind the committed prefix."""
        where = slice(self.num_prefix, self.num_prefix + key_HKd.shape[1])
        keys, values = self._prefix[layer]
        keys[:, where] = key_HKd
        values[:, where] = value_HKd

    def write_tree(self, layer: int, key_HKd: Tensor, value_HKd: Tensor) -> None:
        """Write rows right behind the committed tree rows; they must have been reserved."""
        where = slice(self.num_tree, self.num_tree + key_HKd.shape[1])
        keys, values = self._tree[layer]
        keys[where] = key_HKd.transpose(0, 1)
        values[where] = value_HKd.transpose(0, 1)

    def reserve_tree(self, num_rows: int) -> None:
        """Make room for ``num_rows`` more tree rows."""
        needed = self.num_tree + num_rows
        if needed <= self._tree[0][0].shape[0]:
            return
        capacity = max(needed, 2 * self._tree[0][0].shape[0])
        self._tree = [
            (_grown(keys, self.num_tree, capacity), _grown(values, self.num_tree, capacity))
            for keys, values in self._tree
        ]

    def commit_prefix(self, num_rows: int) -> None:
        """Count rows that every layer has written as part of the prefix."""
        self.num_prefix += num_rows

    def commit_tree(self, num_rows: int) -> None:
        """Count rows that every layer has written as tree rows."""
        self.num_tree += num_rows


def _grown(rows: Tensor, used: int, capacity: int) -> Tensor:
    """Copy of the first ``used`` rows in a tensor with ``capacity`` rows."""
    larger = rows.new_empty((capacity, *rows.shape[1:]))
    larger[:used] = rows[:used]
    return larger
