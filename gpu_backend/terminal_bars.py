"""Bars on the terminal; where the output is none, whoever reports writes lines instead."""

from __future__ import annotations

from types import TracebackType
from typing import Any, Self

from rich.console import Console
from rich.progress import Progress, ProgressColumn, TaskID


class TerminalBars:
    """Bars on standard error, one per name, drawn while the block lasts."""

    def __init__(self, *columns: ProgressColumn) -> None:
        """Set up the bars; nothing is shown before they are entered and shown."""
        self.console = Console(stderr=True)
        self._bars = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        """Start drawing."""
        self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Stop drawing and leave the bars where they are."""
        self._bars.stop()

    def show(self, name: str, label: str, done: int, total: int, **fields: Any) -> None:
        """Draw a bar at so much of its total; ``fields`` are what its columns ask for."""
        if name not in self._tasks:
            self._tasks[name] = self._bars.add_task(label, **fields)
        self._bars.update(self._tasks[name], completed=done, total=total, **fields)
