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


def available() -> dict[str, Path]:
    """Bundled traces by name, sorted."""
    folder = Path(str(resources.files("traces").joinpath("data")))
    return {path.name.removesuffix(SUFFIX): path for path in sorted(folder.glob(f"*{SUFFIX}"))}


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


def open_trace(name_or_path: str) -> Trace:
    """Load and validate a trace by path or bundled name.

    Raises:
        UnknownNameError: there is no such file and no such bundled trace.
        TraceError: the file is not a valid trace.
    """
    return load(resolve(name_or_path))
