"""What the cost model says about a measured step (hardware.md section 4.4)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache

from simulator.cost.build import build_cost_model
from simulator.cost.parameters import CostParameters
from simulator.cost.step import CostModel
from simulator.cost.stepfile import MeasuredStep


def predict_s(model: CostModel, step: MeasuredStep) -> float:
    """Return the seconds of a measured step.

    - ``serving_tpot``: decoding at half the output, the prefills of the other requests spread
      over it, and the host.
    - ``spec_cycle``: verify and draft extend over all tokens of the cycle, the other draft
      layers, and the host.
    """
    batch, kv_tokens = step.batch, step.batch * step.context
    if step.kind == "decode_step":
        return model.plain_decode_s(batch, kv_tokens) + model.host_s(0, batch)
    if step.kind == "serving_tpot":
        middle = batch * (step.isl + step.osl // 2)
        prefills_s = (batch - 1) * model.prefill_s(step.isl) / step.osl
        return model.plain_decode_s(batch, middle) + prefills_s + model.host_s(0, batch)
    rows = batch * step.tokens_per_request
    total_s = model.verify_s(rows, batch, kv_tokens)
    total_s += model.draft_extend_s(rows, batch, kv_tokens)
    total_s += (step.steps - 1) * model.draft_layer_s(batch * step.topk, batch, kv_tokens)
    total_s += model.select_s(is_tree=step.topk > 1)
    return total_s + model.host_s(step.steps, batch)


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

    @lru_cache(maxsize=None)
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
