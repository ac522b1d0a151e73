"""Seconds of single GPU kernels: a floor plus the two bounds of the roofline.

``t = t0 + (compute^q + memory^q)^(1/q)`` with ``compute = flops / (peak * ec)`` and
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

from echo_policies.errors import InputError
from simulator.cost.experts import distinct_experts
from simulator.cost.models import Experts
from simulator.cost.parameters import CostParameters
from simulator.hardware import Hardware

DTYPES: Final = ("bf16", "fp8", "fp8_block")
"""Weight formats: bf16, fp8 scaled per tensor or channel, fp8 scaled per block."""


@dataclass(frozen=True, slots=True)
class Fit:
    """Constants of one operator."""

    floor_s: float
    compute_efficiency: float
    memory_efficiency: float
    sharpness: float
    """Exponent ``q``; infinity is a plain maximum."""


PURE: Final = Fit(0.0, 1.0, 1.0, math.inf)
"""The textbook roofline."""


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
"""Tabulated on H100; bandwidths scale with the NVLink of the machine."""


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
    """Weights of the layers, in ``weight_bytes`` per element."""
    head: Roofline
    """LM head, router and ``fc``: always bf16."""
    attention: Roofline
    elementwise: Roofline
    fused_moe: Roofline
    all_reduce: AllReduce | None
    moe_zipf_alpha: float
    weight_bytes: float = 2.0
    busiest_rank: float = 1.0
    """Load of the busiest rank over the mean under expert parallelism."""

    def gemm_s(self, rows: float, out_width: float, in_width: float) -> float:
        """Return the seconds of a product with a layer's weights (section 4.1)."""
        width = self.weight_bytes
        num_bytes = width * (rows + out_width) * in_width + 2.0 * rows * out_width
        return self.gemm.time_s(2.0 * rows * out_width * in_width, num_bytes)

    def head_s(self, rows: float, out_width: float, in_width: float) -> float:
        """Return the seconds of a bf16 matrix product (section 4.1)."""
        num_bytes = 2.0 * ((rows + out_width) * in_width + rows * out_width)
        return self.head.time_s(2.0 * rows * out_width * in_width, num_bytes)

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

    def fused_moe_s(self, rows: float, hidden: int, experts: Experts, ffn: float, ep: int) -> float:
        """Return the seconds of the fused experts on the busiest of ``ep`` ranks.

        ``ffn`` is one expert's width on one rank.
        """
        share = self.busiest_rank / ep
        routed = rows * experts.per_token * share
        loaded = self.distinct(experts, rows) * share
        num_bytes = loaded * 3.0 * self.weight_bytes * hidden * ffn
        num_bytes += routed * (4.0 * hidden + 6.0 * ffn)
        return self.fused_moe.time_s(6.0 * routed * hidden * ffn, num_bytes)

    def distinct(self, experts: Experts, rows: float) -> float:
        """Return the expected number of distinct experts that ``rows`` tokens hit."""
        return distinct_experts(experts.count, experts.per_token, self.moe_zipf_alpha, rows)

    def all_reduce_s(self, num_bytes: float) -> float:
        """Return the seconds of one all-reduce (or gather) of ``num_bytes``; 0 on one GPU."""
        return self.all_reduce.time_s(num_bytes) if self.all_reduce else 0.0


def build_operators(
    hardware: Hardware,
    tp: int,
    parameters: CostParameters,
    *,
    pure_roofline: bool,
    moe_zipf_alpha: float,
    dtype: str = "bf16",
    ep: int = 1,
) -> Operators:
    """Put the constants (or the pure roofline) on a machine.

    Raises:
        InputError: fp8 weights on a machine without fp8 matrix units.
    """
    if dtype != "bf16" and not hardware.peak_fp8_flop_per_s:
        raise InputError(
            f"{dtype} weights need a GPU with fp8 matrix units; {hardware.name} has none. Use bf16."
        )
    layers, head, moe = _matrix_fits(parameters, dtype)
    weight_bytes = 2.0 if dtype == "bf16" else 1.0
    peak = hardware.peak_bf16_flop_per_s if dtype == "bf16" else hardware.peak_fp8_flop_per_s

    def roofline(fit: Fit, flop_per_s: float) -> Roofline:
        used = PURE if pure_roofline else fit
        floor_s = used.floor_s
        if hardware.name == "cpu" and not pure_roofline:
            floor_s = parameters.cpu_op_us * 1e-6
        return Roofline(
            floor_s=floor_s,
            flop_per_s=flop_per_s * used.compute_efficiency,
            byte_per_s=hardware.memory_byte_per_s * used.memory_efficiency,
            sharpness=used.sharpness,
        )

    p, bf16_peak = parameters, hardware.peak_bf16_flop_per_s
    attention = Fit(
        p.attention_floor_us * 1e-6,
        p.attention_compute,
        p.attention_memory,
        p.attention_sharpness,
    )
    elementwise = Fit(p.elementwise_floor_us * 1e-6, 1.0, p.elementwise_memory, math.inf)
    return Operators(
        gemm=roofline(layers, peak),
        head=roofline(head, bf16_peak),
        attention=roofline(attention, bf16_peak),
        elementwise=roofline(elementwise, bf16_peak),
        fused_moe=roofline(moe, peak),
        all_reduce=_all_reduce(hardware, tp, pure_roofline=pure_roofline),
        moe_zipf_alpha=moe_zipf_alpha,
        weight_bytes=weight_bytes,
        busiest_rank=p.ep_imbalance if ep > 1 and not pure_roofline else 1.0,
    )


def _matrix_fits(p: CostParameters, dtype: str) -> tuple[Fit, Fit, Fit]:
    """Return the fits of the layers' weights, of the LM head and of the fused experts."""
    head = Fit(p.gemm_floor_us * 1e-6, p.gemm_compute, p.gemm_memory, p.gemm_sharpness)
    if dtype == "bf16":
        moe = Fit(p.moe_floor_us * 1e-6, p.moe_compute, p.moe_memory, p.moe_sharpness)
        return head, head, moe
    moe = Fit(p.fp8_moe_floor_us * 1e-6, p.fp8_moe_compute, p.fp8_moe_memory, p.fp8_moe_sharpness)
    if dtype == "fp8":
        return Fit(p.fp8_floor_us * 1e-6, p.fp8_compute, p.fp8_memory, p.fp8_sharpness), head, moe
    block = Fit(
        p.fp8_block_floor_us * 1e-6,
        p.fp8_block_compute,
        p.fp8_block_memory,
        p.fp8_block_sharpness,
    )
    return block, head, moe


def _all_reduce(hardware: Hardware, tp: int, *, pure_roofline: bool) -> AllReduce | None:
    table = ALL_REDUCE.get(tp)
    if table is None:
        return None
    if pure_roofline:
        # Reduce-scatter, then all-gather: the payload passes the link twice. This factor
        # reproduces the pure column of section 5.2.
        rate = hardware.nvlink_byte_per_s / 2.0
        return AllReduce(0.0, rate, 0.0, rate)
    link = hardware.nvlink_byte_per_s / 450e9
    return AllReduce(
        table.small_floor_s,
        table.small_byte_per_s * link,
        table.large_floor_s,
        table.large_byte_per_s * link,
    )
