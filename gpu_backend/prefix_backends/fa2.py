"""First pass by FlashAttention 2: keys and values are gathered, for its pages hold 256 tokens.

Shape letters: B requests, T slots that all requests see, R rows, H query heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from gpu_backend.kv_pool import KvPool
from gpu_backend.prefix_backends.layout import RaggedSequences


@dataclass(frozen=True, slots=True)
class Fa2Pass:
    """Pass of one forward by ``flash_attn_varlen_func``."""

    module: ModuleType
    """``flash_attn``."""
    sequences: RaggedSequences
    first_row_B1: Tensor
    """int32."""
    first_slot_B1: Tensor
    """int32."""
    slots_T: Tensor
    """int32."""

    @classmethod
    def of(cls, module: ModuleType, sequences: RaggedSequences) -> Fa2Pass:
        """Copy the slots to the device."""
        first_row_B1, first_slot_B1, slots_T = (
            torch.from_numpy(array).to(sequences.device)
            for array in (sequences.first_row_B1, sequences.first_slot_B1, sequences.slots_T)
        )
        return cls(module, sequences, first_row_B1, first_slot_B1, slots_T)

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`gpu_backend.prefix_backends.layout.FirstPass`."""

        def kernel(query_RHd: Tensor) -> tuple[Tensor, Tensor]:
            keys_Thd, values_Thd = pool.gather(layer, self.slots_T)
            run: Any = self.module.flash_attn_varlen_func
            # The third answer, attention's weights, exists only with dropout.
            out_RHd, lse_HR, _ = run(
                query_RHd,
                keys_Thd,
                values_Thd,
                cu_seqlens_q=self.first_row_B1,
                cu_seqlens_k=self.first_slot_B1,
                max_seqlen_q=self.sequences.most_rows,
                max_seqlen_k=self.sequences.most_slots,
                dropout_p=0.0,
                softmax_scale=1.0,  # queries are scaled
                causal=self.sequences.is_causal,
                return_attn_probs=True,
            )
            return out_RHd, lse_HR.transpose(0, -1)

        return self.sequences.attend(query_hgRd, kernel)
