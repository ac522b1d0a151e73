"""Version of this package, for whatever writes files."""

from __future__ import annotations


def package_version() -> str:
    """Version of the installed distribution, or ``unknown`` in a bare source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("echo-spec")
    except PackageNotFoundError:
        return "unknown"
