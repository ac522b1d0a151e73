"""The comparison table, the same for simulated and measured runs."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from rich import box
from rich.table import Table

from traces.metrics import Summary
from traces.stats import Interval

SLOW: Final = 100
"""Tokens per second below which a decimal is shown."""


@dataclass(frozen=True, slots=True)
class TableRow:
    """What the table shows of one policy."""

    label: str
    summary: Summary
    speedup: Interval
    mark: str = ""
    """Appended to the label, such as ``!`` for a run that is not steady."""


COLUMNS = (
    "policy",
    "tok/s",
    "speed-up\n[95 %]",
    "MAT",
    "u",
    "acc/\nver",
    "K",
    "R",
    "levels",
    "TPOT ms\np50/p99",
    "time split, %: draft/check/\nselect/pack/verify/compact/host",
)
"""Headings of every table."""

OPEN_LOOP_COLUMNS = ("TTFT ms\np50/p99", "prefill\n%")
"""Headings that an open loop adds."""


def comparison_table(title: str, rows: Iterable[TableRow], *, is_open_loop: bool = False) -> Table:
    """Lay rows out as a rich table; numbers are right-aligned.

    Args:
        title: shown above the table.
        rows: plain decoding first.
        is_open_loop: adds time to first token and the share of prefill.
    """
    table = Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
    )
    for name in COLUMNS + (OPEN_LOOP_COLUMNS if is_open_loop else ()):
        table.add_column(name, justify="left" if name == "policy" else "right", no_wrap=True)
    for row in rows:
        table.add_row(*_cells(row, is_open_loop=is_open_loop))
    return table


def _cells(row: TableRow, *, is_open_loop: bool) -> list[str]:
    s = row.summary
    cells = [
        row.label + (f" {row.mark}" if row.mark else ""),
        number(s.tokens_per_s, 0 if s.tokens_per_s >= SLOW else 1, separator=True),
        interval(row.speedup),
        number(s.mat, 2),
        number(s.utilisation, 2),
        number(s.accepted_per_verified, 2),
        number(s.k_per_step, 1),
        number(s.rows_per_step, 1),
        number(s.levels_per_step, 1),
        f"{number(s.tpot_p50_ms, 2)}/{number(s.tpot_p99_ms, 2)}",
        time_split(s),
    ]
    if is_open_loop:
        cells.append(f"{number(s.ttft_p50_ms, 0)}/{number(s.ttft_p99_ms, 0)}")
        cells.append(number(100 * s.time_split["prefill"], 0))
    return cells


def number(value: float, digits: int, *, separator: bool = False) -> str:
    """Format a figure; a dash where it does not exist."""
    if math.isnan(value):
        return "-"
    return f"{value:,.{digits}f}" if separator else f"{value:.{digits}f}"


def interval(value: Interval) -> str:
    """Format a ratio with its interval."""
    if math.isnan(value.low):
        return f"{number(value.value, 2)} [-]"
    return f"{value.value:.2f} [{value.low:.2f} {value.high:.2f}]"


def time_split(summary: Summary) -> str:
    """Format the shares of a step's time."""
    parts = ("draft", "check", "select", "pack", "verify", "compact", "host")
    return "/".join(f"{100 * summary.time_split[part]:.0f}" for part in parts)
