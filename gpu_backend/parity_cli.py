"""The command ``run_gpu parity``: does replay take the decisions that the real engine takes?"""

from __future__ import annotations

import os
from typing import Annotated

import typer

from gpu_backend.exits import first_interrupt_asks, run_status, user_errors
from gpu_backend.serve_options import GivenOptions, takes_run_options
from gpu_backend.serve_start import start


@takes_run_options
def parity(
    given: GivenOptions,
    *,
    trace: Annotated[
        str | None,
        typer.Option(help="Compare with this recording (path or bundled name), tokens forced."),
    ] = None,
) -> None:
    """Serve with real models, replay what the policies saw, and compare every decision.

    Plans and accepted lengths must be equal in every step; exits with 1 and the first difference
    where they are not. With --trace the models that it was made of serve its requests, its tokens
    are committed, and every decision is compared with the replay of the trace.
    """
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with user_errors("Nothing was compared yet."):
        status = _compare(given) if trace is None else _compare_with(given, trace)
    if status:
        raise typer.Exit(status)


def _compare(given: GivenOptions) -> int:
    """Check every policy that drafts, print the table; returns the exit status."""
    from gpu_backend.parity import check_parity
    from gpu_backend.parity_output import print_parity
    from gpu_backend.progress import ProgressBars
    from gpu_backend.run_loop import RunLoop
    from gpu_backend.serve_prepare import prepare

    config, located = start(given)
    with ProgressBars() as bars, first_interrupt_asks("run") as should_stop:
        ready = prepare(config, located, progress=bars.update)
        loop = RunLoop.over(
            ready.batches, with_plain=False, progress=bars.update, should_stop=should_stop
        )
        reports = [
            (
                batch.settings,
                check_parity(ready.pair, policy, batch.settings, ready.workload.requests),
            )
            for batch, policy in loop
        ]
    print_parity(reports)
    return run_status(
        is_sound=all(report.first is None for _, report in reports),
        is_complete=len(reports) == len(loop.runs),
    )


def _compare_with(given: GivenOptions, name: str) -> int:
    """Check every policy against a recording, print the table; returns the exit status."""
    from gpu_backend.models_cli import locate_models
    from gpu_backend.parity_output import print_trace_parity
    from gpu_backend.progress import ProgressBars
    from gpu_backend.run_loop import RunLoop
    from gpu_backend.serve_setup import models_needed
    from gpu_backend.trace_parity import check_trace_parity
    from gpu_backend.trace_setup import prepare_trace, trace_config
    from traces.library import open_trace

    trace = open_trace(name)
    config = trace_config(given, trace)
    located = locate_models(*models_needed(config))
    with ProgressBars() as bars, first_interrupt_asks("run") as should_stop:
        ready = prepare_trace(config, trace, located)
        loop = RunLoop.over(
            ready.batches, with_plain=False, progress=bars.update, should_stop=should_stop
        )
        reports = [
            (
                batch.settings,
                check_trace_parity(
                    ready.pair, policy, batch.settings, ready.recording, ready.requests
                ),
            )
            for batch, policy in loop
        ]
    print_trace_parity(trace.header.name, len(ready.requests), reports)
    return run_status(
        is_sound=not any(report.faults for _, report in reports),
        is_complete=len(reports) == len(loop.runs),
    )
