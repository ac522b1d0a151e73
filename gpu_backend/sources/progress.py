"""Progress of a fetch on the terminal, or as a few lines in a log."""

from __future__ import annotations

from typing import Final

from rich.progress import (
    BarColumn,
    DownloadColumn,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

from gpu_backend.terminal_bars import TerminalBars

_LINES: Final = 10


class FetchBars(TerminalBars):
    """One bar per model; where the output is no terminal, a line for every tenth."""

    def __init__(self) -> None:
        """Set up the bars; nothing is shown before :meth:`update`."""
        super().__init__(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            DownloadColumn(),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
        )
        self._tenths: dict[str, int] = {}

    def update(self, name: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` bytes of a model are there."""
        if self.console.is_terminal:
            self.show(name, name, done, total)
            return
        tenth = _LINES * done // max(total, 1)
        if tenth > self._tenths.get(name, -1):
            self._tenths[name] = tenth
            line = f"fetching {name}: {done / 1e6:.0f} of {total / 1e6:.0f} MB"
            self.console.print(line, soft_wrap=True, markup=False, highlight=False)
