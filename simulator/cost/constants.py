"""Constants in files: the shipped fit, and fits of one's own.

A file holds one table per constant under ``[constants]`` (value, low, high; unit, meaning and
source are for the reader), ``[fit]`` with its provenance, and the covariance of the logarithms of
the fitted constants.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.parameters import CONSTANTS, CostParameters

SHIPPED: Final = "constants.toml"


@dataclass(frozen=True, slots=True)
class ConstantsFile:
    """A set of constants with what is known about them."""

    parameters: CostParameters
    intervals: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    """95 % interval of every fitted constant."""
    covariance: tuple[tuple[float, ...], ...] = ()
    """Of the logarithms of the fitted constants, in the order of `names`."""
    names: tuple[str, ...] = ()
    provenance: Mapping[str, Any] = field(default_factory=dict)


@cache
def shipped_file() -> ConstantsFile:
    """Return the constants that come with the package."""
    text = (files("simulator.cost") / SHIPPED).read_text(encoding="utf-8")
    return parse(text, SHIPPED)


def shipped() -> CostParameters:
    """Return the values that come with the package."""
    return shipped_file().parameters


def load(path: Path) -> ConstantsFile:
    """Read constants from a file that `simulate costs fit` wrote.

    Raises:
        InputError: the file cannot be read or holds something else.
        UnknownNameError: a constant of that name does not exist.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError(
            f"{path} must be a file of constants; it cannot be read: {error}."
        ) from None
    return parse(text, str(path))


def parse(text: str, where: str) -> ConstantsFile:
    """Read constants from TOML; those that are missing keep their published value."""
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise InputError(f"{where} must be TOML as `simulate costs fit` writes: {error}.") from None
    entries = content.get("constants")
    if not isinstance(entries, dict):
        raise InputError(f"{where} must hold a table [constants]; `simulate costs fit` writes one.")
    values: dict[str, float] = {}
    intervals: dict[str, tuple[float, float]] = {}
    for name, entry in entries.items():
        if name not in CONSTANTS:
            raise UnknownNameError("constant", name, CONSTANTS)
        if not isinstance(entry, dict):
            raise InputError(f"{where}: constants.{name} must be a table; got {entry!r}.")
        values[name] = _positive(where, name, entry.get("value"))
        if "low" in entry or "high" in entry:
            low = _positive(where, name, entry.get("low"))
            intervals[name] = (low, _positive(where, name, entry.get("high")))
    fit = content.get("fit", {})
    return ConstantsFile(
        parameters=replace(CostParameters(), **values),
        intervals=intervals,
        names=tuple(fit.get("names", ())),
        covariance=tuple(tuple(row) for row in fit.get("covariance", ())),
        provenance={k: v for k, v in fit.items() if k not in {"names", "covariance"}},
    )


def _positive(where: str, name: str, value: object) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not math.isfinite(value) or value <= 0:  # type: ignore[arg-type,operator]
        raise InputError(
            f"{where}: constants.{name} must be a finite number above 0; got {value!r}."
        )
    return float(value)  # type: ignore[arg-type]


def render(content: ConstantsFile) -> str:
    """Return the TOML text of a set of constants."""
    lines = ["# Constants of the cost model, written by `simulate costs fit`.", "", "[fit]"]
    lines += [f"{key} = {_toml(value)}" for key, value in content.provenance.items()]
    lines.append(f"names = {_toml(list(content.names))}")
    lines.append("covariance = [")
    lines += [f"  [{', '.join(f'{x:.4g}' for x in row)}]," for row in content.covariance]
    lines.append("]")
    for name, constant in CONSTANTS.items():
        value = getattr(content.parameters, name)
        lines += ["", f"[constants.{name}]", f"value = {value:.6g}"]
        if name in content.intervals:
            low, high = content.intervals[name]
            lines += [f"low = {low:.6g}", f"high = {high:.6g}"]
        origin = "fitted here; prior: " if name in content.intervals else ""
        lines += [f"{key} = {_toml(constant[key])}" for key in ("unit", "meaning")]
        lines.append(f"source = {_toml(origin + constant['source'])}")
    return "\n".join(lines) + "\n"


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_toml(item) for item in value) + "]"
    text = str(value).replace("\\", "\\\\").replace('"', '\\"')
    return f'"{text}"'
