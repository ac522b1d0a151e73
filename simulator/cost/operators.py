"""Time of one GPU kernel: the operators of which every forward is made.

``t = t0 + (compute ** q + memory ** q) ** (1 / q)`` with ``compute = flops / (peak * ec)`` and
``memory = bytes / (bandwidth * em)`` (hardware.md section 4.1). ``q`` rounds the knee between the
two bounds; the pure roofline has ``t0 = 0``, efficiencies 1 and a sharp ``max``.

All widths are those of one tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from simulator.cost.experts import distinct_experts
from simulator.cost.models import Experts
from simulator.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Fit:
    """Fitted constants of one operator."""

    floor_s: float
    compute_efficiency: float
    memory_efficiency: float
    sharpness: float
    """Exponent ``q``; infinity is a plain maximum."""


PURE: Final = Fit(0.0, 1.0, 1.0, math.inf)
"""The textbook roofline."""

GEMM: Final = Fit(3.42e-6, 0.756, 0.837, 2.52)
ATTENTION: Final = Fit(9.78e-6, 0.55, 0.895, 3.0)
"""Decode attention; also used for prefill, for which section 4.2 gives no fit of its own."""
ELEMENTWISE: Final = Fit(2.2e-6, 1.0, 0.75, math.inf)
FUSED_MOE: Final = Fit(21.1e-6, 0.503, 0.884, 1.26)
"""Starting values of section 4.2, sglang 0.5.14, bf16, H100 (used for the H200 as well)."""


@dataclass(frozen=True, slots=True)
class AllReduce:
    """Custom all-reduce in a CUDA graph: the faster of two algorithms (section 4.2)."""

    small_floor_s: float
    small_byte_per_s: float
    large_floor_s: float
    large_byte_per_s: float

    def time_s(self, num_bytes: float) -> float:
        """Return the seconds of one call over ``num_bytes`` of payload."""
        small_s = self.small_floor_s + num_bytes / self.small_byte_per_s
        large_s = self.large_floor_s + num_bytes / self.large_byte_per_s
        return min(small_s, large_s)


ALL_REDUCE: Final[Mapping[int, AllReduce]] = MappingProxyType(
    {
        2: AllReduce(2.49e-6, 107.4e9, 2.75e-6, 303.4e9),
        4: AllReduce(2.73e-6, 94.5e9, 5.90e-6, 209.9e9),
        8: AllReduce(3.40e-6, 44.9e9, 7.68e-6, 170.0e9),
    }
)


@dataclass(frozen=True, slots=True)
class Roofline:
    """A fit on a GPU: what is left is two divisions and the smooth maximum."""

    floor_s: float
    flop_per_s: float
    byte_per_s: float
    sharpness: float

    def time_s(self, flops: float, num_bytes: float) -> float:
        """Return the seconds of one kernel."""
        compute_s = flops / self.flop_per_s
        memory_s = num_bytes / self.byte_per_s
        q = self.sharpness
        if q == math.inf:
            return self.floor_s + max(compute_s, memory_s)
        power = math.pow(compute_s, q) + math.pow(memory_s, q)
        return self.floor_s + math.pow(power, 1.0 / q)


@dataclass(frozen=True, slots=True)
class Operators:
    """The operators of one GPU under one tensor-parallel degree; made by `build_operators`."""

    gemm: Roofline
    attention: Roofline
    elementwise: Roofline
    fused_moe: Roofline
    all_reduce: AllReduce | None
    moe_zipf_alpha: float

    def gemm_s(self, rows: float, out_width: float, in_width: float) -> float:
        """Return the seconds of a bf16 matrix product (section 4.1)."""
        num_bytes = 2.0 * (rows * in_width + in_width * out_width + rows * out_width)
        return self.gemm.time_s(2.0 * rows * out_width * in_width, num_bytes)

    def attention_s(
        self, rows: float, pairs: float, span: float, q_width: float, kv_width: float
    ) -> float:
        """Return the seconds of one attention call over the whole batch.

        Args:
            rows: query tokens.
            pairs: query-key pairs that are scored.
            span: tokens whose keys and values are read, each once per request however many
                query tokens look at it.
            q_width: query heads times head dimension.
            kv_width: key-value heads times head dimension.
        """
        num_bytes = 4.0 * span * kv_width + 4.0 * rows * q_width
        return self.attention.time_s(4.0 * pairs * q_width, num_bytes)

    def elementwise_s(self, num_bytes: float) -> float:
        """Return the seconds of a kernel that only moves ``num_bytes``."""
        return self.elementwise.floor_s + num_bytes / self.elementwise.byte_per_s

    def fused_moe_s(self, rows: float, hidden: int, experts: Experts, ffn: float) -> float:
        """Return the seconds of the fused experts; ``ffn`` is one expert's width on one rank."""
        routed = rows * experts.per_token
        loaded = distinct_experts(experts.count, experts.per_token, self.moe_zipf_alpha, rows)
        num_bytes = loaded * 6.0 * hidden * ffn + routed * (4.0 * hidden + 6.0 * ffn)
        return self.fused_moe.time_s(6.0 * routed * hidden * ffn, num_bytes)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of one all-reduce (or gather) of ``num_bytes``; 0 on one GPU."""
        return self.all_reduce.time_s(num_bytes) if self.all_reduce else 0.0


def build_operators(
    hardware: Hardware, tp: int, *, pure_roofline: bool, moe_zipf_alpha: float
) -> Operators:
    """Put the fits of section 4.2 (or the pure roofline) on a GPU."""

    def roofline(fit: Fit) -> Roofline:
        used = PURE if pure_roofline else fit
        return Roofline(
            floor_s=used.floor_s,
            flop_per_s=hardware.peak_bf16_flop_per_s * used.compute_efficiency,
            byte_per_s=hardware.memory_byte_per_s * used.memory_efficiency,
            sharpness=used.sharpness,
        )

    all_reduce = ALL_REDUCE.get(tp)
    if pure_roofline and all_reduce is not None:
        # Reduce-scatter, then all-gather: the payload passes the link twice. This factor
        # reproduces the pure column of section 5.2.
        rate = hardware.nvlink_byte_per_s / 2.0
        all_reduce = AllReduce(0.0, rate, 0.0, rate)
    return Operators(
        gemm=roofline(GEMM),
        attention=roofline(ATTENTION),
        elementwise=roofline(ELEMENTWISE),
        fused_moe=roofline(FUSED_MOE),
        all_reduce=all_reduce,
        moe_zipf_alpha=moe_zipf_alpha,
    )
