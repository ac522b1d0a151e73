"""Progress of a fetch on the terminal, or as a few lines in a log."""

from __future__ import annotations

from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

_LINES: Final = 10


class FetchBars:
    """One bar per model; where the output is no terminal, a line for every tenth."""

    def __init__(self) -> None:
        """Set up the bars; nothing is shown before :meth:`update`."""
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._tenths: dict[str, int] = {}

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

    def update(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes of a model are there."""
        if self._console.is_terminal:
            if name not in self._tasks:
                self._tasks[name] = self._bars.add_task(name)
            self._bars.update(self._tasks[name], completed=done, total=total)
            return
        tenth = _LINES * done // max(total, 1)
        if tenth > self._tenths.get(name, -1):
            self._tenths[name] = tenth
            line = f"fetching {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self._console.print(line, soft_wrap=True, markup=False, highlight=False)
