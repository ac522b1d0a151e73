"""Measured engine steps from a CSV file: what the cost model is fitted to and judged by."""

from __future__ import annotations

import statistics
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.csv_cells import Cells, number, read_cells, text

KINDS: Final = ("decode_step", "serving_tpot", "spec_cycle")
REQUIRED: Final = ("model", "tp", "batch", "context", "measured_ms", "gpu", "engine", "kind")
LEAST_PLAUSIBLE_MS: Final = 0.2
"""No engine of the model takes less for a step; a median below means that seconds were given."""
MOST_PLAUSIBLE_MS: Final = 20_000.0
"""A median above means that microseconds were given."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredStep:
    """One row: the milliseconds of one engine step, and everything they depend on."""

    line: int
    model: str
    hardware: str
    tp: int
    ep: int
    dtype: str
    engine: str
    """Name of an engine profile."""
    kind: str
    batch: int
    context: int
    measured_ms: float
    tokens_per_request: int = 1
    steps: int = 0
    topk: int = 1
    isl: int = 0
    osl: int = 0
    flag: str = ""

    @property
    def family(self) -> str:
        """Engine without its version."""
        return self.engine.split("-")[0]

    @property
    def group(self) -> tuple[str, str]:
        """What is left out together in a cross-validation."""
        return self.model, self.family

    @property
    def label(self) -> str:
        """The row in a few words."""
        shape = f" {self.steps}/{self.topk}/{self.tokens_per_request}" if self.steps else ""
        lengths = f" isl {self.isl} osl {self.osl}" if self.osl else f" context {self.context}"
        return (
            f"{self.model} {self.dtype} {self.engine} {self.hardware} tp{self.tp} ep{self.ep} "
            f"B{self.batch}{lengths} {self.kind}{shape}"
        )


def read_steps(path: Path, known_engines: Iterable[str]) -> list[MeasuredStep]:
    """Read a file of measured steps.

    Raises:
        InputError: no such file, a column is missing, a value is no number, or the times are not
            in milliseconds.
        UnknownNameError: a kind or engine that does not exist.
    """
    engines = tuple(known_engines)
    entries = read_cells(path, lambda header: _check_columns(path, header))
    steps = [_step(where, line, cells, engines) for where, line, cells in entries]
    _check_unit(path, steps)
    return steps


def _check_columns(path: Path, given: Iterable[str]) -> None:
    columns = set(given)
    missing = [name for name in REQUIRED if name not in columns]
    if missing:
        raise InputError(
            f"{path} must have the columns {', '.join(REQUIRED)}; it lacks {', '.join(missing)}."
        )


def _check_unit(path: Path, steps: list[MeasuredStep]) -> None:
    middle = statistics.median(step.measured_ms for step in steps)
    if LEAST_PLAUSIBLE_MS <= middle <= MOST_PLAUSIBLE_MS:
        return
    unit, factor = ("seconds", "1000") if middle < LEAST_PLAUSIBLE_MS else ("microseconds", "0.001")
    raise InputError(
        f"{path}: measured_ms must be in milliseconds; its median is {middle:.4g}, which looks "
        f"like {unit}. Multiply the column by {factor}."
    )


def _step(where: str, line: int, cells: Cells, engines: tuple[str, ...]) -> MeasuredStep:
    def count(column: str, least: int = 0) -> int:
        return max(least, int(number(where, cells, column, 0.0, 0.0)))

    kind = text(cells, "kind")
    if kind not in KINDS:
        raise UnknownNameError(f"kind of step ({where})", kind, KINDS)
    gpu = text(cells, "gpu").split(maxsplit=1)
    step = MeasuredStep(
        line=line,
        model=text(cells, "model"),
        hardware=gpu[0].lower() if gpu else "",
        tp=int(number(where, cells, "tp", 1.0)),
        ep=count("moe_ep", least=1),
        dtype=text(cells, "dtype", "bf16"),
        engine=_engine(text(cells, "engine"), engines),
        kind=kind,
        batch=int(number(where, cells, "batch", 1.0)),
        context=int(number(where, cells, "context", 0.0)),
        measured_ms=number(where, cells, "measured_ms", 0.0),
        tokens_per_request=count("tokens_per_request", least=1),
        steps=count("steps"),
        topk=count("topk", least=1),
        isl=count("isl"),
        osl=count("osl"),
        flag=text(cells, "flag"),
    )
    if step.measured_ms == 0.0:
        raise InputError(f"{where}: measured_ms must exceed 0.")
    if kind == "serving_tpot" and (step.isl < 1 or step.osl < 1):
        raise InputError(f"{where}: serving_tpot needs isl and osl, at least 1.")
    if kind == "spec_cycle" and step.steps < 1:
        raise InputError(f"{where}: spec_cycle needs steps, at least 1.")
    return step


def _engine(given: str, engines: tuple[str, ...]) -> str:
    """Return the profile of an engine and version; versions without one use the engine's."""
    dashed = given.replace(" ", "-")
    if dashed in engines:
        return dashed
    name = given.split(maxsplit=1)[0] if given else ""
    if name not in engines:
        raise UnknownNameError("serving engine", name, engines)
    return name
