"""Traces by name: the ones bundled with the package, and files."""

from __future__ import annotations

from importlib import resources
from pathlib import Path
from typing import Final

from echo_policies.errors import UnknownNameError
from traces.schema import Trace
from traces.store import load

SUFFIX: Final = ".safetensors"
ALIASES: Final = (SUFFIX, ".pkl", ".pt")
"""Suffixes under which a bundled trace may be asked for; papers call theirs ``.pkl`` or ``.pt``."""


CALIBRATION_SUFFIX: Final = ".calibration.json"
"""Suffix of the calibration that is bundled with a trace."""


def available() -> dict[str, Path]:
    """Bundled traces by name, sorted."""
    return _bundled(SUFFIX)


def resolve(name_or_path: str) -> Path:
    """The file of a trace: an existing file wins, else a bundled name with or without suffix.

    Raises:
        UnknownNameError: there is neither; the message offers the nearest bundled name.
    """
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        return path
    bundled = available()
    name = name_or_path
    for suffix in ALIASES:
        name = name.removesuffix(suffix)
    if name in bundled:
        return bundled[name]
    raise UnknownNameError("trace", name_or_path, bundled)


def calibrations() -> dict[str, Path]:
    """Calibrations of bundled traces by the trace's name, sorted."""
    return _bundled(CALIBRATION_SUFFIX)


def resolve_calibration(name_or_path: str | Path) -> Path:
    """The file of a calibration: an existing file wins, else a bundled trace's name.

    Raises:
        UnknownNameError: there is neither; the message offers the nearest bundled name.
    """
    path = Path(name_or_path)
    if path.exists() and not path.is_dir():
        return path
    bundled = calibrations()
    if str(name_or_path) in bundled:
        return bundled[str(name_or_path)]
    raise UnknownNameError("calibration file or bundled trace", str(name_or_path), bundled)


def open_trace(name_or_path: str) -> Trace:
    """Load and validate a trace by path or bundled name.

    Raises:
        UnknownNameError: there is no such file and no such bundled trace.
        TraceError: the file is not a valid trace.
    """
    return load(resolve(name_or_path))


def _bundled(suffix: str) -> dict[str, Path]:
    """Bundled files by their names without the suffix, sorted."""
    folder = Path(str(resources.files("traces").joinpath("data")))
    return {path.name.removesuffix(suffix): path for path in sorted(folder.glob(f"*{suffix}"))}
