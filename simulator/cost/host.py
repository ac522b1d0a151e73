"""What the host adds to every step: launches, scheduling, speculative bookkeeping.

Source: hardware.md section 4.5, fitted there on a development half of public measurements.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from echo_policies.errors import UnknownNameError


@dataclass(frozen=True, slots=True)
class HostTerms:
    """Host seconds of one serving engine."""

    engine: str
    step_s: float
    step_per_log2_tp_s: float
    cycle_s: float = 1.36e-3
    """Extra per EAGLE cycle; fitted on sglang, the only engine with public cycles."""
    draft_step_s: float = 0.048e-3
    """Extra per EAGLE draft step."""
    tree_s: float = 1.12e-3
    """Extra per EAGLE cycle whose draft branches (topk > 1)."""

    def plain_step_s(self, tp: int) -> float:
        """Return the host seconds of any step, speculative or not."""
        return self.step_s + self.step_per_log2_tp_s * math.log2(tp)


NO_HOST: Final = HostTerms("none", 0.0, 0.0, 0.0, 0.0, 0.0)
"""Host terms of the pure roofline."""

ENGINES: Final[Mapping[str, HostTerms]] = MappingProxyType(
    {
        "sglang": HostTerms("sglang", 0.38e-3, 0.0),
        "vllm": HostTerms("vllm", 0.76e-3, 0.35e-3),
        "trtllm": HostTerms("trtllm", 0.34e-3, 0.12e-3),
    }
)


def find_engine(name: str) -> HostTerms:
    """Return the host terms of the serving engine of that name.

    Raises:
        UnknownNameError: if no engine has that name.
    """
    try:
        return ENGINES[name]
    except KeyError:
        raise UnknownNameError("serving engine", name, ENGINES) from None
