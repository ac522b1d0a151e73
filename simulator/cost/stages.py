"""The small stages of a speculative cycle beside its forwards: selection, packing, compaction.

Their form is that of an elementwise kernel (hardware.md section 4.1): a launch each, plus bytes
over bandwidth. Nothing here is fitted; what is launched and moved follows from what an engine must
build:

- *selection* runs the policy's own operations; their number is counted, not timed.
- *packing* turns the kept nodes into the ragged verify batch: a prefix sum over the mask, token
  ids, positions and KV slots of every row, the ancestors that a row may look at, and the offset of
  every request.
- *compaction* finds the accepted rows and moves their keys and values, all layers in one kernel, to
  where the next step looks for them. A chain's accepted rows are there already.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

PACK_KERNELS: Final = 6
"""Prefix sum, token ids, positions, KV slots, ancestors, offsets."""
COMPACT_KERNELS: Final = 2
"""Find the accepted rows; move them."""
INDEX_BYTES: Final = 8.0
ROW_BYTES: Final = 2.0 * 3.0 * INDEX_BYTES
"""Read and written of a row: token id, position and KV slot."""

REFERENCE_REQUESTS: Final = 1
REFERENCE_TOKENS: Final = 8
"""Verified per request in the cycles that the host's cycle terms were fitted to (4 to 64)."""
REFERENCE_ACCEPTED: Final = 3
"""Accepted draft tokens per request in them: SpecBundle's runs accept 2 to 4."""


@dataclass(frozen=True, slots=True)
class StageCosts:
    """Seconds of the small stages on one machine; made by `build_cost_model`."""

    op_s: float
    """One operation of a policy: its kernel in a CUDA graph, or its launch without one."""
    kernel_s: float
    """One kernel of packing or compaction, bytes apart."""
    byte_per_s: float
    kv_token_bytes: float
    """Keys and values of one token on one rank."""

    def select_s(self, ops: float) -> float:
        """Return the seconds of a policy's own operations."""
        return ops * self.op_s

    def pack_s(self, rows: float, requests: float) -> float:
        """Return the seconds of building the verify batch of ``rows``, roots included."""
        if rows <= 0:
            return 0.0
        num_bytes = rows * ROW_BYTES + rows * rows / requests + requests * INDEX_BYTES
        return PACK_KERNELS * self.kernel_s + num_bytes / self.byte_per_s

    def compact_s(self, tokens: float) -> float:
        """Return the seconds of moving the keys and values of ``tokens`` accepted rows."""
        num_bytes = 2.0 * tokens * self.kv_token_bytes  # read and written
        return COMPACT_KERNELS * self.kernel_s + num_bytes / self.byte_per_s

    def reference_s(self, levels: int, *, is_tree: bool) -> float:
        """Return the seconds of these stages inside a cycle that was measured whole.

        An EAGLE-3 cycle of one request, as in the rows that the host's cycle terms were fitted to;
        these terms hold it, so the host's part is what is left.
        """
        rows = REFERENCE_REQUESTS * REFERENCE_TOKENS
        total_s = self.select_s(eagle_ops(levels, is_tree=is_tree))
        total_s += self.pack_s(rows, REFERENCE_REQUESTS)
        return total_s + (self.compact_s(REFERENCE_ACCEPTED) if is_tree else 0.0)


def eagle_ops(levels: int, *, is_tree: bool) -> int:
    """Return the operations of EAGLE-3's own selection, as its policies here have them.

    A chain: one per level. A tree: two per level (children by score) and six to rerank; with one
    level there is little to rerank.
    """
    if levels <= 0:
        return 0
    if not is_tree:
        return levels
    return 2 * levels + 6 if levels > 1 else 3
