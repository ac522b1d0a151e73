"""Measured step times from a CSV file: reading and checking; ``step_group.py`` chooses some.

Columns are those of ``step_times_dev.csv`` (data README), or the least a table needs:
``model,tp,batch,context,tokens,ms``. ``context`` and ``tokens`` are per request.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from echo_policies.errors import InputError
from simulator.cost.csv_cells import Cells, number, read_cells, text

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
    columns: dict[str, str] = {}

    def check_header(header: Sequence[str]) -> None:
        columns.update(_find_columns(path, header))

    return tuple(_row(*entry, columns) for entry in read_cells(path, check_header))


def _find_columns(path: str | Path, header: Sequence[str]) -> dict[str, str]:
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


def _row(where: str, line: int, cells: Cells, columns: Mapping[str, str]) -> StepRow:
    least = {"tp": 1.0, "batch": 1.0, "context": 0.0, "tokens": 1.0, "ms": 0.0}
    value = {key: number(where, cells, columns[key], low) for key, low in least.items()}
    _check_unit(where, columns["ms"], value["ms"])
    for key in ("tp", "batch"):
        if not value[key].is_integer():
            raise InputError(f"{where}: {key} must be a whole number; got {value[key]:g}.")
    names = ("model", "engine", "gpu", "dtype", "moe_ep", "kind", "flag")
    return StepRow(
        line=line,
        tp=int(value["tp"]),
        batch=int(value["batch"]),
        context=value["context"],
        tokens=value["tokens"],
        ms=value["ms"],
        **{name: text(cells, name) for name in names},
    )


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
