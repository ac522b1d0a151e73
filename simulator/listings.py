"""What the command line prints of policies, traces and calibrations."""

from __future__ import annotations

from rich.table import Table

from echo_policies.presets import PRESETS
from echo_policies.registry import available, parse
from simulator.output import provenance
from traces.calibration_file import Calibration
from traces.card import TraceCard, describe
from traces.library import available as bundled_traces
from traces.schema import Trace
from traces.store import load
from traces.table import number
from traces.terminal import console


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
    out.print(_acceptance_table(card))
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


def _acceptance_table(card: TraceCard) -> Table:
    table = Table(title="greedy chain accepted up to level", title_justify="left", pad_edge=False)
    levels = min(8, len(card.acceptance.by_level))
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
