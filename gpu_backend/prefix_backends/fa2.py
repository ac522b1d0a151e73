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
from gpu_backend.prefix_backends.layout import IntArray, RaggedSequences


@dataclass(frozen=True, slots=True)
class Fa2:
    """Makes passes of ``flash_attn_varlen_func``."""

    module: ModuleType
    """``flash_attn``."""

    def __call__(
        self,
        seen: list[IntArray],
        num_rows: list[int],
        device: torch.device,
        *,
        is_causal: bool,
    ) -> Fa2Pass:
        """Copy the slots to the device; see :class:`gpu_backend.prefix_backends.layout.LayOut`."""
        sequences = RaggedSequences.of(seen, num_rows, device)
        first_row_B1, first_slot_B1, slots_T = (
            torch.from_numpy(array).to(device)
            for array in (sequences.first_row_B1, sequences.first_slot_B1, sequences.slots_T)
        )
        return Fa2Pass(self.module, sequences, first_row_B1, first_slot_B1, slots_T, is_causal)


@dataclass(frozen=True, slots=True)
class Fa2Pass:
    """Pass of one forward."""

    module: ModuleType
    sequences: RaggedSequences
    first_row_B1: Tensor
    """int32."""
    first_slot_B1: Tensor
    """int32."""
    slots_T: Tensor
    """int32."""
    is_causal: bool

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
                causal=self.is_causal,
                return_attn_probs=True,
            )
            return out_RHd, lse_HR.transpose(0, -1)

        return self.sequences.attend(query_hgRd, kernel)
