"""Pickles: what numpy writes is read; nothing that a pickle says is ever run."""

from __future__ import annotations

import builtins
import contextlib
import os
import pickle
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import TraceError
from traces.pickles import dumps, is_pickle, loads

HEADER = {"name": "x", "numbers": [1, 2.5, True, None], "nested": {"a": ["b"]}}
ARRAYS: dict[str, Any] = {
    "half": np.arange(6, dtype=np.float16).reshape(2, 3),
    "whole": np.arange(4, dtype=np.int64),
    "none": np.zeros((0, 3), np.int16),
    "fortran": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "strided": np.arange(12, dtype=np.int32)[::2],
    "swapped": np.arange(3, dtype=">i4"),
    "flags": np.array([True, False]),
}


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: Any, *args: Any) -> None:
        self.reduced = (function, args)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.reduced


def pickled(**arrays: Any) -> bytes:
    return pickle.dumps({"header": {}, "arrays": arrays})


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_plain_arrays_are_read_in_every_protocol(protocol: int) -> None:
    data = pickle.dumps({"header": HEADER, "arrays": ARRAYS}, protocol=protocol)
    header, arrays = loads(data)
    assert header == HEADER
    assert arrays.keys() == ARRAYS.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(array, ARRAYS[name], strict=True)
        assert not array.flags.writeable


def test_own_pickles_are_ordinary_ones() -> None:
    data = dumps(HEADER, ARRAYS)
    assert is_pickle(data)
    plain = pickle.loads(data)
    np.testing.assert_array_equal(plain["arrays"]["half"], ARRAYS["half"])


def test_the_spelling_of_numpy_1_is_read() -> None:
    data = pickle.dumps({"header": {}, "arrays": {"half": ARRAYS["half"]}}, protocol=2)
    old = data.replace(b"numpy._core.", b"numpy.core.")
    assert old != data
    np.testing.assert_array_equal(loads(old)[1]["half"], ARRAYS["half"])


def test_numpy_scalars_become_plain_numbers() -> None:
    data = pickle.dumps({"header": {"n": np.int64(3), "x": np.float32(0.5)}, "arrays": {}})
    assert loads(data)[0] == {"n": 3, "x": 0.5}


@pytest.mark.parametrize(
    ("value", "refused"),
    [
        (Call(os.system, "touch hacked"), "system"),
        (Call(builtins.eval, "open('hacked', 'w')"), "eval"),
        (Call(Call, os.system, "touch hacked"), "Call"),
        (Call(getattr, "text", "upper"), "getattr"),
        ([{"deep": (Call(exec, "open('hacked', 'w')"),)}], "exec"),
        (Call(np.load, "hacked"), "load"),
        (Call(np.dtype, Call(builtins.eval, "1")), "eval"),
        (np.array([Call(os.system, "touch hacked")], dtype=object), "'O8'"),
        (np.array([1, "a"], dtype=object), "'O8'"),
        (np.zeros(2, dtype="i4,f4"), "dtype 'V8'"),
        (np.array(["text"]), "dtype 'U4'"),
        (np.zeros(2, "datetime64[s]"), "dtype 'M8'"),
        (np.ma.masked_array([1, 2]), "numpy.ma"),
        (torch.zeros(2), "torch._utils"),
        (OrderedDict(a=1), "collections.OrderedDict"),
        ({1, 2}, "set"),
        (Path("a"), "pathlib"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__,
)
def test_everything_else_is_refused_by_name(
    value: Any, refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for protocol in (2, 4, 5):
        data = pickle.dumps({"header": {}, "arrays": {"x": value}}, protocol=protocol)
        with pytest.raises(TraceError, match=refused):
            loads(data)
    assert not list(tmp_path.iterdir())


FORGED = {
    "structure": (3, "<", None, ("a",), {"a": (np.dtype("i4"), 0)}, 4, 4, 0),
    "short": (3,),
    "not a tuple": {"dtype": 1},
}


@pytest.mark.parametrize("case", sorted(FORGED))
def test_forged_dtype_states_are_refused(case: str) -> None:
    class Dtype:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.dtype, ("i4", False, True), FORGED[case]

    with pytest.raises(TraceError, match="dtype state"):
        loads(pickled(x=Dtype()))


def test_forged_flags_of_a_dtype_have_no_effect() -> None:
    """numpy would mark the numbers as references to objects, and crash on freeing them."""

    class Dtype:
        def __reduce__(self) -> tuple[Any, ...]:
            return np.dtype, ("i8", False, True), (3, "<", None, None, None, -1, -1, 63)

    from numpy._core.numeric import _frombuffer  # type: ignore[attr-defined]

    call = Call(_frombuffer, bytearray(16), Dtype(), (2,), "C")
    data = pickle.dumps({"header": {}, "arrays": {"x": call}}, protocol=5)
    (array,) = loads(data)[1].values()
    assert not array.dtype.hasobject
    assert array.tolist() == [0, 0]


def test_shapes_beyond_the_bytes_are_refused() -> None:
    data = pickled(x=np.zeros((2, 3), np.float16))
    with pytest.raises(TraceError, match="damaged"):
        loads(data.replace(b"K\x02K\x03\x86", b"K\x02K\x04\x86"))


def test_states_aimed_at_a_class_are_refused() -> None:
    """BUILD on the class itself would change it for every later load."""
    for what in (b"numpy\ndtype\n", b"numpy\nndarray\n", b"_codecs\nencode\n"):
        with pytest.raises(TraceError):
            loads(b"\x80\x02c" + what + b"}U\x01aK\x01sb.")
    assert loads(pickled(half=ARRAYS["half"]))[1].keys() == {"half"}


def test_a_header_must_be_plain() -> None:
    for header in (b"bytes", {"a": np.zeros(2)}):
        with pytest.raises(TraceError, match="header must hold plain JSON values"):
            loads(pickle.dumps({"header": header, "arrays": {}}))


@given(cut=st.integers(0, 10_000))
def test_truncated_pickles_are_refused(cut: int) -> None:
    data = dumps(HEADER, ARRAYS)
    with pytest.raises(TraceError):
        loads(data[: cut % len(data)])


@given(data=st.data())
def test_damaged_pickles_are_read_or_refused(data: st.DataObject) -> None:
    content = bytearray(dumps(HEADER, ARRAYS))
    for at in data.draw(st.lists(st.integers(0, len(content) - 1), min_size=1, max_size=4)):
        content[at] = data.draw(st.integers(0, 255))
    with contextlib.suppress(TraceError):
        loads(bytes(content))


def test_bombs_are_refused() -> None:
    memo = b"\x80\x02}r\xff\xff\xff\x7f."
    with pytest.raises(TraceError, match="memo index"):
        loads(memo)
    bomb: list[Any] = ["x" * 10_000]
    for _ in range(60):
        bomb = [bomb, bomb]
    loop: list[Any] = []
    loop.append(loop)
    for header in ({"notes": bomb}, loop):
        with pytest.raises(TraceError, match="at most 8388608 values"):
            loads(pickle.dumps({"header": header, "arrays": {}}))


def test_outside_objects_are_refused() -> None:
    for data in (b"\x80\x02Pkey\n.", b"\x80\x02K\x01Q.", b"\x80\x05\x97."):
        with pytest.raises(TraceError):
            loads(data)
