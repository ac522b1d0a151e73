"""Progress of a recording or a run on the terminal, or as lines in a log."""

from __future__ import annotations

import time
from typing import Final

from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn

from gpu_backend.terminal_bars import TerminalBars

_STAGES: Final = {
    "target": ("target output", "requests"),
    "draft": ("draft trees", "positions"),
    "dialogues": ("dialogues", "dialogues"),
    "features": ("target features", "dialogues"),
    "training": ("training", "tokens"),
    "runs": ("compared", "runs"),
}


class ProgressBars(TerminalBars):
    """One bar per stage; where the output is no terminal, one line per report instead."""

    def __init__(self) -> None:
        """Set up the bars; nothing is shown before :meth:`update`."""
        super().__init__(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}, {task.fields[rate]:.2f}/s, left"),
            TimeRemainingColumn(),
        )
        self._started: dict[str, tuple[float, int]] = {}
        """When each stage was first reported, and what was done by then."""

    def update(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units are finished: of a stage, or of a policy's run."""
        label, unit = _STAGES.get(stage, (stage, "requests"))
        started, before = self._started.setdefault(stage, (time.monotonic(), done))
        elapsed = time.monotonic() - started
        rate = (done - before) / elapsed if elapsed > 0 else 0.0
        if self.console.is_terminal:
            self.show(stage, label, done, total, unit=unit, rate=rate)
        else:
            left = f", {(total - done) / rate / 60:.1f} min left" if rate > 0 else ""
            self.console.print(f"{label}: {done}/{total} {unit}, {rate:.2f}/s{left}")
