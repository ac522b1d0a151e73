"""Measured step times from a CSV file: reading and checking; ``step_group.py`` chooses some.

Columns are those of ``step_times_dev.csv`` (data README), or the least a table needs:
``model,tp,batch,context,tokens,ms``. ``context`` and ``tokens`` are per request.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_policies.errors import InputError

SHORTEST_STEP_MS: Final = 0.1
"""A third of the host's part alone (hardware.md section 4.5): a shorter step is in seconds."""
LONGEST_STEP_MS: Final = 1e5
"""100 s, which no step takes, CPU included: a longer one is in smaller units."""

_COLUMNS: Final[Mapping[str, tuple[str, ...]]] = {
    "model": ("model",),
    "tp": ("tp",),
    "batch": ("batch",),
    "context": ("context",),
    "tokens": ("tokens", "tokens_per_request"),
    "ms": ("ms", "measured_ms"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class StepRow:
    """One measured engine step; empty text where the file has no such column."""

    line: int
    model: str
    tp: int
    batch: int
    context: float
    """Committed tokens per request."""
    tokens: float
    """Rows per request, the root included."""
    ms: float
    engine: str = ""
    gpu: str = ""
    dtype: str = ""
    moe_ep: str = ""
    kind: str = ""
    flag: str = ""

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.ms / 1e3


def read_step_rows(path: str | Path) -> tuple[StepRow, ...]:
    """Read measured step times.

    Raises:
        InputError: no such file, a column that is missing, a cell that is no number or out of
            range, or times that are not in milliseconds; names the line.
    """
    path = Path(path)
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            columns = _find_columns(path, reader.fieldnames or ())
            rows = tuple(_row(path, reader.line_num, cells, columns) for cells in reader)
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path} must be a CSV file of step times; reading failed: {error}."
        ) from None
    if not rows:
        raise InputError(f"{path} must hold at least one row below its header; it has none.")
    return rows


def _find_columns(path: Path, header: Sequence[str]) -> dict[str, str]:
    found = {}
    for field, names in _COLUMNS.items():
        present = [name for name in names if name in header]
        if len(present) != 1:
            state = "both" if present else "neither" if len(names) > 1 else "not"
            raise InputError(
                f"{path} must have a column {' or '.join(map(repr, names))}; it has {state}. Its "
                f"header is {','.join(header) or 'empty'}."
            )
        found[field] = present[0]
    return found


def _row(
    path: Path, line: int, cells: Mapping[str, str | None], columns: Mapping[str, str]
) -> StepRow:
    where = f"{path}, line {line}"
    least = {"tp": 1.0, "batch": 1.0, "context": 0.0, "tokens": 1.0, "ms": 0.0}
    number = {key: _number(where, columns[key], cells, low) for key, low in least.items()}
    _check_unit(where, columns["ms"], number["ms"])
    for key in ("tp", "batch"):
        if not number[key].is_integer():
            raise InputError(f"{where}: {key} must be a whole number; got {number[key]:g}.")
    text = {
        key: (cells.get(key) or "").strip()
        for key in ("model", "engine", "gpu", "dtype", "moe_ep", "kind", "flag")
    }
    return StepRow(
        line=line,
        tp=int(number["tp"]),
        batch=int(number["batch"]),
        context=number["context"],
        tokens=number["tokens"],
        ms=number["ms"],
        **text,
    )


def _number(where: str, column: str, cells: Mapping[str, str | None], least: float) -> float:
    text = cells.get(column)
    try:
        value = float(text or "")
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise InputError(
            f"{where}: {column} must be a number of at least {least:g}, with a decimal point; got "
            f"{text!r}."
        )
    return value


def _check_unit(where: str, column: str, value_ms: float) -> None:
    if SHORTEST_STEP_MS <= value_ms <= LONGEST_STEP_MS:
        return
    if value_ms < SHORTEST_STEP_MS:
        guess = f"it looks like seconds ({value_ms * 1e3:g} ms)"
    else:
        guess = f"it looks like microseconds ({value_ms / 1e3:g} ms) or nanoseconds"
    raise InputError(
        f"{where}: {column} must be in milliseconds, {SHORTEST_STEP_MS:g} to {LONGEST_STEP_MS:g} "
        f"for any engine's step; got {value_ms:g}, and {guess}. Convert the column."
    )
