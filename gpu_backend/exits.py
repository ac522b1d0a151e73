"""How the command line ends: exit statuses, errors as one sentence, Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final

import typer

from echo_policies.errors import EchoError

FOUND: Final = 1
"""Exit status of a check that found something."""

USER_ERROR: Final = 2
"""Exit status of a run that could not start or go on."""

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells give it."""

NO_MEMORY: Final = ("can't allocate memory", "out of memory", "bad_alloc")
"""What torch says when memory runs out, on a CPU and on a GPU."""


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that memory ran out, on whatever device."""
    if isinstance(error, MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(mark in str(error) for mark in NO_MEMORY)


@contextmanager
def user_errors(on_interrupt: str) -> Iterator[None]:
    """Print an error of the user's as one sentence and exit; anything else is a bug of ours."""
    try:
        yield
    except EchoError as error:
        print(error, file=sys.stderr)
        raise typer.Exit(USER_ERROR) from None
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        print(
            "Memory must hold weights, keys and values, and one forward; it ran out. Use a smaller "
            "batch, shorter outputs, --dtype bfloat16 or a smaller model.",
            file=sys.stderr,
        )
        raise typer.Exit(USER_ERROR) from None
    except KeyboardInterrupt:
        print(f"Stopped. {on_interrupt}", file=sys.stderr)
        raise typer.Exit(INTERRUPTED) from None


@contextmanager
def first_interrupt_asks(unit: str = "step") -> Iterator[Callable[[], bool]]:
    """Turn the first Ctrl-C into a question that the block may ask; the second one interrupts.

    So a loop can end between two units, with everything it has finished in order.
    """
    asked = False

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        del number, frame
        if asked:
            raise KeyboardInterrupt
        asked = True
        print(f"Stopping after this {unit}; Ctrl-C again stops at once.", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)


def run_status(*, is_sound: bool, is_complete: bool) -> int:
    """Exit status of a check: what it found counts more than that it was stopped."""
    if not is_sound:
        return FOUND
    return 0 if is_complete else INTERRUPTED
