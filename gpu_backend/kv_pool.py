"""Keys and values of all requests of a batch, by token slot.

Slot letters: R rows, h kv heads, d head dimension.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PretrainedConfig


class KvPool:
    """Keys and values of every layer, after rope and not repeated for grouped queries.

    ``[slots, kv_heads, head_dim]`` per layer; which slot belongs to which token of which request
    is the business of :class:`gpu_backend.kv_slots.SlotTable`.
    """

    def __init__(
        self,
        num_layers: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        num_slots: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocate room for ``num_slots`` tokens; what is in it does not matter."""
        shape = (2, num_slots, num_kv_heads, head_dim)
        # Zeros, because a slot that was never written may be multiplied by a weight of zero.
        self._layers = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    @property
    def device(self) -> torch.device:
        """Where keys and values are."""
        return self._layers[0].device

    @classmethod
    def of(
        cls, config: PretrainedConfig, num_slots: int, dtype: torch.dtype, device: torch.device
    ) -> KvPool:
        """Allocate for a decoder-only model."""
        return cls(
            config.num_hidden_layers,
            getattr(config, "num_key_value_heads", None) or config.num_attention_heads,
            head_dim(config),
            num_slots=num_slots,
            dtype=dtype,
            device=device,
        )

    @property
    def num_slots(self) -> int:
        """Tokens that it holds."""
        return int(self._layers[0].shape[1])

    @property
    def num_heads(self) -> int:
        """Heads of keys and values, h."""
        return int(self._layers[0].shape[2])

    @property
    def head_dim(self) -> int:
        """Size of a head, d."""
        return int(self._layers[0].shape[3])

    @property
    def dtype(self) -> torch.dtype:
        """Of keys and values."""
        return self._layers[0].dtype

    def write(self, layer: int, slots_R: Tensor, key_hRd: Tensor, value_hRd: Tensor) -> None:
        """Write rows to their slots."""
        keys, values = self._layers[layer]
        keys.index_copy_(0, slots_R, key_hRd.transpose(0, 1))
        values.index_copy_(0, slots_R, value_hRd.transpose(0, 1))

    def grow(self, num_slots: int) -> None:
        """Make room for ``num_slots`` tokens in all; what was written keeps its slots.

        Windows handed out before go on showing the smaller pool.
        """
        for layer, held in enumerate(self._layers):
            larger = held.new_zeros((held.shape[0], num_slots, *held.shape[2:]))
            larger[:, : held.shape[1]] = held
            self._layers[layer] = larger  # one by one: the smaller ones are freed on the way

    def gather(self, layer: int, slots: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values ``[*slots.shape, h, d]``; every slot must be >= 0."""
        keys, values = self._layers[layer]
        shape = (*slots.shape, *keys.shape[1:])
        flat = slots.reshape(-1)
        return keys.index_select(0, flat).view(shape), values.index_select(0, flat).view(shape)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[slots, 1, h, d]`` in place: every slot a page of one token."""
        keys, values = self._layers[layer]
        return keys[:, None], values[:, None]

    def window(
        self, layer: int, first: int, spacing: int, shape: tuple[int, int]
    ) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, h, W, d]`` in place: windows of W slots, evenly spaced.

        Args:
            layer: number of the attention layer.
            first: first slot of the first window.
            spacing: slots from one window's first slot to the next one's.
            shape: how many windows, B, and their slots, W; all must lie in the pool.
        """
        keys, values = self._layers[layer]
        num_slots, heads, dim = keys.shape
        assert first + (shape[0] - 1) * spacing + shape[1] <= num_slots, "beyond the pool"
        row = heads * dim
        size, stride = (shape[0], heads, shape[1], dim), (spacing * row, dim, row, 1)
        start = first * row
        return (
            keys.as_strided(size, stride, keys.storage_offset() + start),
            values.as_strided(size, stride, values.storage_offset() + start),
        )


def head_dim(config: PretrainedConfig) -> int:
    """Size of the heads of a decoder-only model."""
    given = getattr(config, "head_dim", None)
    return int(given or config.hidden_size // config.num_attention_heads)
