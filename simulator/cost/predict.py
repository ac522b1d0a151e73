"""What the cost model says about a measured step (hardware.md section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Final

from simulator.cost.build import build_cost_model
from simulator.cost.parameters import CostParameters
from simulator.cost.stages import eagle_ops
from simulator.cost.step import CostModel
from simulator.cost.stepfile import MeasuredStep

PREFILL_TOKENS: Final = 8192
"""Prompt tokens that an engine puts into one step at most: the default of sglang, vllm, trtllm."""


def predict_s(model: CostModel, step: MeasuredStep) -> float:
    """Return the seconds of a measured step.

    - ``serving_tpot``: decoding at half the output, the prefills of the other requests spread
      over it, and the host.
    - ``spec_cycle``: verify and draft extend over all tokens of the cycle, the other draft
      layers, EAGLE-3's selection, packing, compaction and the host. No row says how many tokens
      were accepted; half of the levels are taken.
    """
    batch, kv_tokens = step.batch, step.batch * step.context
    if step.kind == "decode_step":
        return model.plain_decode_s(batch, kv_tokens) + model.host_s(0)
    if step.kind == "serving_tpot":
        middle = batch * (step.isl + step.osl // 2)
        decode_s = model.plain_decode_s(batch, middle) + model.host_s(0)
        return decode_s + _prefills_s(model, step, middle) / step.osl
    rows = batch * step.tokens_per_request
    total_s = model.verify_s(rows, batch, kv_tokens)
    total_s += model.draft_extend_s(rows, batch, kv_tokens)
    total_s += (step.steps - 1) * model.draft_layer_s(batch * step.topk, batch, kv_tokens)
    is_tree = step.topk > 1
    total_s += model.select_s(eagle_ops(step.steps, is_tree=is_tree)) + model.pack_s(rows, batch)
    total_s += model.compact_s(batch * step.steps // 2) if is_tree else 0.0
    return total_s + model.host_s(step.steps, is_tree=is_tree)


def _prefills_s(model: CostModel, step: MeasuredStep, kv_tokens: int) -> float:
    """Return the seconds that the prefills of all other requests add while one decodes."""
    others, host = step.batch - 1, model.host
    if not others:
        return 0.0
    together = min(others, max(1.0, PREFILL_TOKENS / step.isl))
    if host.mixes_prefill:
        seconds = model.mixed_prefill_s(step.isl, together, step.batch, kv_tokens)
    else:
        seconds = together * model.prefill_s(step.isl)
    return host.tpot_prefill_share * seconds * others / together


@dataclass(frozen=True, slots=True)
class _Machine:
    model: str
    hardware: str
    tp: int
    ep: int
    dtype: str
    engine: str


def predict_all(
    steps: Sequence[MeasuredStep],
    parameters: CostParameters | None = None,
    *,
    pure_roofline: bool = False,
) -> list[float]:
    """Return the milliseconds of every step; models are built once per machine.

    Raises:
        UnknownNameError: a model or GPU that the catalogue lacks.
        InputError: a tensor-parallel degree that does not divide the model.
    """

    @cache
    def built(machine: _Machine) -> CostModel:
        return build_cost_model(
            machine.model,
            machine.hardware,
            machine.tp,
            pure_roofline=pure_roofline,
            engine=machine.engine,
            dtype=machine.dtype,
            ep=machine.ep,
            parameters=parameters,
        )

    return [predict_s(built(_machine(step)), step) * 1e3 for step in steps]


def _machine(step: MeasuredStep) -> _Machine:
    return _Machine(step.model, step.hardware, step.tp, step.ep, step.dtype, step.engine)


def without_flags(steps: Iterable[MeasuredStep]) -> list[MeasuredStep]:
    """Return the steps that no one marked as doubtful."""
    return [step for step in steps if not step.flag]
