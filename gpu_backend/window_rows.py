"""Attention of many requests' rows on a CPU: keys and values are read where they lie.

A request's slots are neighbours, so its sequence, its tree rows and the few spare slots between
them are one window of the pool. A mask per request says which row sees which slot of the window:
sequence and branch take one pass, and nothing is gathered. Requests with equally many rows whose
windows are evenly spaced share one product. Query heads of one kv head are taken as rows of it, so
that keys are read once for all of them.

Shape letters: R rows of all requests, n rows of one request, B requests of a group, W slots of a
window, h kv heads, g query heads per kv head, d head dimension.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gpu_backend.half_products import needs_widening
from gpu_backend.kv_pool import KvPool
from gpu_backend.sight import Sight
from gpu_backend.windows import Window, grouped


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
        for windows in grouped([Window.of(sight) for sight in sights], pool.num_slots):
            groups.append(WindowGroup.of(windows, row, query_heads))
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
    """Requests B, and slots W of their windows."""
    first: int
    """First slot of the first window."""
    spacing: int
    """Slots from one window to the next."""
    gathered_S: Tensor | None
    """int64: slots of a request whose slots are not neighbours; else None."""
    bias_BnW: Tensor | None
    """float32 ``[B, 1, n * g, W]``, or 1 in place of n * g: 0 where the row sees the slot, else
    -inf; None if every row sees everything."""

    @classmethod
    def of(cls, windows: Sequence[Window], first_row: int, query_heads: int) -> WindowGroup:
        """Lay out requests with equally many rows."""
        num_rows, head = windows[0].num_rows, windows[0]
        spacing = windows[1].first - head.first if len(windows) > 1 else 0
        size = max(window.size for window in windows)
        bias = None
        if not all(window.shows_everything(size) for window in windows):
            sees_BnW = torch.stack([torch.from_numpy(window.sees(size)) for window in windows])
            bias_BnW = torch.zeros(sees_BnW.shape).masked_fill_(~sees_BnW, -torch.inf)
            repeats = 1 if num_rows == 1 else query_heads
            bias = bias_BnW.repeat_interleave(repeats, 1)[:, None]
        return cls(
            slice(first_row, first_row + num_rows * len(windows)),
            (len(windows), size),
            head.first,
            spacing,
            None if head.gathered is None else torch.from_numpy(head.gathered),
            bias,
        )

    def attend(self, pool: KvPool, layer: int, query_hgRd: Tensor, out_Rhgd: Tensor) -> None:
        """Attend, and write the outputs of the group's rows."""
        query_hgBnd = torch.unflatten(query_hgRd[:, :, self.rows], 2, (self.shape[0], -1))
        query_Bhngd = query_hgBnd.permute(2, 0, 3, 1, 4)
        keys, values = self._window(pool, layer)
        given = (query_Bhngd.flatten(2, 3), keys, values)
        if needs_widening(keys.dtype, keys.device):
            given = (given[0].float(), keys.float(), values.float())
        bias = None if self.bias_BnW is None else self.bias_BnW.to(given[0].dtype)
        out = scaled_dot_product_attention(*given, attn_mask=bias, scale=1.0)
        out_Bhngd = torch.unflatten(out, 2, query_Bhngd.shape[2:4])
        shape = (*query_hgBnd.shape[2:4], *query_hgBnd.shape[:2], -1)
        out_Rhgd[self.rows].view(shape).copy_(out_Bhngd.permute(0, 2, 1, 3, 4))

    def _window(self, pool: KvPool, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values ``[B, h, W, d]``."""
        if self.gathered_S is None:
            return pool.window(layer, self.first, self.spacing, self.shape)
        keys_Shd, values_Shd = pool.gather(layer, self.gathered_S)
        return keys_Shd.transpose(0, 1)[None], values_Shd.transpose(0, 1)[None]
