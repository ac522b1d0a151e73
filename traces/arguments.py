"""Arguments that the command lines of both engines read alike."""

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
