"""From names to a cost model: the one entry point of the package."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Final

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.catalogue import find_pair
from simulator.cost.constants import shipped
from simulator.cost.forward import (
    EagleForward,
    TransformerForward,
    shard_eagle,
    shard_transformer,
)
from simulator.cost.host import NO_HOST, EngineProfile, find_engine
from simulator.cost.memory import check_ep, check_tp, draft_tp
from simulator.cost.models import BF16_BYTES, CostedPair, Eagle3Head, Transformer
from simulator.cost.operators import DTYPES, Operators, build_operators
from simulator.cost.parameters import CostParameters
from simulator.cost.stages import StageCosts
from simulator.cost.step import CostModel
from simulator.hardware import Hardware, find_hardware

MAX_ZIPF: Final = 2.0
DEFAULT_CHECK_S: Final = 0.15e-3
"""Seconds of one gate check, device sync included (section 4.6; swept 0.03-0.6 ms there)."""


def build_cost_model(
    target: str | CostedPair,
    hardware: str,
    tp: int,
    *,
    pure_roofline: bool = False,
    check_s: float = DEFAULT_CHECK_S,
    moe_zipf_alpha: float | None = None,
    engine: str = "sglang",
    scale: float = 1.0,
    dtype: str = "bf16",
    ep: int = 1,
    parameters: CostParameters | None = None,
    pads_to_graphs: bool = True,
) -> CostModel:
    """Build the cost model of a target and its draft on ``tp`` GPUs.

    Args:
        target: a name of `simulator.cost.catalogue.PAIRS`, whose draft follows from it, or a pair.
        hardware: a name of `simulator.hardware.HARDWARE`.
        tp: tensor-parallel degree. A draft whose heads it does not divide is replicated.
        pure_roofline: the textbook version: datasheet peaks, no floors, host and checks free.
        check_s: seconds of one gate check.
        moe_zipf_alpha: exponent of expert popularity, 0 is uniform (section 4.3); by default
            that of the constants.
        engine: serving engine whose host terms are charged.
        scale: factor on every returned time.
        dtype: format of the target's weights: bf16, fp8 or fp8_block; drafts are bf16.
        ep: ranks that the experts are spread over; it divides ``tp``.
        parameters: constants; by default those shipped, fitted to measured steps.
        pads_to_graphs: round rows up to the engine's CUDA graphs (the staircase).

    Raises:
        UnknownNameError: for an unknown target, hardware or engine.
        InputError: for any other value out of range.
    """
    pair = find_pair(target) if isinstance(target, str) else target
    gpu = find_hardware(hardware)
    constants = parameters or shipped()
    host = NO_HOST if pure_roofline else find_engine(engine, constants)
    _check(pair, gpu, tp, ep, dtype)
    alpha = constants.expert_zipf if moe_zipf_alpha is None else moe_zipf_alpha
    if not (check_s >= 0.0 and 0.0 <= alpha <= MAX_ZIPF and scale > 0.0):
        raise InputError(
            "check_s must be at least 0, moe_zipf_alpha lie in [0, 2] and scale exceed 0; got "
            f"{check_s}, {alpha} and {scale}."
        )
    operators = partial(
        build_operators,
        gpu,
        parameters=constants,
        pure_roofline=pure_roofline,
        moe_zipf_alpha=alpha,
    )
    split = draft_tp(pair.draft, tp)
    forward = shard_transformer(pair.target, operators(tp, dtype=dtype, ep=ep), tp, ep)
    return CostModel(
        pair=pair,
        hardware=gpu,
        tp=tp,
        target=forward,
        draft=_shard_draft(pair.draft, operators(split), split),
        host=host if pads_to_graphs else replace(host, pads_to_graphs=False),
        stages=_stages(forward, constants, host, is_cpu=gpu.name == "cpu"),
        gate_check_s=0.0 if pure_roofline else check_s,
        is_pure_roofline=pure_roofline,
        scale=scale,
        dtype=dtype,
    )


def _stages(
    target: TransformerForward, constants: CostParameters, host: EngineProfile, *, is_cpu: bool
) -> StageCosts:
    """Price the small stages; without CUDA graphs a kernel takes at least its launch."""
    elementwise = target.ops.elementwise
    launch_s = 0.0 if host.graph_rows else host.launch_s
    op_us = constants.cpu_policy_op_us if is_cpu else constants.policy_op_us
    is_free = elementwise.floor_s == 0.0  # the pure roofline has no floors
    return StageCosts(
        op_s=0.0 if is_free else max(op_us * 1e-6, launch_s),
        kernel_s=max(elementwise.floor_s, launch_s),
        byte_per_s=elementwise.byte_per_s,
        kv_token_bytes=target.layers * 2.0 * BF16_BYTES * target.kv_width,
    )


def _check(pair: CostedPair, gpu: Hardware, tp: int, ep: int, dtype: str) -> None:
    if dtype not in DTYPES:
        raise UnknownNameError("weight format", dtype, DTYPES)
    check_tp(pair.target, tp)
    check_ep(pair.target, tp, ep)
    if gpu.nvlink_byte_per_s == 0.0 and tp > 1:
        raise InputError(f"tp must be 1 on {gpu.name}, which has no link to another; got {tp}.")


def _shard_draft(
    draft: Eagle3Head | Transformer, ops: Operators, tp: int
) -> EagleForward | TransformerForward:
    if isinstance(draft, Transformer):
        return shard_transformer(draft, ops, tp)
    return shard_eagle(draft, ops, tp)
