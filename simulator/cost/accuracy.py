"""How far predictions lie from measured steps: over all, by model, engine and kind, and worst."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

import numpy as np

from echo_policies.errors import InputError
from simulator.cost.affine import fit_affine
from simulator.cost.step_rows import StepRow
from simulator.cost.stepfile import MeasuredStep

NUM_WORST: Final = 10


@dataclass(frozen=True, slots=True)
class Errors:
    """Absolute relative errors of some rows, as fractions."""

    rows: int
    median: float
    p90: float
    max: float
    bias: float
    """Median of predicted over measured, minus 1: with its sign."""


@dataclass(frozen=True, slots=True)
class WorstRow:
    """One row that the model misses."""

    row: str
    line: int
    measured_ms: float
    predicted_ms: float
    error: float
    """Predicted over measured, minus 1."""


@dataclass(frozen=True, slots=True)
class Accuracy:
    """Errors of one set of predictions."""

    overall: Errors
    by_model: dict[str, Errors]
    by_engine: dict[str, Errors]
    by_kind: dict[str, Errors]
    worst: tuple[WorstRow, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON: the overall figures on top, fractions throughout."""
        return {
            **asdict(self.overall),
            "by_model": {key: asdict(value) for key, value in self.by_model.items()},
            "by_engine": {key: asdict(value) for key, value in self.by_engine.items()},
            "by_kind": {key: asdict(value) for key, value in self.by_kind.items()},
            "worst": [asdict(row) for row in self.worst],
        }


def accuracy(steps: Sequence[MeasuredStep], predicted_ms: Sequence[float]) -> Accuracy:
    """Compare predictions with measured steps."""
    error_S = np.array(predicted_ms) / np.array([step.measured_ms for step in steps]) - 1.0
    worst = np.argsort(-np.abs(error_S), kind="stable")[:NUM_WORST].tolist()

    def split(key: Callable[[MeasuredStep], str]) -> dict[str, Errors]:
        labels = np.array([key(step) for step in steps])
        return {str(label): _errors(error_S[labels == label]) for label in np.unique(labels)}

    return Accuracy(
        overall=_errors(error_S),
        by_model=split(lambda step: step.model),
        by_engine=split(lambda step: step.family),
        by_kind=split(lambda step: step.kind),
        worst=tuple(
            WorstRow(
                steps[place].label,
                steps[place].line,
                steps[place].measured_ms,
                float(predicted_ms[place]),
                float(error_S[place]),
            )
            for place in worst
        ),
    )


def _errors(error_S: np.ndarray[tuple[int, ...], np.dtype[np.float64]]) -> Errors:
    size_S = np.abs(error_S)
    return Errors(
        rows=len(error_S),
        median=float(np.median(size_S)),
        p90=float(np.quantile(size_S, 0.9)),
        max=float(size_S.max()),
        bias=float(np.median(error_S)),
    )


def affine_in_sample(
    steps: Sequence[MeasuredStep],
) -> tuple[list[MeasuredStep], list[float]] | None:
    """Return the steps that a line per machine can be fitted to, and what the lines say.

    The model of other simulators: constant + per batched token + per KV token, fitted to the rows
    of one model, engine, GPU, weight format, tp and kind, and judged on the same rows. None where
    no machine has enough rows; rows never seen it cannot predict at all.
    """
    machines: dict[tuple[object, ...], list[MeasuredStep]] = {}
    for step in steps:
        key = (step.model, step.engine, step.hardware, step.dtype, step.tp, step.ep, step.kind)
        machines.setdefault(key, []).append(step)
    known: list[MeasuredStep] = []
    predicted_ms: list[float] = []
    for rows in machines.values():
        try:
            law = fit_affine([_affine_row(step) for step in rows])
        except InputError:
            continue  # too few rows, or rows that do not tell the terms apart
        known += rows
        predicted_ms += [
            law.step_s(step.batch * step.tokens_per_request, step.batch * step.context) * 1e3
            for step in rows
        ]
    return (known, predicted_ms) if known else None


def _affine_row(step: MeasuredStep) -> StepRow:
    return StepRow(
        line=step.line,
        model=step.model,
        tp=step.tp,
        batch=step.batch,
        context=float(step.context),
        tokens=float(step.tokens_per_request),
        ms=step.measured_ms,
    )
