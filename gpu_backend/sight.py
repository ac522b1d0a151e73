"""Which slots of a KV pool the rows of one request see, in a forward of many requests.

Shape letters: n rows of one request, A slots of a branch.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Sight:
    """What one request's rows see.

    - *Causal*: they continue the sequence, and row i of n sees all but the last n - 1 - i slots.
    - *Tree*: they branch off the sequence. They see all of it, and their own branch.
    """

    num_rows: int
    num_committed: int
    """Slots of the sequence, which every row sees."""
    slots: IntArray
    """Slots of the sequence, and behind them at least those that some row sees besides."""
    branch_nA: IntArray | None = None
    """Slots of each row's branch, its own included, padded with -1; None if causal."""

    @property
    def is_causal(self) -> bool:
        """Whether the rows continue the sequence."""
        return self.branch_nA is None

    @property
    def first_pass(self) -> IntArray:
        """Slots of a pass over the sequence: causal rows included, branches not."""
        return self.slots if self.is_causal else self.slots[: self.num_committed]
