"""Reading the kernel tables of ``aiconfigurator-core``: files, versions, columns, filters.

Part of ``kernels_aic.py``. One parquet file for each operator, engine and engine version.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from typing import Any, Final

import numpy as np

from echo_policies.errors import InputError, MissingExtraError, UnknownNameError

Columns = Mapping[str, np.ndarray[tuple[int, ...], np.dtype[Any]]]
"""Cells of a table by column, all of one length."""
Reader = Callable[[Path], Columns]

PACKAGE: Final = "aiconfigurator_core"
EXTRA: Final = "aiconfigurator"
RELEASE: Final = "aiconfigurator-core==0.12.0"
"""The release whose files and columns are known."""


def installed_folder() -> Path:
    """Return the folder of systems of the installed wheel; does not import it.

    Raises:
        MissingExtraError: if the wheel is not installed.
    """
    spec = find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        raise MissingExtraError("The cost model aiconfigurator", EXTRA)
    return Path(spec.submodule_search_locations[0]) / "systems" / "data"


def pyarrow_reader() -> Reader:
    """Return a reader of parquet files.

    Raises:
        MissingExtraError: if pyarrow is not installed.
    """
    if find_spec("pyarrow") is None:
        raise MissingExtraError("Reading AIConfigurator's kernel tables", EXTRA)
    parquet: Any = import_module("pyarrow.parquet")

    def read(path: Path) -> Columns:
        table = parquet.read_table(path)
        return {name: np.asarray(table[name].to_pylist()) for name in table.column_names}

    return read


def find_tables(
    folder: Path, op: str, engine: str, file: str, version: str | None
) -> tuple[Path, ...]:
    """Return the files of an operator: that of ``version``, or of all versions, newest first.

    Raises:
        InputError: if the engine has no such file.
        UnknownNameError: if it has none of that version.
    """
    found = {path.parent.name: path for path in folder.glob(f"{op}/{engine}/*/{file}.parquet")}
    if not found:
        raise InputError(
            f"Kernel tables of {folder.name} must hold {file} of {engine}; they do not. Choose "
            "another engine or system."
        )
    if version is None:
        return tuple(found[name] for name in sorted(found, key=_version_key, reverse=True))
    if version not in found:
        raise UnknownNameError(f"{engine} version of {file}", version, found)
    return (found[version],)


def usable_columns(columns: Columns) -> Columns:
    """Return the rows that a serving engine runs, with ``context`` where tokens are cached.

    Attention: FlashAttention 3 where it was measured beside others. All-reduce: in a CUDA graph.
    """
    cells = dict(columns)
    if {"isl", "step"} <= cells.keys():
        cells["context"] = cells["isl"] + cells["step"]
    keep = np.ones(len(cells["latency"]), dtype=bool) if "latency" in cells else None
    for column, word in (("kernel_source", "fa3"), ("backend", "graph")):
        if keep is not None and column in cells:
            has_word = np.char.find(cells[column].astype(str), word) >= 0
            keep &= has_word if has_word.any() else True
    return cells if keep is None else {name: values[keep] for name, values in cells.items()}


def table_points(
    columns: Columns, axes: Sequence[str], fixed: Mapping[str, object], path: Path
) -> dict[tuple[float, ...], float]:
    """Return seconds by place along the axes, the median where several kernels were measured.

    Args:
        columns: from `usable_columns`.
        axes: columns that the place is made of.
        fixed: value that each of these columns must have.
        path: where the table is from, for messages.

    Raises:
        InputError: for a column that is missing, or a fixed value that was not measured.
    """
    for name in (*axes, *fixed, "latency"):
        if name not in columns:
            raise InputError(
                f"{path} must have the column {name!r}; it has {', '.join(columns)}. Install "
                f"{RELEASE}, whose columns are known."
            )
    keep = np.ones(len(columns["latency"]), dtype=bool)
    for name, value in fixed.items():
        matching = keep & (columns[name] == value)
        if not matching.any():
            names = ", ".join(map(str, np.unique(columns[name][keep]).tolist()))
            given = ", ".join(f"{key} {fixed[key]}" for key in fixed)
            raise InputError(
                f"{path.stem} of {path.parent.parent.name} {path.parent.name} has no kernel with "
                f"{given}: {name} was measured at {names}. Choose one of them."
            )
        keep = matching
    times: dict[tuple[float, ...], list[float]] = {}
    places = zip(*(columns[axis][keep].tolist() for axis in axes), strict=True)
    for place, ms in zip(places, columns["latency"][keep].tolist(), strict=True):
        times.setdefault(tuple(map(float, place)), []).append(ms / 1e3)
    return {place: median(values) for place, values in times.items()}


def _version_key(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)]
