"""What ``run_gpu audit`` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from gpu_backend.audit import AuditReport, Choice, Margin
from gpu_backend.parity_output import plain_table
from traces.terminal import console

COLUMNS: Final = (
    "policy",
    "batch",
    "requests",
    "tokens",
    "near-ties",
    "largest, logits",
    "violations",
)


@dataclass(frozen=True, slots=True)
class AuditedRun:
    """One policy at one batch size."""

    policy: str
    batch_size: int
    report: AuditReport


def print_audit(runs: Sequence[AuditedRun], margin: Margin, dtype: str) -> None:
    """Print a line per run, and the first violation of each that has one."""
    out = console()
    out.print(margin_line(margin, dtype), soft_wrap=True, markup=False)
    out.print()
    table = plain_table(COLUMNS)
    for run in runs:
        report = run.report
        table.add_row(
            run.policy,
            str(run.batch_size),
            f"{report.requests:,}",
            f"{report.tokens:,}",
            f"{len(report.near_ties):,}",
            f"{report.largest_gap:.2g}",
            f"{len(report.violations):,}",
        )
    out.print(table)
    for run in runs:
        if run.report.violations:
            said = violation_line(run.report.violations[0])
            out.print(f"{run.policy}, batch {run.batch_size}: VIOLATION, {said}", soft_wrap=True)
    if not any(run.report.violations for run in runs):
        out.print("Every token is the plain model's argmax or a near-tie.")


def margin_line(margin: Margin, dtype: str) -> str:
    """What counts as a near-tie."""
    return (
        f"near-tie  a token at most {margin.relative:.2g} of the best logit's magnitude, or "
        f"{margin.absolute:g} logits, below it ({dtype})"
    )


def violation_line(choice: Choice) -> str:
    """A token that the model did not say."""
    return (
        f"request {choice.request} after {choice.place} output tokens: token {choice.token} lies "
        f"{choice.gap:.4g} logits below token {choice.best_token} ({choice.best:.4g})."
    )
