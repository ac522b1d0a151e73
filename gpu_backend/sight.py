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
    - *Tree*: they branch off the sequence, at its end or where ``visible_n`` says. They see what is
      before that, and their own branch.
    """

    num_rows: int
    num_committed: int
    """Slots of the sequence."""
    slots: IntArray
    """Slots of the sequence, and behind them at least those that some row sees besides."""
    branch_nA: IntArray | None = None
    """Slots of each row's branch, its own included, padded with -1; None if causal."""
    visible_n: IntArray | None = None
    """How much of the sequence each row sees; None: all of it, and always if causal."""

    @property
    def is_causal(self) -> bool:
        """Whether the rows continue the sequence."""
        return self.branch_nA is None

    @property
    def first_pass(self) -> IntArray:
        """Slots of a pass over the sequence: causal rows included, branches not."""
        if self.is_causal:
            return self.slots
        longest = self.num_committed if self.visible_n is None else int(self.visible_n.max())
        return self.slots[:longest]

    @property
    def visible(self) -> IntArray:
        """Tokens of the sequence that each tree row sees: int64 [n]."""
        if self.visible_n is None:
            return np.full(self.num_rows, self.num_committed)
        return self.visible_n

    @property
    def sees_sequence(self) -> npt.NDArray[np.bool_]:
        """Which row sees which token of the sequence: bool [n, num_committed], or one for all."""
        if self.visible_n is None:
            return np.ones((1, 1), dtype=bool)
        return np.arange(self.num_committed) < self.visible_n[:, None]
