"""What the first pass owes the rows of a forward, and what all of its backends share.

Shape letters: B requests, R rows of all requests, T slots that all requests see, h kv heads,
g query heads per kv head, H = h * g query heads, d head dimension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.kv_pool import KvPool

IntArray = npt.NDArray[np.int64]

Kernel = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From queries [R, H, d] to outputs [R, H, d] and natural log-sum-exp, float32 [R, H]."""


class FirstPass(Protocol):
    """Every request's rows over what the request sees; made once for all layers of a forward."""

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[h, g, R, d]`` and natural log-sum-exp, float32 ``[h, g, R]``.

        Rows that see nothing have an output of 0 and a sum of -inf.

        Args:
            pool: keys and values, the rows' own included where they are causal.
            layer: number of the attention layer.
            query_hgRd: after rope, scaled.
        """
        ...


class LayOut(Protocol):
    """Makes the first pass of a forward. One is not used again once the next is made."""

    def __call__(
        self,
        seen: list[IntArray],
        num_rows: list[int],
        device: torch.device,
        *,
        is_causal: bool,
    ) -> FirstPass:
        """Lay out what requests see.

        Args:
            seen: slots in order, request by request; there may be none.
            num_rows: of each request, at least one.
            device: the pool's.
            is_causal: the rows are the last of what is seen, and row i of n does not see the last
                n - 1 - i; else every row sees everything.
        """
        ...


@dataclass(frozen=True, slots=True)
class RaggedSequences:
    """Requests end to end, on the host, as kernels for ragged batches take them."""

    device: torch.device
    """Of the kernels."""
    is_causal: bool
    """See :class:`LayOut`."""
    first_row_B1: npt.NDArray[np.int32]
    """Where each request's rows begin, and behind them how many there are."""
    first_slot_B1: npt.NDArray[np.int32]
    """Likewise for what it sees."""
    slots_T: npt.NDArray[np.int32]
    most_rows: int
    most_slots: int
    blind_R: Tensor | None
    """bool: rows that see nothing, on the device; None if there are none."""

    @classmethod
    def of(
        cls,
        seen: Sequence[IntArray],
        num_rows: Sequence[int],
        device: torch.device,
        *,
        is_causal: bool,
    ) -> RaggedSequences:
        """Join what requests see; arguments are those of :class:`LayOut`."""
        lengths = [len(slots) for slots in seen]
        is_blind_B = np.array(lengths) == 0
        blind_R = torch.from_numpy(np.repeat(is_blind_B, num_rows)) if is_blind_B.any() else None
        return cls(
            device,
            is_causal,
            np.array([0, *accumulate(num_rows)], dtype=np.int32),
            np.array([0, *accumulate(lengths)], dtype=np.int32),
            np.concatenate(seen).astype(np.int32),
            max(num_rows),
            max(lengths),
            None if blind_R is None else blind_R.to(device),
        )

    @property
    def num_slots_B(self) -> npt.NDArray[np.int32]:
        """Slots that each request sees."""
        return np.diff(self.first_slot_B1)

    def attend(self, query_hgRd: Tensor, kernel: Kernel) -> tuple[Tensor, Tensor]:
        """Run a kernel and bring its answer into the form of :class:`FirstPass`.

        Raises:
            InputError: the log-sum-exp comes in a shape that is not documented.
        """
        heads, queries, num_rows, dim = query_hgRd.shape
        if self.most_slots == 0:
            lse = query_hgRd.new_full(query_hgRd.shape[:3], -torch.inf, dtype=torch.float32)
            return torch.zeros_like(query_hgRd), lse
        flat_RHd = query_hgRd.permute(2, 0, 1, 3).reshape(num_rows, heads * queries, dim)
        out_RHd, lse_RH = kernel(flat_RHd.contiguous())
        if lse_RH.shape != flat_RHd.shape[:2]:
            raise InputError(
                f"attention: log-sum-exps must come one per row and head, {[*flat_RHd.shape[:2]]}; "
                f"the installed library gives {[*lse_RH.shape]}. Update it, or use --attention "
                "torch."
            )
        if self.blind_R is not None:
            # Libraries differ in the sum of nothing: -inf, +inf, or whatever was in memory.
            lse_RH = lse_RH.masked_fill(self.blind_R[:, None], -torch.inf)
            out_RHd = out_RHd.masked_fill(self.blind_R[:, None, None], 0.0)
        out_Rhgd = torch.unflatten(out_RHd, 1, (heads, queries))
        lse_Rhg = torch.unflatten(lse_RH, 1, (heads, queries))
        return out_Rhgd.permute(1, 2, 0, 3), lse_Rhg.permute(1, 2, 0)


@dataclass(frozen=True, slots=True)
class RaggedLayOut:
    """Makes a library's passes, as :class:`LayOut` asks for them."""

    make: Callable[[RaggedSequences], FirstPass]
    """Brings to the device what the library's kernel reads."""

    def __call__(
        self,
        seen: list[IntArray],
        num_rows: list[int],
        device: torch.device,
        *,
        is_causal: bool,
    ) -> FirstPass:
        """See :class:`LayOut`."""
        return self.make(RaggedSequences.of(seen, num_rows, device, is_causal=is_causal))
