"""Cost model: what each part of a speculative step takes on a given machine.

``models`` shapes, ``catalogue`` the known pairs, ``operators`` one kernel, ``forward`` one model
forward, ``host`` what the CPU adds, ``memory`` what fits, ``step`` the whole, as the engine sees
it, ``build`` its construction. Start at `build_cost_model`.
"""

from simulator.cost.build import build_cost_model
from simulator.cost.catalogue import PAIRS, find_pair
from simulator.cost.memory import MemoryNeed
from simulator.cost.models import CostedPair, Eagle3Head, Experts, Transformer
from simulator.cost.step import CostModel

__all__ = [
    "PAIRS",
    "CostModel",
    "CostedPair",
    "Eagle3Head",
    "Experts",
    "MemoryNeed",
    "Transformer",
    "build_cost_model",
    "find_pair",
]
