"""What every command line does alike: a console wide enough, paths checked early, whole files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from rich.console import Console

from echo_policies.errors import InputError
from traces.store import write_whole

MIN_WIDTH: Final = 200
"""Columns of a table that is not printed to a terminal, so that nothing is cut in a file."""


def console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables elsewhere."""
    plain = Console(highlight=False)
    if plain.is_terminal:
        return plain
    return Console(highlight=False, width=max(MIN_WIDTH, plain.width))


def check_writable(paths: Sequence[Path]) -> None:
    """Refuse output paths before a long run, not after it.

    Raises:
        InputError: the folder is missing or not writable, or the path is a folder.
    """
    for path in paths:
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: create the folder {path.parent} first.")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"{path} cannot be written: choose another path.")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and say so."""
    write_whole(path, text.encode())
    console().print(f"Wrote {path}", soft_wrap=True)
