"""First pass by FlashAttention 3: keys and values are read in place, through a table of slots.

Shape letters: B requests, S slots of the longest, R rows, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_backend.kv_pool import KvPool
from gpu_backend.prefix_backends.layout import RaggedSequences


@dataclass(frozen=True, slots=True)
class Fa3Pass:
    """Pass of one forward by ``flash_attn_with_kvcache``; a slot is a page of one token."""

    module: ModuleType
    """``flash_attn_interface``."""
    sequences: RaggedSequences
    first_row_B1: Tensor
    """int32."""
    length_B: Tensor
    """int32: slots that each request sees."""
    table_BS: Tensor
    """int32: which slots; any where there is none."""

    @classmethod
    def of(cls, module: ModuleType, sequences: RaggedSequences) -> Fa3Pass:
        """Copy the table to the device."""
        num_slots_B = sequences.num_slots_B
        is_slot_BS = np.arange(sequences.most_slots) < num_slots_B[:, None]
        table_BS = np.zeros(is_slot_BS.shape, dtype=np.int32)
        table_BS[is_slot_BS] = sequences.slots_T
        first_row_B1, length_B, table = (
            torch.from_numpy(array).to(sequences.device)
            for array in (sequences.first_row_B1, num_slots_B, table_BS)
        )
        return cls(module, sequences, first_row_B1, length_B, table)

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`gpu_backend.prefix_backends.layout.FirstPass`."""
        keys, values = pool.pages(layer)

        def kernel(query_RHd: Tensor) -> tuple[Tensor, Tensor]:
            run: Any = self.module.flash_attn_with_kvcache
            out_RHd, lse_HR, *_ = run(
                query_RHd,
                keys,
                values,
                cache_seqlens=self.length_B,
                page_table=self.table_BS,
                cu_seqlens_q=self.first_row_B1,
                max_seqlen_q=self.sequences.most_rows,
                softmax_scale=1.0,  # queries are scaled
                causal=self.sequences.is_causal,
                num_splits=1,  # a row's rounding must not depend on its batch
                return_softmax_lse=True,
            )
            return out_RHd, lse_HR.transpose(0, -1)

        return self.sequences.attend(query_hgRd, kernel)
