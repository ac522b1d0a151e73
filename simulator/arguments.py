"""Arguments of the command line that need more than a type."""

from __future__ import annotations

from typing import overload

from echo_policies.errors import InputError


@overload
def whole_numbers(option: str, text: str) -> tuple[int, ...]: ...
@overload
def whole_numbers(option: str, text: None) -> None: ...
def whole_numbers(option: str, text: str | None) -> tuple[int, ...] | None:
    """Read ``1,8,32``; None stays None.

    Raises:
        InputError: anything else.
    """
    if text is None:
        return None
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise InputError(
            f"{option} must be whole numbers separated by commas, such as 1,8,32; got {text!r}."
        ) from None


def first_to_last(option: str, text: str) -> tuple[int, int]:
    """Read ``FIRST..LAST``, or one number that is both.

    Raises:
        InputError: anything else.
    """
    first, _, last = text.partition("..")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise InputError(
            f"{option} must be one number or FIRST..LAST, such as 1..512; got {text!r}."
        ) from None
