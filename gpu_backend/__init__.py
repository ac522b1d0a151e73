"""Real models: serving with them, and recording what a draft proposes and a target accepts."""

from __future__ import annotations


def package_version() -> str:
    """Version of the installed distribution, or ``unknown`` in a bare source tree."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("echo-spec")
    except PackageNotFoundError:
        return "unknown"


def library_versions() -> dict[str, str]:
    """Versions of what a run on real models depends on, as far as installed."""
    from importlib.metadata import PackageNotFoundError, version

    versions = {}
    for name in ("torch", "transformers", "gguf", "numpy"):
        try:
            versions[name] = version(name)
        except PackageNotFoundError:
            continue
    return versions
