"""From names to a cost model: the one entry point of the package."""

from __future__ import annotations

from typing import Final

from echo_policies.errors import InputError
from simulator.cost.catalogue import find_pair
from simulator.cost.forward import (
    EagleForward,
    TransformerForward,
    shard_eagle,
    shard_transformer,
)
from simulator.cost.host import NO_HOST, find_engine
from simulator.cost.memory import check_tp, draft_tp
from simulator.cost.models import Eagle3Head, Transformer
from simulator.cost.operators import Operators, build_operators
from simulator.cost.step import CostModel
from simulator.hardware import find_hardware

DEFAULT_CHECK_S: Final = 0.15e-3
"""Seconds of one gate check, device sync included (section 4.6; swept 0.03-0.6 ms there)."""


def build_cost_model(
    target: str,
    hardware: str,
    tp: int,
    *,
    pure_roofline: bool = False,
    check_s: float = DEFAULT_CHECK_S,
    moe_zipf_alpha: float = 0.6,
    engine: str = "sglang",
    scale: float = 1.0,
) -> CostModel:
    """Build the cost model of a target and its draft on ``tp`` GPUs.

    Args:
        target: a name of `simulator.cost.catalogue.PAIRS`; the draft follows from it.
        hardware: a name of `simulator.hardware.HARDWARE`.
        tp: tensor-parallel degree. A draft whose heads it does not divide is replicated.
        pure_roofline: the textbook version: datasheet peaks, no floors, host and checks free.
        check_s: seconds of one gate check.
        moe_zipf_alpha: exponent of expert popularity, 0 (uniform) to 1 (section 4.3).
        engine: serving engine whose host terms are charged.
        scale: factor on every returned time.

    Raises:
        UnknownNameError: for an unknown target, hardware or engine.
        InputError: for any other value out of range.
    """
    pair, gpu, host = find_pair(target), find_hardware(hardware), find_engine(engine)
    check_tp(pair.target, tp)
    if not (check_s >= 0.0 and 0.0 <= moe_zipf_alpha <= 1.0 and scale > 0.0):
        raise InputError(
            "check_s must be at least 0, moe_zipf_alpha lie in [0, 1] and scale exceed 0; got "
            f"{check_s}, {moe_zipf_alpha} and {scale}."
        )
    target_ops, draft_ops = (
        build_operators(gpu, n, pure_roofline=pure_roofline, moe_zipf_alpha=moe_zipf_alpha)
        for n in (tp, draft_tp(pair.draft, tp))
    )
    return CostModel(
        pair=pair,
        hardware=gpu,
        tp=tp,
        target=shard_transformer(pair.target, target_ops, tp),
        draft=_shard_draft(pair.draft, draft_ops, draft_tp(pair.draft, tp)),
        host=NO_HOST if pure_roofline else host,
        gate_check_s=0.0 if pure_roofline else check_s,
        is_pure_roofline=pure_roofline,
        scale=scale,
    )


def _shard_draft(
    draft: Eagle3Head | Transformer, ops: Operators, tp: int
) -> EagleForward | TransformerForward:
    if isinstance(draft, Transformer):
        return shard_transformer(draft, ops, tp)
    return shard_eagle(draft, ops, tp)
