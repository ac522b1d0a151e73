"""Measured engine steps from a CSV file: what the cost model is fitted to and judged by."""

from __future__ import annotations

import csv
import math
import statistics
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_policies.errors import InputError, UnknownNameError

KINDS: Final = ("decode_step", "serving_tpot", "spec_cycle")
REQUIRED: Final = ("model", "tp", "batch", "context", "measured_ms", "gpu", "engine", "kind")
COUNTS: Final = ("steps", "topk", "isl", "osl", "moe_ep", "tokens_per_request")
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
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            _check_columns(path, reader.fieldnames or ())
            engines = tuple(known_engines)
            steps = [_step(path, reader.line_num, row, engines) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(f"{path} must be a CSV of measured steps: {error}.") from None
    if not steps:
        raise InputError(f"{path} must hold at least one measured step; it holds none.")
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


def _step(
    path: Path, line: int, row: Mapping[str, str | None], engines: tuple[str, ...]
) -> MeasuredStep:
    def number(column: str, default: float | None = None) -> float:
        text = (row.get(column) or "").strip()
        if not text and default is not None:
            return default
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not (math.isfinite(value) and value >= 0.0):
            raise InputError(
                f"{path}, line {line}: {column} must be a number, at least 0; got {text!r}."
            )
        return value

    def text(column: str, default: str = "") -> str:
        return (row.get(column) or default).strip()

    kind = text("kind")
    if kind not in KINDS:
        raise UnknownNameError(f"kind of step ({path}, line {line})", kind, KINDS)
    if number("measured_ms") == 0.0 or number("batch") < 1 or number("tp") < 1:
        raise InputError(f"{path}, line {line}: measured_ms, batch and tp must exceed 0.")
    counts = {name: int(number(name, 0.0)) for name in COUNTS}
    ep = max(1, counts.pop("moe_ep"))
    counts["topk"] = max(1, counts["topk"])
    counts["tokens_per_request"] = max(1, counts["tokens_per_request"])
    step = MeasuredStep(
        line=line,
        model=text("model"),
        hardware=text("gpu").split()[0].lower() if text("gpu") else "",
        tp=int(number("tp")),
        ep=ep,
        dtype=text("dtype", "bf16") or "bf16",
        engine=_engine(text("engine"), engines),
        kind=kind,
        batch=int(number("batch")),
        context=int(number("context")),
        measured_ms=number("measured_ms"),
        flag=text("flag"),
        **counts,
    )
    if kind == "serving_tpot" and (step.isl < 1 or step.osl < 1):
        raise InputError(f"{path}, line {line}: serving_tpot needs isl and osl, at least 1.")
    if kind == "spec_cycle" and step.steps < 1:
        raise InputError(f"{path}, line {line}: spec_cycle needs steps, at least 1.")
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
