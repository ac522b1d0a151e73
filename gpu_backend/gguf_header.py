"""The first entries of a GGUF file: what the model is called and how it is quantised.

The ``gguf`` package reads the whole vocabulary, which takes many seconds; the few entries wanted
here stand in front of it.
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import BinaryIO, Final

from echo_policies.errors import InputError

_MAGIC: Final = b"GGUF"
_STRING: Final = 8
_ARRAY: Final = 9
_VOCABULARY: Final = "tokenizer."
# Value types by number in the GGUF specification, as struct formats.
_SCALARS: Final = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


def read_general(path: Path) -> dict[str, object]:
    """Entries of a GGUF file in front of its vocabulary, by key; arrays are passed over.

    Raises:
        InputError: the file is not a GGUF file of version 2 or 3, or ends early.
    """
    with path.open("rb") as file:
        if file.read(4) != _MAGIC:
            raise InputError(f"{path}: a .gguf file must start with 'GGUF'; this one does not.")
        try:
            return _entries(file)
        except (struct.error, UnicodeDecodeError, KeyError, OverflowError, MemoryError):
            raise InputError(
                f"{path}: the GGUF header cannot be read. The file is cut short or damaged; "
                "fetch it again and compare its SHA-256."
            ) from None


def _entries(file: BinaryIO) -> dict[str, object]:
    _, _, count = _unpack(file, "IQQ")
    entries: dict[str, object] = {}
    for _ in range(int(count)):
        key = _string(file)
        (kind,) = _unpack(file, "I")
        if kind != _ARRAY:
            entries[key] = _value(file, int(kind))
        elif key.startswith(_VOCABULARY):
            break
        else:
            item, length = _unpack(file, "IQ")
            for _ in range(int(length)):
                _value(file, int(item))
    return entries


def _value(file: BinaryIO, kind: int) -> object:
    return _string(file) if kind == _STRING else _unpack(file, _SCALARS[kind])[0]


def _string(file: BinaryIO) -> str:
    (length,) = _unpack(file, "Q")
    return file.read(int(length)).decode()


def _unpack(file: BinaryIO, layout: str) -> tuple[int | float | bool, ...]:
    layout = "<" + layout
    return struct.unpack(layout, file.read(struct.calcsize(layout)))
