"""Traces as pickles, for exchange: a dict of a plain ``header`` and of ``arrays`` by name.

Reading runs no foreign code: `traces.unpickler` admits plain arrays and containers only.
"""

from __future__ import annotations

import json
import pickle
from typing import Any, Final

import numpy.typing as npt

from echo_policies.errors import TraceError
from traces.unpickler import PickledArray, load_plain

Array = npt.NDArray[Any]

PROTOCOL: Final = 5
KEYS: Final = frozenset({"header", "arrays"})
HEADER_LIMIT: Final = 2**23
"""Values and characters of a header, about 50,000 requests."""

DAMAGE: Final = (
    pickle.UnpicklingError,
    ArithmeticError,
    AttributeError,
    EOFError,
    ImportError,
    LookupError,
    MemoryError,
    RecursionError,
    TypeError,
    ValueError,
)
"""What the unpickler raises on bytes that are no valid pickle."""


def is_pickle(data: bytes) -> bool:
    """Whether the first bytes are those of a pickle of protocol 2 to 5."""
    return data[:1] == b"\x80" and data[1:2] in {b"\x02", b"\x03", b"\x04", b"\x05"}


def dumps(header: dict[str, Any], arrays: dict[str, Array]) -> bytes:
    """Pickle a header of plain JSON values and arrays by name."""
    return pickle.dumps({"header": header, "arrays": arrays}, protocol=PROTOCOL)


def loads(data: bytes) -> tuple[object, dict[str, Array]]:
    """Read header and read-only arrays from a pickle without running its code.

    Raises:
        TraceError: the pickle names anything but plain numpy arrays, is damaged, or holds
            something else than a header and arrays.
    """
    try:
        content = load_plain(data)
    except DAMAGE as error:
        if isinstance(error, TraceError):
            raise
        reason = " ".join(str(error).split()) or type(error).__name__
        raise TraceError(
            f"the pickle is truncated or damaged ({reason}): copy or record it again."
        ) from error
    if not isinstance(content, dict) or content.keys() != KEYS:
        raise TraceError(
            "a pickled trace must be a dict of 'header' and 'arrays'; got "
            f"{_describe(content)}: convert it where it was written."
        )
    return _plain_header(content["header"]), _named_arrays(content["arrays"])


def _plain_header(header: object) -> object:
    _check_size(header)
    try:
        return json.loads(json.dumps(header))
    except (TypeError, ValueError, RecursionError) as error:
        raise TraceError(
            f"the pickled header must hold plain JSON values ({error}): fix its writer."
        ) from error


def _check_size(header: object) -> None:
    """Refuse a header that unfolds without end: a small pickle can name one list over and over."""
    size, todo = 0, [header]
    while todo:
        value = todo.pop()
        size += 1 + (len(value) if isinstance(value, (str, list, tuple, dict)) else 0)
        if size > HEADER_LIMIT:
            raise TraceError(
                f"the pickled header must hold at most {HEADER_LIMIT} values and characters; "
                "it refers to itself or holds more: fix its writer."
            )
        if isinstance(value, dict):
            todo.extend(value)
            todo.extend(value.values())
        elif isinstance(value, (list, tuple)):
            todo.extend(value)


def _named_arrays(arrays: object) -> dict[str, Array]:
    if not isinstance(arrays, dict):
        raise TraceError(f"the pickled arrays must be a dict by name; got {_describe(arrays)}.")
    named: dict[str, Array] = {}
    for name, value in arrays.items():
        if not isinstance(name, str) or not isinstance(value, PickledArray):
            given = f"{name!r}: {_describe(value)}"
            raise TraceError(f"the pickled arrays must be numpy arrays by name; got {given}.")
        named[name] = value.array()
    return named


def _describe(value: object) -> str:
    if isinstance(value, dict):
        return f"a dict of {sorted(map(repr, value))[:5]}"
    return type(value).__name__.lstrip("_").lower()
