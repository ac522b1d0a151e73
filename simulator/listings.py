"""What the command line prints of policies, traces and calibrations."""

from __future__ import annotations

from collections.abc import Mapping

from rich.table import Table

from echo_policies.presets import PRESETS, WRAPPERS
from echo_policies.registry import available, parse
from echo_policies.schedulers.none import NoDraft
from simulator.output import provenance
from traces.calibration_file import Calibration
from traces.library import available as bundled_traces
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
        table.add_row(name, what, _parameters(values))
    for name, wrap in WRAPPERS.items():
        what = (wrap.__doc__ or "").splitlines()[0]
        values = wrap(NoDraft()).model_dump(exclude={"inner"})
        table.add_row(f"NAME+{name}", what, _parameters(values))
    console().print(table)


def _parameters(values: Mapping[str, object]) -> str:
    return ", ".join(f"{key}={value}" for key, value in values.items())


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
