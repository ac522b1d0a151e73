"""Arguments of the command line that need more than a type."""

from __future__ import annotations

from echo_policies.errors import InputError


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
