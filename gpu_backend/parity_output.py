"""What ``run_gpu parity`` prints."""

from __future__ import annotations

from collections.abc import Sequence

from rich import box
from rich.table import Table

from gpu_backend.parity import ParityReport
from gpu_backend.score_check import NOISE
from gpu_backend.serving import ServeSettings
from gpu_backend.trace_parity import TraceParityReport
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


TRACE_COLUMNS = (
    "policy",
    "batch",
    "k_max",
    "steps",
    "request-steps",
    "unrevealed",
    "differ there",
    "score ties",
    "faults",
)


def print_trace_parity(
    trace: str, requests: int, reports: Sequence[tuple[ServeSettings, TraceParityReport]]
) -> None:
    """Print a line per policy and batch size, then scores, target, and the first fault of each.

    Args:
        trace: name of the recording.
        requests: of it that were served.
        reports: with the settings they were made with.
    """
    out = console()
    out.print(f"trace     {trace}, {requests} requests, recorded tokens committed", markup=False)
    out.print(
        f"tie       scores that differ by at most one step of float16 and {NOISE:g} nats\n",
        markup=False,
    )
    table = plain_table(TRACE_COLUMNS)
    for settings, report in reports:
        figures = (
            settings.num_slots,
            settings.k_max,
            report.steps,
            report.drafts,
            report.unrevealed,
            report.unrevealed_differences,
            report.score_ties,
            len(report.faults),
        )
        table.add_row(report.policy, *(f"{figure:,}" for figure in figures))
    out.print(table)
    for settings, report in reports:
        for line in trace_lines(report):
            label = f"{report.policy}, batch {settings.num_slots}"
            out.print(f"{label}: {line}", soft_wrap=True, markup=False)
    if not any(report.faults for _, report in reports):
        out.print("Every decision is the recording's, or differs where scores are near-ties.")


def trace_lines(report: TraceParityReport) -> list[str]:
    """What a row of the table does not say."""
    scores = report.scores
    figures = (
        f"scores {scores.compared:,} compared, {scores.unequal:,} not the same float16 (by "
        f"{scores.largest:.2g} at most), {scores.swapped:,} nodes below exchanged ranks, "
        f"{len(scores.beyond):,} beyond a tie; target of {report.tokens:,} tokens "
        f"{report.target_ties:,} not its best ({report.target_gap:.2g} logits at most)"
    )
    lines = [figures]
    if scores.beyond:
        lines.append(f"first score beyond a tie: {scores.beyond[0]}")
    if report.faults:
        lines.append(f"DIFFERS at {report.faults[0]}.")
    return lines
