"""How every command of ``run_gpu`` ends when something is wrong."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

import typer

from echo_policies.errors import EchoError

USER_ERROR: Final = 2
INTERRUPTED: Final = 130


@contextmanager
def user_errors(on_interrupt: str) -> Iterator[None]:
    """Print an error of the user's as one sentence and exit; anything else is a bug of ours."""
    try:
        yield
    except EchoError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        print(f"Stopped. {on_interrupt}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None
