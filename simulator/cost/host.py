"""Engine profiles: what the host adds to a step, and what is replayed from CUDA graphs.

Host terms: hardware.md section 4.5 and the fit of `simulator.cost.fit`. Graph sizes are the
engines' defaults (sglang ``server_args.py`` with speculation, vllm ``cudagraph_capture_sizes``,
trtllm ``CudaGraphConfig`` with padding), taken as sizes in rows: a ragged verification is replayed
from the next larger graph.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from echo_policies.errors import UnknownNameError
from simulator.cost.forward import Kernels
from simulator.cost.parameters import CostParameters

_SMALL: Final = (1, 2, 4)
GRAPHS_SGLANG: Final = (
    *range(1, 9),
    *range(10, 33, 2),
    *range(40, 65, 4),
    *range(72, 257, 8),
    *range(272, 513, 16),
)
GRAPHS_VLLM: Final = (*_SMALL, *range(8, 257, 8), *range(272, 513, 16))
GRAPHS_TRTLLM: Final = (*_SMALL, *range(8, 129, 8), *range(192, 2049, 64))


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineProfile:
    """Host seconds of one serving engine, and the batch sizes it has CUDA graphs for.

    A forward of more rows than the largest graph, and every forward of an engine without graphs,
    takes at least the time of launching its kernels one by one.
    """

    engine: str
    step_s: float = 0.0
    step_per_log2_tp_s: float = 0.0
    request_s: float = 0.0
    """Per step and live request: scheduling and handing out its tokens."""
    prefill_s: float = 0.0
    """Per prompt."""
    mixes_prefill: bool = False
    """Whether prompts are prefilled inside decode steps, or in steps of their own."""
    tpot_prefill_share: float = 1.0
    """Part of the other requests' prefills that falls into a request's time per output token.

    Requests of equal length in a closed loop move together, so that a part falls into the time to
    the first token.
    """
    cycle_s: float = 0.0
    """Extra per EAGLE cycle; fitted on sglang, the only engine with public cycles."""
    cycle_per_log2_tp_s: float = 0.0
    draft_step_s: float = 0.0
    """Extra per EAGLE draft step."""
    tree_s: float = 0.0
    """Extra per EAGLE cycle whose draft branches (topk > 1)."""
    launch_s: float = 0.0
    eager_all_reduce_s: float = 0.0
    unfused: float = 1.0
    """Kernels launched per kernel of a fused engine."""
    graph_rows: tuple[int, ...] = ()
    """Sizes with a CUDA graph, ascending; empty where graphs are off."""
    pads_to_graphs: bool = True

    def plain_step_s(self, tp: int) -> float:
        """Return the host seconds of any step, speculative or not."""
        return self.step_s + self.step_per_log2_tp_s * math.log2(tp)

    def padded(self, rows: int) -> int:
        """Return the rows of the graph that is replayed; ``rows`` where there is none."""
        graphs = self.graph_rows
        if not self.pads_to_graphs:
            return rows
        place = bisect_left(graphs, rows)
        return graphs[place] if place < len(graphs) else rows

    def has_graph(self, rows: int) -> bool:
        """Whether a forward of that many rows is replayed from a CUDA graph."""
        return bool(self.graph_rows) and rows <= self.graph_rows[-1]

    def launch_bound_s(self, kernels: Kernels) -> float:
        """Return the host seconds of launching a forward kernel by kernel."""
        launches_s = kernels.launches * self.unfused * self.launch_s
        return launches_s + kernels.all_reduces * self.eager_all_reduce_s


NO_HOST: Final = EngineProfile(engine="none")
"""Host terms of the pure roofline."""


def _served(
    engine: str, graphs: tuple[int, ...], *, mixes_prefill: bool
) -> Callable[[CostParameters], EngineProfile]:
    def make(p: CostParameters) -> EngineProfile:
        return EngineProfile(
            engine=engine,
            step_s=getattr(p, f"{engine}_step_ms") * 1e-3,
            step_per_log2_tp_s=getattr(p, f"{engine}_log2_tp_ms", 0.0) * 1e-3,
            request_s=getattr(p, f"{engine}_request_us", 0.0) * 1e-6,
            prefill_s=getattr(p, f"{engine}_prefill_ms") * 1e-3,
            mixes_prefill=mixes_prefill,
            tpot_prefill_share=getattr(p, f"{engine}_prefill_share"),
            cycle_s=p.cycle_ms * 1e-3,
            draft_step_s=p.draft_step_ms * 1e-3,
            tree_s=p.tree_ms * 1e-3,
            launch_s=p.launch_us * 1e-6,
            eager_all_reduce_s=p.eager_all_reduce_us * 1e-6,
            graph_rows=graphs,
        )

    return make


def _transformers(p: CostParameters) -> EngineProfile:
    return EngineProfile(
        engine="transformers",
        step_s=p.transformers_step_ms * 1e-3,
        launch_s=p.transformers_launch_us * 1e-6,
        eager_all_reduce_s=p.eager_all_reduce_us * 1e-6,
        unfused=2.5,
    )


def _cpu(p: CostParameters) -> EngineProfile:
    del p  # the floor of every operator is the host's time already
    return EngineProfile(engine="cpu")


def _sglang_2025_03(p: CostParameters) -> EngineProfile:
    extra_s = p.old_cycle_ms * 1e-3
    now = ENGINES["sglang"](p)
    return replace(
        now,
        engine="sglang-2025-03",
        cycle_s=now.cycle_s + extra_s,
        cycle_per_log2_tp_s=extra_s,
    )


ENGINES: Final[Mapping[str, Callable[[CostParameters], EngineProfile]]] = MappingProxyType(
    {
        "sglang": _served("sglang", GRAPHS_SGLANG, mixes_prefill=False),
        "sglang-2025-03": _sglang_2025_03,
        "vllm": _served("vllm", GRAPHS_VLLM, mixes_prefill=True),
        "trtllm": _served("trtllm", GRAPHS_TRTLLM, mixes_prefill=True),
        "transformers": _transformers,
        "cpu": _cpu,
    }
)
"""Every engine profile by name, as a function of the constants."""


def find_engine(name: str, parameters: CostParameters) -> EngineProfile:
    """Return the profile of the serving engine of that name.

    Raises:
        UnknownNameError: if no engine has that name.
    """
    try:
        return ENGINES[name](parameters)
    except KeyError:
        raise UnknownNameError("serving engine", name, ENGINES) from None
