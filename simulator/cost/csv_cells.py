"""Cells of a CSV file of measured steps, each with the line that an error names."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TypeAlias

from echo_policies.errors import InputError

Cells: TypeAlias = Mapping[str, str | None]


def read_cells(
    path: str | Path, check_header: Callable[[Sequence[str]], None]
) -> Iterator[tuple[str, int, Cells]]:
    """Yield where a row stands (for messages), its line number and its cells.

    Args:
        path: the file.
        check_header: called with the column names before the first row.

    Raises:
        InputError: the file cannot be read, or has no row below its header.
    """
    line = 0
    try:
        with Path(path).open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            check_header(tuple(reader.fieldnames or ()))
            for cells in reader:
                line = reader.line_num
                yield f"{path}, line {line}", line, cells
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise InputError(
            f"{path} must be a CSV file of measured steps; reading failed: {error}."
        ) from None
    if line == 0:
        raise InputError(f"{path} must hold at least one row below its header; it has none.")


def text(cells: Cells, column: str, default: str = "") -> str:
    """Return a cell without blanks; ``default`` where it is empty or absent."""
    return (cells.get(column) or "").strip() or default


def number(
    where: str, cells: Cells, column: str, least: float, default: float | None = None
) -> float:
    """Return a finite number of at least ``least``; ``default``, if there is one, where empty.

    Raises:
        InputError: the cell is no such number.
    """
    given = text(cells, column)
    if not given and default is not None:
        return default
    try:
        value = float(given)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value >= least):
        raise InputError(
            f"{where}: {column} must be a number of at least {least:g}, with a decimal point; got "
            f"{given!r}."
        )
    return value
