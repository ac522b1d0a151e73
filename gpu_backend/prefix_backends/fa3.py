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
from gpu_backend.prefix_backends.layout import IntArray, RaggedSequences


@dataclass(frozen=True, slots=True)
class Fa3:
    """Makes passes of ``flash_attn_with_kvcache``; a slot is a page of one token."""

    module: ModuleType
    """``flash_attn_interface``."""

    def __call__(
        self,
        seen: list[IntArray],
        num_rows: list[int],
        device: torch.device,
        *,
        is_causal: bool,
    ) -> Fa3Pass:
        """Copy the table to the device; see :class:`gpu_backend.prefix_backends.layout.LayOut`."""
        sequences = RaggedSequences.of(seen, num_rows, device)
        table_BS = np.zeros((len(seen), sequences.most_slots), dtype=np.int32)
        for request, slots in enumerate(seen):
            table_BS[request, : len(slots)] = slots
        first_row_B1, length_B, table = (
            torch.from_numpy(array).to(device)
            for array in (sequences.first_row_B1, sequences.num_slots_B, table_BS)
        )
        return Fa3Pass(self.module, sequences, first_row_B1, length_B, table, is_causal)


@dataclass(frozen=True, slots=True)
class Fa3Pass:
    """Pass of one forward."""

    module: ModuleType
    sequences: RaggedSequences
    first_row_B1: Tensor
    """int32."""
    length_B: Tensor
    """int32: slots that each request sees."""
    table_BS: Tensor
    """int32: which slots; any where there is none."""
    is_causal: bool

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
                causal=self.is_causal,
                num_splits=1,  # a row's rounding must not depend on its batch
                return_softmax_lse=True,
            )
            return out_RHd, lse_HR.transpose(0, -1)

        return self.sequences.attend(query_hgRd, kernel)
