"""Real models: serving with them, and recording what a draft proposes and a target accepts."""

from __future__ import annotations


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
