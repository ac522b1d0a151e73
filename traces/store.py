"""Traces on disk: one safetensors file, whose single metadata key holds the header as sorted JSON.

Pickles are exchanged through `traces.pickles`; a reader is chosen by a file's content.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from dataclasses import fields
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.numpy

from echo_policies.errors import InputError, TraceError
from traces import pickles
from traces.header import header_json, parse_header, parse_json
from traces.schema import Trace, TraceArrays, TraceHeader
from traces.validate import ADVICE, named_arrays, violations

Array = npt.NDArray[Any]

METADATA_KEY: Final = "echo_trace"
"""The one metadata key: with two or more, equal traces give different bytes from save to save."""

HEAD_BYTES: Final = 16
PICKLE_SUFFIXES: Final = (".pkl", ".pickle")
OPTIONAL: Final = frozenset({"root_entropy", "slot_entropy"})
REQUIRED: Final = frozenset(field.name for field in fields(TraceArrays)) - OPTIONAL


def make_trace(header: TraceHeader, arrays: TraceArrays) -> Trace:
    """Join header and arrays into a trace; nothing is validated.

    Arrays become C-contiguous and read-only; one that is writeable is copied, so the caller's
    arrays are not modified and can no longer change the trace.
    """
    frozen = TraceArrays(**{name: _frozen(array) for name, array in named_arrays(arrays).items()})
    return Trace(header, frozen, digest(header, frozen))


def digest(header: TraceHeader, arrays: TraceArrays) -> str:
    """SHA-256 of the header's JSON and of names, dtypes, shapes and content of the arrays."""
    sha = hashlib.sha256(header_json(header).encode())
    for name, array in sorted(named_arrays(arrays).items()):
        sha.update(f"\n{name} {array.dtype.str} {array.shape}\n".encode())
        sha.update(np.ascontiguousarray(array).reshape(-1).view(np.uint8).data)
    return sha.hexdigest()


def save(trace: Trace, path: str | Path) -> None:
    """Write a trace as safetensors, or as a pickle where the suffix is ``.pkl`` or ``.pickle``.

    The file appears whole or not at all. Nothing is validated: a recording is never lost to a
    faulty writer, and `load` refuses it with the reason.

    Raises:
        InputError: the path cannot be written.
    """
    path = Path(path)
    arrays = named_arrays(trace.arrays)
    if path.suffix.lower() in PICKLE_SUFFIXES:
        data = pickles.dumps(trace.header.model_dump(mode="json"), arrays)
    else:
        # safetensors stores the memory as it lies, which garbles an array in Fortran order.
        tensors = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        data = safetensors.numpy.save(tensors, {METADATA_KEY: header_json(trace.header)})
    write_whole(path, data)


def load(path: str | Path, *, validates: bool = True) -> Trace:
    """Read and validate a trace, safetensors or pickle by its content.

    Args:
        path: the file.
        validates: check the content too; without it only the layout of the file is checked.

    Raises:
        TraceError: the file cannot be read, is no trace, or breaks the format.
    """
    path = Path(path)
    try:
        raw_header, named = _read(path)
        header = parse_header(raw_header)
        trace = make_trace(header, _collect(named))
        broken = next(violations(trace.header, trace.arrays), None) if validates else None
    except TraceError as error:
        raise TraceError(f"{path}: {error}") from error.__cause__
    if broken is not None:
        raise TraceError(f"{path}: {broken}. {ADVICE}")
    return trace


def write_whole(path: Path, data: bytes) -> None:
    """Write a file through a temporary one in the same folder, flushed and then renamed.

    Raises:
        InputError: the folder does not exist or cannot be written, or the path is a folder.
    """
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be written: create the folder {path.parent} first.")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.tmp")
    try:
        try:
            with temporary.open("xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise InputError(f"{path} cannot be written ({reason}): choose another path.") from error


def _frozen(array: Array) -> Array:
    if array.flags.writeable or not array.flags.c_contiguous:
        array = np.array(array, order="C")
        array.flags.writeable = False
    return array


def _read(path: Path) -> tuple[object, dict[str, Array]]:
    """The raw header and the arrays of a file."""
    try:
        with path.open("rb") as file:
            head = file.read(HEAD_BYTES)
        if head[8:9] == b"{":  # eight bytes of length come before safetensors' JSON
            return _read_safetensors(path)
        if pickles.is_pickle(head):
            return pickles.loads(path.read_bytes())
    except OSError as error:
        reason = error.strerror or str(error)
        raise TraceError(f"cannot be read ({reason}): give the path of a trace file.") from error
    if not head:
        raise TraceError("the file is empty: copy or record it again.")
    raise TraceError(
        "a trace must be a safetensors file or a pickle; the content is neither: "
        "give a file written by `simulate traces`."
    )


def _read_safetensors(path: Path) -> tuple[object, dict[str, Array]]:
    try:
        with safetensors.safe_open(path, framework="np") as file:
            metadata = file.metadata() or {}
            named = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, ValueError, KeyError, TypeError) as error:
        raise TraceError(
            f"the safetensors file is truncated, damaged or of foreign types ({_reason(error)}): "
            "copy or record it again."
        ) from error
    if METADATA_KEY not in metadata:
        raise TraceError(
            f"the safetensors file has no metadata key {METADATA_KEY!r}, so it is not a trace: "
            "give a file written by `simulate traces`."
        )
    for array in named.values():
        array.flags.writeable = False  # ours alone, so `make_trace` need not copy it
    return parse_json(metadata[METADATA_KEY]), named


def _reason(error: BaseException) -> str:
    text = " ".join(str(error).split()).removeprefix("Error while deserializing header: ")
    return text or type(error).__name__


def _collect(named: dict[str, Array]) -> TraceArrays:
    missing, surplus = REQUIRED - named.keys(), named.keys() - REQUIRED - OPTIONAL
    if missing:
        raise TraceError(f"the array {min(missing)!r} is missing: record the trace again.")
    if surplus:
        raise TraceError(
            f"the array {min(surplus)!r} is not part of the format: remove it, or upgrade "
            "echo-spec if a newer version wrote the file."
        )
    return TraceArrays(**named)
