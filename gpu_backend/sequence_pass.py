"""The first pass of gathering attention, a GPU's: every request's rows over what the request sees.

All requests are laid out to the longest: a few products for the whole batch, because there each
launch costs. A recording takes it on a CPU too, with one request.

Shape letters: B requests, n rows of one request, R rows of all requests, S slots that a request
sees, h kv heads, g query heads per kv head, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from gpu_backend.half_products import product
from gpu_backend.kv_pool import KvPool

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Padded:
    """A few products over all requests, padded to the longest."""

    seen_BS: Tensor
    """int64 slots; 0 where padded."""
    row_Bn: Tensor
    """int64: which row stands there; 0 where padded."""
    place_R: Tensor
    """int64: where each row stands in the flattened [B, n]."""
    bias_BnS: Tensor
    """float32: 0 where the row sees the slot, else -inf; padding sees nothing."""

    @classmethod
    def of(
        cls,
        seen: list[IntArray],
        num_rows: list[int],
        device: torch.device,
        *,
        is_causal: bool,
        visible_R: IntArray | None = None,
    ) -> Padded:
        """Lay out what requests see.

        Args:
            seen: slots of every request.
            num_rows: of every request.
            device: where to lay it out.
            is_causal: the rows are the last of what is seen, and see nothing behind themselves.
            visible_R: how many slots each row sees, if neither that nor all of them.
        """
        count_B, length_B = np.array(num_rows), np.array([len(slots) for slots in seen])
        shape = (len(seen), int(count_B.max()), int(length_B.max()))
        has_row_Bn = np.arange(shape[1]) < count_B[:, None]
        place_R = np.flatnonzero(has_row_Bn)
        row_Bn = np.zeros(shape[:2], dtype=np.int64)
        row_Bn.reshape(-1)[place_R] = np.arange(len(place_R))
        seen_BS = np.zeros((shape[0], shape[2]), dtype=np.int64)
        for request, slots in enumerate(seen):
            seen_BS[request, : len(slots)] = slots
        visible_Bn = np.broadcast_to(length_B[:, None], shape[:2])
        if is_causal:
            visible_Bn = visible_Bn - count_B[:, None] + np.arange(shape[1]) + 1
        visible_Bn = np.where(has_row_Bn, visible_Bn, 0)
        if visible_R is not None:
            visible_Bn.reshape(-1)[place_R] = visible_R
        # Made on the device: the host sends a number per row instead of one per row and slot.
        slot_S = torch.arange(shape[2], device=device)
        is_hidden_BnS = slot_S >= torch.from_numpy(visible_Bn).to(device)[..., None]
        bias_BnS = torch.zeros(shape, device=device).masked_fill_(is_hidden_BnS, -torch.inf)
        seen_t, row_t, place_t = (
            torch.from_numpy(array).to(device) for array in (seen_BS, row_Bn, place_R)
        )
        return cls(seen_t, row_t, place_t, bias_BnS)

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor) -> tuple[Tensor, Tensor]:
        """Output ``[h, g, R, d]`` and log-sum-exp ``[h, g, R]``."""
        keys_BShd, values_BShd = pool.gather(layer, self.seen_BS)
        query_Bhgnd = query_hgRd.permute(2, 0, 1, 3)[self.row_Bn].permute(0, 2, 3, 1, 4)
        scores = product(query_Bhgnd, keys_BShd.permute(0, 2, 3, 1)[:, :, None]).float()
        scores += self.bias_BnS[:, None, None]
        lse_Bhgn = scores.logsumexp(-1)
        # Rows that see nothing have a sum of -inf; zero in its place leaves their weights at zero.
        safe_Bhgn = lse_Bhgn.masked_fill(lse_Bhgn == -torch.inf, 0.0)
        weights = scores.sub_(safe_Bhgn[..., None]).exp_().to(values_BShd.dtype)
        out_Bhgnd = product(weights, values_BShd.transpose(1, 2)[:, :, None])
        out_Rhgd = out_Bhgnd.permute(0, 3, 1, 2, 4).flatten(0, 1)[self.place_R]
        lse_Rhg = lse_Bhgn.permute(0, 3, 1, 2).flatten(0, 1)[self.place_R]
        return out_Rhgd.permute(1, 2, 0, 3), lse_Rhg.permute(1, 2, 0)
