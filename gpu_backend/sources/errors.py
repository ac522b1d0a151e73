"""What can go wrong on the way to a model, and how it is said."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from rich.filesize import decimal

from echo_policies.errors import InputError

Report = Callable[[str, int, int], None]
"""Called with what is being fetched, the bytes done and the bytes in all."""

_FULL: Final = (errno.ENOSPC, errno.EDQUOT)


class UnreachableError(InputError):
    """Raised when a source of models cannot be reached at all; another one may be tried."""


def no_space(folder: Path, needed_bytes: int | None = None) -> InputError:
    """The sentence for a disk that is full or would be."""
    needed = "" if needed_bytes is None else f"; {size_text(needed_bytes)} more are needed"
    try:
        free = f"{size_text(shutil.disk_usage(folder).free)} are free"
    except OSError:
        free = "its free space cannot be read"
    return InputError(
        f"The disk of {folder} has too little space ({free}{needed}): make room, or choose another "
        "folder for models with the environment variable ECHO_MODELS (HF_HOME for the hub's)."
    )


def require_space(folder: Path, needed_bytes: int) -> None:
    """Refuse a fetch that would fill the disk, before it begins.

    Raises:
        InputError: with the bytes that are free and needed.
    """
    if shutil.disk_usage(folder).free < needed_bytes:
        raise no_space(folder, needed_bytes)


@contextmanager
def disk_errors(folder: Path) -> Iterator[None]:
    """Turn an error of the disk into one sentence.

    Raises:
        InputError: the disk is full, or the folder cannot be written.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise no_space(folder) from error
        reason = error.strerror or str(error).partition("\n")[0]
        raise InputError(
            f"{error.filename or folder} cannot be used ({reason}): choose another folder for "
            "models with the environment variable ECHO_MODELS (HF_HOME for the hub's)."
        ) from error


def size_text(num_bytes: int) -> str:
    """A size in words, such as ``1.1 GB``."""
    return decimal(num_bytes)
