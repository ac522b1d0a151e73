"""What the command line prints."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from pydantic import TypeAdapter
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from simulator.results import BatchResult, Result, Row
from simulator.run import Progress as ProgressCallback
from traces.schema import Provenance
from traces.table import TableRow, comparison_table, number
from traces.terminal import console


def use_one_thread() -> None:
    """Run small tensor operations on one thread: more only wait for each other."""
    import torch

    torch.set_num_threads(1)


@contextmanager
def progress_bar() -> Iterator[ProgressCallback]:
    """Show a bar on stderr while requests finish; it vanishes when the run ends."""
    terminal = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} requests"),
        TimeRemainingColumn(),
        console=terminal,
        disable=not terminal.is_terminal,
        transient=True,
        refresh_per_second=4,
    )
    with bar:
        task = bar.add_task("starting", total=None)

        def show(label: str, done: int, total: int) -> None:
            bar.update(task, description=label, completed=done, total=total)

        yield show


def json_text(value: Any) -> str:
    """A dataclass as JSON; figures that do not exist are null."""
    return TypeAdapter(type(value)).dump_json(value, indent=2).decode() + "\n"


def print_figures(
    out: Console, title: str, columns: Sequence[str], rows: Iterable[Sequence[str]]
) -> None:
    """Print a blank line, a title and a table whose columns but the first are right-aligned."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False)
    for place, name in enumerate(columns):
        table.add_column(name, justify="right" if place else "left", no_wrap=True)
    for cells in rows:
        table.add_row(*map(escape, cells))
    out.print()
    out.print(title, soft_wrap=True, markup=False, style="bold")
    out.print(table)


def print_result(result: Result) -> None:
    """Print the head and one table per batch size."""
    out = console()
    for line in head(result):
        out.print(line, soft_wrap=True, markup=False)
    for batch in result.batches:
        out.print()
        title = f"batch {batch.batch_size}, k_max {batch.k_max} ({batch.k_max_rule})"
        is_open = result.config.arrivals == "poisson"
        out.print(comparison_table(title, table_rows(batch), is_open_loop=is_open))
        for note in notes(batch):
            out.print(note, soft_wrap=True, markup=False)


def head(result: Result) -> list[str]:
    """Say what was replayed, what it is costed as, and on what."""
    header = result.trace
    counts = (
        f"{len(result.evaluated_requests)} evaluation and {len(result.calibration_requests)} "
        f"calibration requests; digest {result.trace_digest[:12]}"
    )
    lines = [
        f"trace     {header.name} ({provenance(header.provenance)})",
        f"          target {header.target.name}, draft {header.draft.name}; {counts}",
        f"costed as {result.cost_label}",
    ]
    if result.is_what_if:
        own = " (--target recorded costs the pair itself)" if header.recorded_as else ""
        lines.append(
            f"          a what-if: acceptance of {header.target.name} with {header.draft.name} at "
            f"another model's cost{own}"
        )
    lines.append(f"context   {result.context_label}")
    lines.append(f"replay    {unrevealed(result)}")
    lines.append(
        f"engine    {result.config.arrivals} loop, {result.config.mode} decisions, "
        f"{result.config.verify} verification, "
        f"seed {result.config.seed}"
        + (", every policy clamped to k_max" if result.config.cap_all else "")
    )
    return lines


def unrevealed(result: Result) -> str:
    """Say how much of what policies expanded the recording does not know."""
    rates = [
        (row.summary.unrevealed_rate, row.policy, batch.batch_size)
        for batch in result.batches
        for row in batch.rows
    ]
    rate, policy, batch_size = max(rates)
    if rate == 0:
        return "exact: the recording knows the children of every node that was expanded"
    shown = {
        "lower": "shown without children",
        "upper": "shown with the target path",
        "both": "shown without children, the bracket is below each table",
    }
    return (
        f"up to {100 * rate:.2f} % of expanded nodes unrevealed ({policy} at batch {batch_size}); "
        f"{shown[result.config.unrevealed]}"
    )


def provenance(origin: Provenance) -> str:
    """Say whether a trace is recorded or synthetic, and how."""
    if origin.kind == "recorded":
        return f"recorded {origin.date} on {origin.device or 'an unnamed device'}"
    return f"SYNTHETIC, made {origin.date} by {origin.generator}, seed {origin.seed}"


def table_rows(batch: BatchResult) -> Iterator[TableRow]:
    """Rows of the table: every policy, then its data sets."""
    for row in batch.rows:
        yield TableRow(row.policy, row.summary, row.speedup, "" if _is_sound(row) else "!")
        for part in row.tasks:
            yield TableRow(f"  {part.task}", part.summary, part.speedup)


def _is_sound(row: Row) -> bool:
    return row.steadiness.is_steady and row.summary.clamped_share == 0


def notes(batch: BatchResult) -> Iterator[str]:
    """What the reader must know about single rows."""
    over = [row for row in batch.rows if row.summary.k_per_step > batch.k_max]
    if over:
        shown = ", ".join(f"{row.policy} {row.summary.k_per_step:.0f}" for row in over)
        yield f"K beyond k_max, to which these do not keep (--cap-all clamps them): {shown}"
    yield from twins(batch)
    for row in batch.rows:
        rate = row.summary.unrevealed_rate
        if rate > 0:
            upper = row.upper_tokens_per_s
            bracket = f"; tok/s up to {number(upper, 0, separator=True)}" if upper else ""
            yield f"{row.policy}: {100 * rate:.2f} % of expanded nodes unrevealed{bracket}"
        if not row.steadiness.is_steady:
            yield f"{row.policy}: ! not steady, throughput drifts {row.steadiness.drift:+.1%}"
        if row.summary.clamped_share > 0:
            yield f"{row.policy}: ! clamped to k_max in {row.summary.clamped_share:.0%} of steps"
        if row.cost_tokens_per_s is not None:
            low, high = (number(rate, 0, separator=True) for rate in row.cost_tokens_per_s)
            yield f"{row.policy}: {low} to {high} tok/s under drawn cost constants"
    for flip in batch.order_flips:
        yield (
            f"! {flip.faster} over {flip.slower}: the order flips in {flip.share:.0%} of the drawn "
            "cost constants"
        )
    chosen = [
        f"{row.policy} w_topk {row.parameters['w_topk']}"
        for row in batch.rows
        if "w_topk" in row.parameters
    ]
    if chosen:
        yield "nodes admitted per layer: " + ", ".join(chosen)


def twins(batch: BatchResult) -> Iterator[str]:
    """Say which policies came out of calibration as the same policy."""
    seen: dict[str, str] = {}
    for row in batch.rows:
        if not row.parameters.get("taus"):
            continue
        # How depths and thresholds were found does not matter, only what they are and are of.
        is_normalized = row.parameters["threshold"] == "normalized"
        key = repr({**row.parameters, "gate_set": None, "threshold": is_normalized})
        if key in seen:
            yield f"{row.policy}: the same depths and thresholds as {seen[key]} on this recording"
        else:
            seen[key] = row.policy
