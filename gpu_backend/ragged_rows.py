"""Attention of many requests' rows in one forward: each row meets its own request only.

Shape letters: R rows of all requests, n rows of one request, S slots that requests see,
A ancestors, h kv heads, g query heads per kv head, d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from gpu_backend.attention import ancestor_pass, merge, prefix_pass
from gpu_backend.kv_pool import KvPool


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows grouped by request, in one of two layouts.

    - *Causal*: a request's rows continue its sequence. What it sees includes its own rows, and row
      i of n sees all but the last n - 1 - i of it. One pass.
    - *Tree*: rows branch off the sequence. They see all of it, and through ``ancestors_RA`` their
      own branch. Two passes, merged by log-sum-exp.

    Nothing is padded to the longest request and no mask spans requests: a row costs its own prefix.
    """

    pool: KvPool
    write_R: Tensor
    """int64: slot of every row."""
    seen_S: Tensor
    """int64: slots that each request sees, request after request."""
    num_rows: tuple[int, ...]
    """Rows of every request; in sum R."""
    num_seen: tuple[int, ...]
    """Slots that every request sees; in sum S."""
    ancestors_RA: Tensor | None
    """int64: slots of each row's branch, the row's own included, padded with -1; None if causal."""

    def attend(self, layer: int, query_hgKd: Tensor, key_hKd: Tensor, value_hKd: Tensor) -> Tensor:
        """Write the rows to their slots and attend; output ``[h, g, R, d]``."""
        self.pool.write(layer, self.write_R, key_hKd, value_hKd)
        keys_Shd, values_Shd = self.pool.gather(layer, self.seen_S)
        parts = [
            self._attend_sequence(
                query_hgKd[:, :, rows],
                keys_Shd[seen].transpose(0, 1),
                values_Shd[seen].transpose(0, 1),
            )
            for rows, seen in zip(_slices(self.num_rows), _slices(self.num_seen), strict=True)
        ]
        out = torch.cat([part[0] for part in parts], dim=2)
        if self.ancestors_RA is None:
            return out
        lse = torch.cat([part[1] for part in parts], dim=2)
        branch = self.pool.gather(layer, self.ancestors_RA.clamp_min(0))
        return merge(out, lse, *ancestor_pass(query_hgKd, *branch, self.ancestors_RA < 0))

    def _attend_sequence(
        self, query_hgnd: Tensor, key_hSd: Tensor, value_hSd: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Attention of one request's rows over what it sees."""
        num_rows = query_hgnd.shape[2]
        if key_hSd.shape[1] == 0:  # a branch without a sequence: nothing to add to it
            lse = torch.full(query_hgnd.shape[:3], -torch.inf, device=query_hgnd.device)
            return torch.zeros_like(query_hgnd), lse
        bias = None
        if self.ancestors_RA is None and num_rows > 1:
            hidden = torch.full((num_rows, num_rows), -torch.inf, device=query_hgnd.device)
            bias = hidden.triu_(1)
        return prefix_pass(query_hgnd, key_hSd, value_hSd, bias)


def _slices(counts: tuple[int, ...]) -> list[slice]:
    return [slice(a, b) for a, b in pairwise(accumulate(counts, initial=0))]
