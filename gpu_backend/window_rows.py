"""Attention of many requests' rows on a CPU: keys and values are read where they lie.

A request's slots are neighbours, so its sequence, its tree rows and the few spare slots between
them are one window of the pool. A mask per request says which row sees which slot of the window:
sequence and branch take one pass, and nothing is gathered. Requests whose windows are evenly
spaced share one product, padded to the longest window and the most rows where that costs less than
a product of their own. Query heads of one kv head are taken as rows of it, so that keys are read
once for all of them.

Shape letters: R rows of all requests, n rows of one request, B windows of a group, W slots of a
window, P padded rows of a group (B * n), h kv heads, g query heads per kv head, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.half_products import needs_widening
from gpu_backend.kv_pool import KvPool
from gpu_backend.sight import Sight
from gpu_backend.windows import View, Window, grouped


@dataclass(frozen=True, slots=True)
class WindowRows:
    """Rows grouped by request; what each request's rows see is a window of the pool."""

    pool: KvPool
    write_R: Tensor
    """int64: slot of every row."""
    groups: tuple[WindowGroup, ...]
    """In the order of the rows."""

    @classmethod
    def of(
        cls, pool: KvPool, write_R: Tensor, sights: Sequence[Sight], query_heads: int
    ) -> WindowRows:
        """Lay out what requests see, request after request.

        Args:
            pool: keys and values.
            write_R: slot of every row.
            sights: of every request.
            query_heads: per kv head, g.
        """
        groups, row = [], 0
        for view in grouped([Window.of(sight) for sight in sights], pool.num_slots):
            groups.append(WindowGroup.of(view, row, query_heads))
            row = groups[-1].rows.stop
        return cls(pool, write_R, tuple(groups))

    def attend(self, layer: int, query_hgKd: Tensor, key_hKd: Tensor, value_hKd: Tensor) -> Tensor:
        """Write the rows to their slots and attend; output ``[h, g, R, d]``."""
        self.pool.write(layer, self.write_R, key_hKd, value_hKd)
        heads, queries, rows, dim = query_hgKd.shape
        out_Rhgd = query_hgKd.new_empty((rows, heads, queries, dim))
        for group in self.groups:
            group.attend(self.pool, layer, query_hgKd, out_Rhgd)
        return out_Rhgd.permute(1, 2, 0, 3)


@dataclass(frozen=True, slots=True)
class WindowGroup:
    """Requests that share one product."""

    rows: slice
    """Theirs among all rows."""
    shape: tuple[int, int]
    """Windows B, and slots W of each."""
    first: int
    """First slot of the first window."""
    spacing: int
    """Slots from one window to the next."""
    gathered_S: Tensor | None
    """int64: slots of a request whose slots are not neighbours; else None."""
    bias_BnW: Tensor | None
    """float32 ``[B, 1, n * g, W]``, or 1 in place of n * g: 0 where the row sees the slot, else
    -inf; None if every row sees everything."""
    padding: Padding | None
    """None where every window has equally many rows."""

    @classmethod
    def of(cls, view: View, first_row: int, query_heads: int) -> WindowGroup:
        """Lay out requests that share a view."""
        windows, extent = view.windows, view.extent
        num_rows, shape = extent.num_rows, (extent.num_windows, extent.size)
        counts = [window.num_rows for window in windows]
        is_even = len(windows) == shape[0] and min(counts) == num_rows
        bias = None
        if not (is_even and all(window.shows_everything(shape[1]) for window in windows)):
            # Padding sees everything: a softmax over nothing would not be a number.
            hidden_BnW = np.zeros((shape[0], num_rows, shape[1]), dtype=bool)
            for place, window in zip(view.places, windows, strict=True):
                hidden_BnW[place, : window.num_rows] = ~window.sees(shape[1])
            hidden = torch.from_numpy(hidden_BnW)
            bias_BnW = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)
            repeats = 1 if num_rows == 1 else query_heads
            bias = bias_BnW.repeat_interleave(repeats, 1)[:, None]
        gathered = windows[0].gathered
        return cls(
            slice(first_row, first_row + sum(counts)),
            shape,
            extent.first,
            extent.spacing,
            None if gathered is None else torch.from_numpy(gathered),
            bias,
            None if is_even else Padding.of(view.places, counts, (shape[0], num_rows)),
        )

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor, out_Rhgd: Tensor) -> None:
        """Attend, and write the outputs of the group's rows."""
        query_hgPd = query_hgRd[:, :, self.rows]
        if self.padding is not None:
            query_hgPd = query_hgPd.index_select(2, self.padding.row_P)
        query_hgBnd = torch.unflatten(query_hgPd, 2, (self.shape[0], -1))
        query_Bhngd = query_hgBnd.permute(2, 0, 3, 1, 4)
        keys, values = self._window(pool, layer)
        given = (query_Bhngd.flatten(2, 3), keys, values)
        if needs_widening(keys.dtype, keys.device):
            given = (given[0].float(), keys.float(), values.float())
        bias = None if self.bias_BnW is None else self.bias_BnW.to(given[0].dtype)
        out = scaled_dot_product_attention(*given, attn_mask=bias, scale=1.0)
        out_Bnhgd = torch.unflatten(out, 2, query_Bhngd.shape[2:4]).permute(0, 2, 1, 3, 4)
        if self.padding is None:
            out_Rhgd[self.rows].view(out_Bnhgd.shape).copy_(out_Bnhgd)
        else:
            out_Rhgd[self.rows] = out_Bnhgd.flatten(0, 1)[self.padding.place_R].to(out_Rhgd.dtype)

    def _window(self, pool: KvPool, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, h, W, d]``."""
        if self.gathered_S is None:
            return pool.window(layer, self.first, self.spacing, self.shape)
        keys_Shd, values_Shd = pool.gather(layer, self.gathered_S)
        return keys_Shd.transpose(0, 1)[None], values_Shd.transpose(0, 1)[None]


@dataclass(frozen=True, slots=True)
class Padding:
    """Where the rows of a group stand among equally many places per window."""

    row_P: Tensor
    """int64: which row stands at a place; 0 where none does."""
    place_R: Tensor
    """int64: the place of every row."""

    @classmethod
    def of(cls, windows: Sequence[int], counts: Sequence[int], shape: tuple[int, int]) -> Padding:
        """Lay out rows.

        Args:
            windows: which window each request's is.
            counts: rows of each request.
            shape: windows B, and places n of each.
        """
        place_R = np.concatenate(
            [window * shape[1] + np.arange(n) for window, n in zip(windows, counts, strict=True)]
        )
        row_P = np.zeros(shape[0] * shape[1], dtype=np.int64)
        row_P[place_R] = np.arange(len(place_R))
        return cls(torch.from_numpy(row_P), torch.from_numpy(place_R))
