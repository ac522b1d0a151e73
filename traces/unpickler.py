"""A restricted unpickler: numbers, text, plain containers and numpy arrays of numbers, no code.

Every global that a pickle may name is answered by a stand-in of this module, which accepts only
the data that numpy writes for plain arrays. numpy's own constructors are never reached, because a
forged dtype state can corrupt memory. `traces.pickles` turns the stand-ins into arrays.
"""

from __future__ import annotations

import io
import pickle
import pickletools
import re
from typing import Any, Final, Self

import numpy as np
import numpy.typing as npt

from echo_policies.errors import TraceError

Array = npt.NDArray[Any]

PLAIN_DTYPE: Final = re.compile(r"[biuf]\d{1,2}")
"""Booleans, integers and floats; no objects, structures, text or times."""


def load_plain(data: bytes) -> object:
    """The content of a pickle, with a `PickledArray` for every array.

    Raises:
        TraceError: the pickle names something that is not plain data.
        Exception: whatever the unpickler raises on a damaged pickle.
    """
    _check_memo(data)
    return _Unpickler(io.BytesIO(data)).load()


def _check_memo(data: bytes) -> None:
    """Refuse a forged memo index, for which the unpickler would allocate gigabytes."""
    for count, (opcode, argument, _) in enumerate(pickletools.genops(data)):
        if opcode.name in {"PUT", "BINPUT", "LONG_BINPUT"} and int(argument or 0) > count:
            raise pickle.UnpicklingError(f"memo index {argument} at operation {count}")


def _refuse(what: str) -> TraceError:
    return TraceError(
        f"the pickle asks for {what}; a trace must not run code, so only plain numpy arrays and "
        "containers are read: convert it to safetensors where it was written."
    )


class _Unpickler(pickle.Unpickler):
    """Answers every global with a stand-in, or refuses it by name."""

    def find_class(self, module: str, name: str) -> type:
        stand_in = STAND_INS.get((module.replace("numpy.core.", "numpy._core."), name))
        if stand_in is None:
            raise _refuse(f"{module}.{name}")
        return stand_in

    def persistent_load(self, key: object) -> Any:
        raise _refuse(f"the outside object {key!r}")


class _StandIn:
    """Base of all stand-ins.

    - Only classes are handed out, and all have ``__setstate__``: a BUILD opcode aimed at the class
      itself then fails on the call, where it would otherwise set attributes on shared objects.
    """

    __slots__ = ()

    def __setstate__(self, state: object) -> None:
        raise _refuse(f"a state of {type(self).__name__}")


class _NdarrayName(_StandIn):
    """Stands for ``numpy.ndarray``, which pickles name only as an argument."""

    __slots__ = ()


class _Dtype(_StandIn):
    """Stands for ``numpy.dtype``: a plain type code, then a state that sets its byte order."""

    __slots__ = ("dtype",)

    def __init__(self, code: object, align: object = False, copy: object = False) -> None:
        if not isinstance(code, str) or not PLAIN_DTYPE.fullmatch(code):
            raise _refuse(f"the dtype {code!r}")
        self.dtype: np.dtype[Any] = np.dtype(code)

    def __setstate__(self, state: object) -> None:
        match state:
            case (_, ("<" | ">" | "|" | "=") as order, None, None, None, *_):
                self.dtype = self.dtype.newbyteorder(order)
            case _:
                raise _refuse(f"the dtype state {state!r}")


class PickledArray(_StandIn):
    """Stands for an array made by ``_reconstruct`` and a state (protocols 2 to 4)."""

    __slots__ = ("content",)

    def __init__(self, kind: object, shape: object, code: object) -> None:
        """As numpy's ``_reconstruct`` is called; the state brings the content."""
        self.content: tuple[bytes | bytearray, _Dtype, tuple[int, ...], str] | None = None

    def __setstate__(self, state: object) -> None:
        """Take version, shape, dtype, order and bytes."""
        match state:
            case (int(), tuple() as shape, _Dtype() as dtype, is_fortran, bytes() as raw):
                self.content = (raw, dtype, shape, "F" if is_fortran else "C")
            case _:
                raise _refuse("an array that does not hold plain bytes")

    def array(self) -> Array:
        """The array, read-only."""
        if self.content is None:
            raise TraceError("the pickle holds an array without content: record it again.")
        raw, dtype, shape, order = self.content
        try:
            flat = np.frombuffer(raw, dtype.dtype)
            array = flat.reshape(shape, order="F" if order == "F" else "C")
        except (TypeError, ValueError) as error:
            raise TraceError(f"an array of the pickle is damaged ({error}).") from error
        array.flags.writeable = False
        return array


class _BufferArray(PickledArray):
    """Stands for an array made by ``_frombuffer`` (protocol 5)."""

    __slots__ = ()

    def __init__(
        self, raw: object, dtype: object, shape: object, order: object, axes: object = None
    ) -> None:
        match (raw, dtype, shape, order):
            case (bytes() | bytearray(), _Dtype(), tuple(), "C" | "F"):
                self.content = (raw, dtype, shape, order)
            case _:
                raise _refuse(f"an array in memory order {order!r}")

    def __setstate__(self, state: object) -> None:
        raise _refuse("a second state of an array")


class _Scalar(_StandIn):
    """Stands for numpy's ``scalar``; gives the plain Python number."""

    def __new__(cls, dtype: object, raw: object) -> Self:
        if not isinstance(dtype, _Dtype) or not isinstance(raw, bytes):
            raise _refuse("a scalar that is not a plain number")
        number: Self = np.frombuffer(raw, dtype.dtype)[0].item()
        return number


class _Encode(_StandIn):
    """Stands for ``_codecs.encode``, with which protocol 2 writes bytes."""

    def __new__(cls, text: object, encoding: object) -> Self:
        if not isinstance(text, str) or encoding != "latin1":
            raise _refuse(f"the encoding {encoding!r}")
        data: Self = text.encode("latin1")  # type: ignore[assignment]
        return data


class _NoBytes(_StandIn):
    """Stands for ``bytes``, whose call without arguments is how protocol 2 writes none."""

    def __new__(cls) -> Self:
        data: Self = b""  # type: ignore[assignment]
        return data


STAND_INS: Final[dict[tuple[str, str], type[_StandIn]]] = {
    ("numpy", "ndarray"): _NdarrayName,
    ("numpy", "dtype"): _Dtype,
    ("numpy._core.multiarray", "_reconstruct"): PickledArray,
    ("numpy._core.multiarray", "scalar"): _Scalar,
    ("numpy._core.numeric", "_frombuffer"): _BufferArray,
    ("_codecs", "encode"): _Encode,
    ("__builtin__", "bytes"): _NoBytes,
}
