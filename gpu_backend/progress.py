"""Progress of a recording or a run on the terminal, or as lines in a log."""

from __future__ import annotations

import time
from types import TracebackType
from typing import Final, Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
)

_STAGES: Final = {
    "target": ("target output", "requests"),
    "draft": ("draft trees", "positions"),
    "dialogues": ("dialogues", "dialogues"),
    "features": ("target features", "dialogues"),
    "training": ("training", "tokens"),
    "runs": ("compared", "runs"),
}


class ProgressBars:
    """One bar per stage; where the output is no terminal, one line per report instead."""

    def __init__(self) -> None:
        """Set up the bars; nothing is shown before :meth:`update`."""
        self._console = Console(stderr=True)
        self._bars = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[unit]}, {task.fields[rate]:.2f}/s, left"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not self._console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, tuple[float, int]] = {}
        """When each stage was first reported, and what was done by then."""

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

    def update(self, stage: str, done: int, total: int) -> None:
        """Show that ``done`` of ``total`` units are finished: of a stage, or of a policy's run."""
        label, unit = _STAGES.get(stage, (stage, "requests"))
        started, before = self._started.setdefault(stage, (time.monotonic(), done))
        elapsed = time.monotonic() - started
        rate = (done - before) / elapsed if elapsed > 0 else 0.0
        if self._console.is_terminal:
            if stage not in self._tasks:
                self._tasks[stage] = self._bars.add_task(label, unit=unit, rate=rate)
            self._bars.update(self._tasks[stage], completed=done, total=total, rate=rate)
        else:
            left = f", {(total - done) / rate / 60:.1f} min left" if rate > 0 else ""
            self._console.print(f"{label}: {done}/{total} {unit}, {rate:.2f}/s{left}")
