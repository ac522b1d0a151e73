"""Constants of the cost model: every number that is neither a datasheet figure nor a shape.

Defaults are the published values of hardware.md. `simulator.cost.fit` replaces those with a
``prior`` by values fitted to measured steps; the shipped fit is ``constants.toml`` beside this
file, read by `simulator.cost.constants.shipped`.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, Final

TABLE: Final = "hardware.md 4.2"
HOST: Final = "hardware.md 4.5"
ESTIMATE: Final = "estimate, no measurement"


def _constant(
    default: float,
    unit: str,
    meaning: str,
    source: str,
    *,
    prior: float | None = None,
    centre: float | None = None,
    bounds: tuple[float, float] | None = None,
) -> Any:
    """Declare a constant.

    Args:
        default: published or assumed value.
        unit: ``us``, ``ms``, ``share`` of a datasheet figure, or ``-``.
        meaning: what it stands for, in words.
        source: where the default comes from.
        prior: standard deviation of the logarithm around ``centre`` in a fit; None keeps the
            constant out of fits.
        centre: where a fit starts, unless it is the default. Host terms start from one round value
            for all engines, because the published ones may have been fitted to the same rows.
        bounds: range that a fit stays in; a factor of 30 either way unless given.
    """
    low, high = bounds or (default / 30.0, default * 30.0)
    return field(
        default=default,
        metadata={
            "unit": unit,
            "meaning": meaning,
            "source": source,
            "prior": prior,
            "centre": default if centre is None else centre,
            "low": low,
            "high": high,
        },
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CostParameters:
    """A complete set of constants; `CONSTANTS` lists what each one means."""

    gemm_floor_us: float = _constant(3.42, "us", "floor of a bf16 GEMM", TABLE)
    gemm_compute: float = _constant(0.756, "share", "bf16 GEMM: of peak", TABLE)
    gemm_memory: float = _constant(0.837, "share", "bf16 GEMM: of bandwidth", TABLE)
    gemm_sharpness: float = _constant(2.52, "-", "bf16 GEMM: exponent q of the knee", TABLE)
    fp8_floor_us: float = _constant(
        6.5, "us", "floor of a per-tensor fp8 GEMM with its quantisation", TABLE, prior=0.3
    )
    fp8_compute: float = _constant(0.584, "share", "per-tensor fp8 GEMM: of fp8 peak", TABLE)
    fp8_memory: float = _constant(
        0.841, "share", "per-tensor fp8 GEMM: of bandwidth", TABLE, prior=0.05, bounds=(0.5, 0.95)
    )
    fp8_sharpness: float = _constant(2.52, "-", "per-tensor fp8 GEMM: exponent q", TABLE)
    fp8_block_floor_us: float = _constant(
        5.54, "us", "floor of a block-scaled fp8 GEMM", TABLE, prior=0.3
    )
    fp8_block_compute: float = _constant(0.647, "share", "block fp8 GEMM: of fp8 peak", TABLE)
    fp8_block_memory: float = _constant(0.871, "share", "block fp8 GEMM: of bandwidth", TABLE)
    fp8_block_sharpness: float = _constant(1.16, "-", "block fp8 GEMM: exponent q", TABLE)
    attention_floor_us: float = _constant(9.78, "us", "floor of an attention call", TABLE)
    attention_compute: float = _constant(0.55, "share", "attention: of bf16 peak", TABLE)
    attention_memory: float = _constant(0.895, "share", "attention: of bandwidth", TABLE)
    attention_sharpness: float = _constant(3.0, "-", "attention: exponent q", TABLE)
    elementwise_floor_us: float = _constant(2.2, "us", "floor of an elementwise kernel", TABLE)
    elementwise_memory: float = _constant(0.75, "share", "elementwise: of bandwidth", TABLE)
    moe_floor_us: float = _constant(21.1, "us", "floor of the fused experts, bf16", TABLE)
    moe_compute: float = _constant(0.503, "share", "fused experts, bf16: of peak", TABLE)
    moe_memory: float = _constant(0.884, "share", "fused experts, bf16: of bandwidth", TABLE)
    moe_sharpness: float = _constant(1.26, "-", "fused experts, bf16: exponent q", TABLE)
    fp8_moe_floor_us: float = _constant(
        39.0, "us", "floor of the fused experts, fp8 blocks", TABLE, prior=0.3
    )
    fp8_moe_compute: float = _constant(
        0.244, "share", "fused experts, fp8 blocks: of fp8 peak", TABLE, prior=0.3, bounds=(0.05, 1)
    )
    fp8_moe_memory: float = _constant(
        0.900, "share", "fused experts, fp8 blocks: of bandwidth", TABLE
    )
    fp8_moe_sharpness: float = _constant(1.43, "-", "fused experts, fp8 blocks: exponent q", TABLE)
    expert_zipf: float = _constant(
        0.6,
        "-",
        "exponent of the popularity of experts, in every forward",
        "hardware.md 4.3",
        prior=0.3,
        bounds=(0.05, 2.0),
    )
    ep_imbalance: float = _constant(
        1.0, "-", "load of the busiest rank over the mean under expert parallelism", ESTIMATE
    )
    launch_us: float = _constant(
        5.0, "us", "host time of one kernel launch without a CUDA graph", TABLE
    )
    eager_all_reduce_us: float = _constant(
        30.0, "us", "host time of one all-reduce without a CUDA graph", "hardware.md 2.2"
    )
    policy_op_us: float = _constant(
        2.2,
        "us",
        "one operation of a policy's code in a CUDA graph: an elementwise kernel's floor",
        TABLE,
    )
    cpu_policy_op_us: float = _constant(
        5.0, "us", "CPU: one operation of a policy's code", "`simulate costs policies`, two cores"
    )
    sglang_step_ms: float = _constant(
        0.38, "ms", "sglang: host, per step", HOST, prior=0.5, centre=0.5
    )
    sglang_prefill_ms: float = _constant(
        3.0, "ms", "sglang: host, per prompt prefilled beside decoding", ESTIMATE, prior=1.0
    )
    vllm_step_ms: float = _constant(0.76, "ms", "vllm: host, per step", HOST, prior=0.5, centre=0.5)
    vllm_log2_tp_ms: float = _constant(
        0.35, "ms", "vllm: host, per step and doubling of tp", HOST, prior=0.5, centre=0.05
    )
    vllm_prefill_ms: float = _constant(
        3.0, "ms", "vllm: host, per prompt prefilled beside decoding", ESTIMATE, prior=1.0
    )
    vllm_request_us: float = _constant(
        10.0, "us", "vllm: host, per step and live request", ESTIMATE, prior=1.0
    )
    trtllm_step_ms: float = _constant(
        0.34, "ms", "trtllm: host, per step", HOST, prior=0.5, centre=0.5
    )
    trtllm_log2_tp_ms: float = _constant(
        0.12, "ms", "trtllm: host, per step and doubling of tp", HOST, prior=0.5, centre=0.05
    )
    trtllm_prefill_ms: float = _constant(
        3.0, "ms", "trtllm: host, per prompt prefilled beside decoding", ESTIMATE, prior=1.0
    )
    sglang_prefill_share: float = _constant(
        1.0,
        "-",
        "sglang: part of the other requests' prefills that falls into a request's decoding",
        ESTIMATE,
        prior=0.3,
        bounds=(0.05, 2.0),
    )
    vllm_prefill_share: float = _constant(
        1.0,
        "-",
        "vllm: part of the other requests' prefills that falls into a request's decoding",
        ESTIMATE,
        prior=0.3,
        bounds=(0.05, 2.0),
    )
    trtllm_prefill_share: float = _constant(
        1.0,
        "-",
        "trtllm: part of the other requests' prefills that falls into a request's decoding",
        ESTIMATE,
        prior=0.3,
        bounds=(0.05, 2.0),
    )
    cycle_ms: float = _constant(1.36, "ms", "EAGLE: host, per cycle", HOST, prior=0.5, centre=1.0)
    draft_step_ms: float = _constant(
        0.048, "ms", "EAGLE: host, per draft step", HOST, prior=0.5, centre=0.05
    )
    tree_ms: float = _constant(
        1.12, "ms", "EAGLE: host, per cycle whose draft branches", HOST, prior=0.5, centre=1.0
    )
    old_cycle_ms: float = _constant(
        2.25, "ms", "sglang of 2025-03: host, extra per cycle, times 1 + log2 tp", HOST
    )
    transformers_step_ms: float = _constant(
        1.0, "ms", "plain transformers: host, per step", ESTIMATE
    )
    transformers_launch_us: float = _constant(
        10.0, "us", "plain transformers: host, per kernel", ESTIMATE
    )
    cpu_op_us: float = _constant(
        35.0, "us", "CPU: floor of every operator", "models.md 2, by eye, within 30 %"
    )


CONSTANTS: Final = {entry.name: entry.metadata for entry in fields(CostParameters)}
"""Unit, meaning, source, prior and bounds of every constant, by name."""

FITTED_NAMES: Final = tuple(
    name for name, constant in CONSTANTS.items() if constant["prior"] is not None
)
"""Constants that `simulator.cost.fit` changes."""

NEUTRAL: Final = CostParameters(**{name: entry["centre"] for name, entry in CONSTANTS.items()})
"""Where the shipped fit starts: operators as published, host terms the same for all engines."""

PUBLISHED: Final = CostParameters()
"""The values of hardware.md, nothing fitted here."""
