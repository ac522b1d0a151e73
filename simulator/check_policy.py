"""What the conformance kit found, as a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rich.table import Table
from rich.text import Text


class Result(Protocol):
    """A result of the kit; spelled out, since the kit itself needs an extra."""

    @property
    def check(self) -> str:
        """The rule."""
        ...

    @property
    def status(self) -> str:
        """``passed`` or ``failed``."""
        ...

    @property
    def error(self) -> str:
        """The counterexample."""
        ...

    @property
    def note(self) -> str:
        """What is said of the policy."""
        ...


def render(results: Sequence[Result]) -> Table:
    """Return one row per rule, with the smallest counterexample where it is broken."""
    notes = sorted({result.note for result in results if result.note})
    table = Table(title="Policy contract", caption="; ".join(notes) or None)
    for heading in ("rule", "status", "smallest counterexample"):
        table.add_column(heading, overflow="fold")
    for result in results:
        style = "green" if result.status == "passed" else "bold red"
        status = Text(result.status, style=style)
        table.add_row(result.check.replace("_", " "), status, Text(result.error))
    return table
