"""First pass by flashinfer: keys and values are read in place, through a list of slots.

Shape letters: B requests, R rows, H query heads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor

from gpu_backend.kv_pool import KvPool
from gpu_backend.prefix_backends.layout import RaggedSequences

WORKSPACE_BYTES: Final = 128 * 2**20
"""What flashinfer recommends."""


class Flashinfer:
    """Makes passes of ``BatchPrefillWithPagedKVCacheWrapper``; a slot is a page of one token.

    No mask is given, which would rule out its kernels for Hopper. There is one wrapper, and the
    plan of a forward lives in it, so a pass ends when the next is made.
    """

    def __init__(self, module: ModuleType, pool: KvPool, query_heads: int) -> None:
        """Allocate the workspace.

        Args:
            module: ``flashinfer``.
            pool: keys and values.
            query_heads: of the model.
        """
        workspace = torch.zeros(WORKSPACE_BYTES, dtype=torch.uint8, device=pool.device)
        self.wrapper: Any = module.BatchPrefillWithPagedKVCacheWrapper(workspace, "NHD")
        self.newest: FlashinferPass | None = None
        self._heads = (query_heads, pool.num_heads, pool.head_dim)
        self._dtype = pool.dtype

    def plan(self, sequences: RaggedSequences) -> FlashinferPass:
        """Plan a forward."""
        if sequences.most_slots:
            # The plan is made on the host: what it reads there stays there.
            self.wrapper.plan(
                torch.from_numpy(sequences.first_row_B1),
                torch.from_numpy(sequences.first_slot_B1),
                torch.from_numpy(sequences.slots_T).to(sequences.device),
                # Tokens of the last page: lengths are (pages - 1) * 1 + this, but at least this.
                torch.from_numpy(np.minimum(sequences.num_slots_B, 1)),
                *self._heads,
                1,
                causal=sequences.is_causal,
                sm_scale=1.0,  # queries are scaled
                q_data_type=self._dtype,
                kv_data_type=self._dtype,
                disable_split_kv=True,  # a row's rounding must not depend on its batch
            )
        self.newest = FlashinferPass(self, sequences)
        return self.newest


@dataclass(frozen=True, slots=True, eq=False)
class FlashinferPass:
    """Pass of one forward."""

    maker: Flashinfer
    sequences: RaggedSequences

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor) -> tuple[Tensor, Tensor]:
        """See :class:`gpu_backend.prefix_backends.layout.FirstPass`."""
        assert self.maker.newest is self, "another forward was planned"
        pages = pool.pages(layer)

        def kernel(query_RHd: Tensor) -> tuple[Tensor, Tensor]:
            out_RHd, lse_RH = self.maker.wrapper.run(query_RHd, pages, return_lse=True)
            return out_RHd, lse_RH * math.log(2)  # flashinfer's logarithms are to base 2

        return self.sequences.attend(query_hgRd, kernel)
