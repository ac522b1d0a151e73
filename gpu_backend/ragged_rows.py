"""Attention of many requests' rows in one forward: each row meets its own request only.

Keys and values are gathered. In serving on a CPU :mod:`gpu_backend.window_rows` takes this place.

Shape letters: R rows of all requests, A ancestors, h kv heads, g query heads per kv head,
d head dimension.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from gpu_backend.attention import ancestor_pass, merge
from gpu_backend.kv_pool import KvPool
from gpu_backend.prefix_backends.layout import FirstPass


@dataclass(frozen=True, slots=True)
class RaggedRows:
    """Rows grouped by request, in one of two layouts.

    - *Causal*: a request's rows continue its sequence. What it sees includes its own rows, and row
      i of n sees all but the last n - 1 - i of it. One pass.
    - *Tree*: rows branch off the sequence. They see what is before that, and through
      ``ancestors_RA`` their own branch. Two passes, merged by log-sum-exp.

    No mask spans requests.
    """

    pool: KvPool
    write_R: Tensor
    """int64: slot of every row."""
    sequences: FirstPass
    """What each request's rows see of its sequence."""
    ancestors_RA: Tensor | None
    """int64: slots of each row's branch, the row's own included, padded with -1; None if causal."""

    def attend(self, layer: int, query_hgKd: Tensor, key_hKd: Tensor, value_hKd: Tensor) -> Tensor:
        """Write the rows to their slots and attend; output ``[h, g, R, d]``."""
        self.pool.write(layer, self.write_R, key_hKd, value_hKd)
        out, lse = self.sequences.attend(self.pool, layer, query_hgKd)
        if self.ancestors_RA is None:
            return out
        branch = self.pool.gather(layer, self.ancestors_RA.clamp_min(0))
        return merge(out, lse, *ancestor_pass(query_hgKd, *branch, self.ancestors_RA < 0))
