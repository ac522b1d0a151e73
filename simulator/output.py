"""What the command line prints, and how it writes files."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from echo_policies.errors import InputError
from echo_policies.presets import PRESETS
from echo_policies.registry import available, parse
from simulator.calibration import Calibration
from simulator.results import BatchResult, Result, Row
from simulator.run import Progress as ProgressCallback
from traces.card import describe
from traces.library import available as bundled_traces
from traces.schema import Provenance, Trace
from traces.store import load, write_whole
from traces.table import TableRow, comparison_table, number

MIN_WIDTH = 160
"""Columns of a table that is not printed to a terminal, so that nothing is cut in a file."""


def console() -> Console:
    """A console as wide as the terminal, or wide enough for the tables elsewhere."""
    plain = Console(highlight=False)
    if plain.is_terminal:
        return plain
    return Console(highlight=False, width=max(MIN_WIDTH, plain.width))


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


def check_writable(paths: Sequence[Path]) -> None:
    """Refuse output paths before a long run, not after it.

    Raises:
        InputError: the folder is missing or not writable, or the path is a folder.
    """
    for path in paths:
        if not path.parent.is_dir():
            raise InputError(f"{path} cannot be written: create the folder {path.parent} first.")
        if path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
            raise InputError(f"{path} cannot be written: choose another path.")


def write_text(path: Path, text: str) -> None:
    """Write a file whole or not at all, and say so."""
    write_whole(path, text.encode())
    console().print(f"Wrote {path}", soft_wrap=True)


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
    return (
        f"up to {100 * rate:.2f} % of expanded nodes unrevealed ({policy} at batch {batch_size}); "
        "shown without children, the bracket is below each table"
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
        yield f"K beyond k_max, which fixed shapes ignore (--cap-all clamps them): {shown}"
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
            yield f"{row.policy}: {low} to {high} tok/s under drawn cost constants (95 %)"
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
        yield "on calibration requests: " + ", ".join(chosen)


def twins(batch: BatchResult) -> Iterator[str]:
    """Say which policies came out of calibration as the same policy."""
    seen: dict[str, str] = {}
    for row in batch.rows:
        if not row.parameters.get("taus"):
            continue
        key = repr({k: v for k, v in row.parameters.items() if k not in {"gate_set", "threshold"}})
        if row.parameters["threshold"] == "normalized":
            key += "normalized"
        if key in seen:
            yield f"{row.policy}: the same depths and thresholds as {seen[key]} on this recording"
        else:
            seen[key] = row.policy


def print_policies() -> None:
    """List every policy with what it is and what can be set."""
    table = Table(title="policies", title_justify="left", pad_edge=False)
    for name in ("name", "what it is", "parameters"):
        table.add_column(name)
    for name in available():
        what = (PRESETS[name].__doc__ or "").splitlines()[0] if name in PRESETS else "installed"
        values = parse(name).parameters()
        table.add_row(name, what, ", ".join(f"{key}={value}" for key, value in values.items()))
    console().print(table)


def print_traces() -> None:
    """List the bundled traces."""
    table = Table(title="bundled traces", title_justify="left", pad_edge=False)
    for name in ("name", "provenance", "target / draft", "requests", "positions", "costed as"):
        table.add_column(name)
    for name, path in bundled_traces().items():
        trace = load(path)
        header = trace.header
        table.add_row(
            name,
            provenance(header.provenance),
            f"{header.target.name} / {header.draft.name}",
            str(trace.num_requests),
            str(trace.num_positions),
            f"{header.costing.target}, tp {header.costing.tp}, {header.costing.hardware}",
        )
    console().print(table)


def print_card(trace: Trace) -> None:
    """Describe one trace."""
    card = describe(trace)
    out = console()
    out.print(f"{card.name}: {provenance(card.provenance)}", soft_wrap=True, markup=False)
    for model, role in ((card.target, "target"), (card.draft, "draft")):
        details = ", ".join(filter(None, (model.weights, model.dtype)))
        out.print(f"{role:7} {model.name} ({details})", soft_wrap=True, markup=False)
        if model.digest:
            out.print(f"        sha256 {model.digest}", soft_wrap=True)
    lines = [
        f"drafter {card.drafter}, temperature {card.temperature:g}",
        f"licence {card.licence or 'not stated'}",
        f"digest  {card.digest}",
        f"arrays  {card.array_bytes / 1e6:.1f} MB",
        *(f"source  {source}" for source in card.provenance.sources),
        *(f"note    {note}" for note in card.provenance.notes),
    ]
    for line in lines:
        out.print(line, soft_wrap=True, markup=False)
    out.print(_acceptance_table(trace))
    for walk in card.walks:
        out.print(
            f"chain of {walk.levels}: acceptance length {walk.acceptance_length:.3f} over "
            f"{walk.steps} steps, lag-1 autocorrelation {walk.autocorrelation:.2f}"
        )
    out.print(
        f"target token among the draft's top 10 at depth 1: {card.coverage:.3f}; "
        f"calibration error of the top-1 probability: {card.calibration_error:.3f}",
        soft_wrap=True,
    )


def _acceptance_table(trace: Trace) -> Table:
    card = describe(trace)
    table = Table(title="greedy chain accepted up to level", title_justify="left", pad_edge=False)
    levels = min(8, trace.header.levels)
    for name in ("data set", "calibration", "evaluation", *map(str, range(1, levels + 1))):
        table.add_column(name, justify="left" if name == "data set" else "right")
    rows = {"all": card.acceptance, **card.acceptance_by_task}
    for task, accepted in rows.items():
        counts = [
            f"{sum(g.requests for g in groups)} ({sum(g.positions for g in groups)})"
            for split in ("calibration", "evaluation")
            for groups in [[g for g in card.groups if g.split == split and task in {"all", g.task}]]
        ]
        table.add_row(task, *counts, *(number(share, 3) for share in accepted.by_level[:levels]))
    return table


def print_calibration(fitted: Calibration) -> None:
    """Print AUC per depth and what every policy was fitted to."""
    out = console()
    out.print(f"trace {fitted.trace}: {fitted.requests} calibration requests", soft_wrap=True)
    table = Table(title="confidence against acceptance", title_justify="left", pad_edge=False)
    for name in ("depth", "AUC [95 %]", "accepted", "rejected", "tau (Youden)"):
        table.add_column(name, justify="right")
    for report in fitted.depths:
        table.add_row(
            str(report.depth),
            f"{number(report.auc, 3)} [{number(report.auc_low, 3)} {number(report.auc_high, 3)}]",
            str(report.accepted),
            str(report.rejected),
            number(report.tau, 4),
        )
    out.print(table)
    for entry in fitted.policies:
        taus = ", ".join(f"{depth}: {tau:.4f}" for depth, tau in entry.gate.get("taus") or ())
        width = entry.scheduler.get("w_topk")
        out.print(
            f"{entry.policy} at batch {entry.batch_size} (k_max {entry.k_max}): "
            f"tau by depth {{{taus}}}" + (f", w_topk {width}" if width is not None else ""),
            soft_wrap=True,
            markup=False,
        )
