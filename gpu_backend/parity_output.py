"""What ``run_gpu parity`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from gpu_backend.parity import ParityReport
from gpu_backend.serving import ServeSettings
from traces.terminal import console

COLUMNS = (
    "policy",
    "batch",
    "k_max",
    "steps",
    "request-steps",
    "of them drafted",
    "accepted tokens",
    "steps that differ",
)


def plain_table(columns: Sequence[str]) -> Table:
    """A table without a frame; the first column is text, the others are figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for number, name in enumerate(columns):
        table.add_column(name, justify="right" if number else "left", no_wrap=True)
    return table


def print_parity(reports: Sequence[tuple[ServeSettings, ParityReport]]) -> None:
    """Print a line per policy and batch size, then the first difference of each, if any."""
    out = console()
    table = plain_table(COLUMNS)
    for settings, report in reports:
        figures = (
            settings.num_slots,
            settings.k_max,
            report.steps,
            report.request_steps,
            report.drafts,
            report.accepted,
            report.differences,
        )
        table.add_row(report.policy, *(f"{figure:,}" for figure in figures))
    out.print(table)
    differing = [(s, report) for s, report in reports if report.first is not None]
    for settings, report in differing:
        out.print(
            f"{report.policy}, batch {settings.num_slots}: DIFFERS at {report.first}.",
            soft_wrap=True,
            markup=False,
        )
    if not differing:
        out.print("Replay takes every decision the same way.")
