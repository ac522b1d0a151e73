"""What tells the requests of a recording apart: used where two recordings are put side by side."""

from __future__ import annotations

from typing import TypeAlias

from echo_policies.errors import InputError
from traces.schema import RequestInfo, Trace

RequestKey: TypeAlias = tuple[str, str, int]


def request_key(info: RequestInfo) -> RequestKey:
    """The prompt that a request answers: data set, question and turn."""
    return (info.task, info.question_id, info.turn)


def key_label(key: RequestKey) -> str:
    """A key for people, such as ``humaneval/3`` or ``mt_bench/81, turn 2``."""
    task, question_id, turn = key
    return f"{task}/{question_id}" + (f", turn {turn}" if turn > 1 else "")


def requests_by_key(trace: Trace, label: str) -> dict[RequestKey, int]:
    """Index of every request by its key, in recorded order.

    Raises:
        InputError: a request occurs twice.
    """
    found: dict[RequestKey, int] = {}
    for q, info in enumerate(trace.header.requests):
        key = request_key(info)
        if key in found:
            raise InputError(
                f"Every request must occur once in a recording; {label} holds {key_label(key)} as "
                f"requests {found[key]} and {q}. Record it again without the repetition."
            )
        found[key] = q
    return found
