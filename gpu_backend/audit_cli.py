"""The command ``run_gpu audit``: did the target say what was served?"""

from __future__ import annotations

import os

import typer

from gpu_backend.exits import first_interrupt_asks, run_status, user_errors
from gpu_backend.serve_options import GivenOptions, takes_run_options
from gpu_backend.serve_start import start


@takes_run_options
def audit(given: GivenOptions) -> None:
    """Serve greedily, then ask the plain model about every token that was emitted.

    Each must be its argmax, or a near-tie of the arithmetic in use; exits with 1 where one is not.
    """
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with user_errors("Nothing was audited yet."):
        status = _audit(given)
    if status:
        raise typer.Exit(status)


def _audit(given: GivenOptions) -> int:
    """Serve and audit every policy, print the table; returns the exit status."""
    from echo_policies.errors import InputError
    from gpu_backend.audit import MARGINS, audit_outputs
    from gpu_backend.audit_output import AuditedRun, print_audit
    from gpu_backend.models import load_model
    from gpu_backend.progress import ProgressBars
    from gpu_backend.run_loop import RunLoop
    from gpu_backend.serve_loop import serve_all
    from gpu_backend.serve_prepare import prepare
    from gpu_backend.serving import build_engine

    if given.sampling["temperature"]:
        raise InputError(
            "temperature: an audit must be of greedy outputs, which the plain model's argmax "
            f"decides; got {given.sampling['temperature']:g}. Leave --temperature out."
        )
    config, located = start(given)
    runs: list[AuditedRun] = []
    with ProgressBars() as bars, first_interrupt_asks("run") as should_stop:
        ready = prepare(config, located, progress=bars.update)
        # Loaded again, because what serves is prepared in place.
        plain = load_model(located[0].path, config.dtype, ready.device)
        margin = MARGINS[plain.dtype]
        loop = RunLoop.over(
            ready.batches, with_plain=True, progress=bars.update, should_stop=should_stop
        )
        for batch, policy in loop:
            engine = build_engine(ready.pair, policy, batch.settings)
            serve_all(engine, ready.workload.requests)
            report = audit_outputs(plain, ready.pair.vocab_size, engine.finished, margin)
            runs.append(AuditedRun(policy.name, batch.size, report))
    print_audit(runs, margin, config.dtype)
    return run_status(
        is_sound=not any(run.report.violations for run in runs),
        is_complete=len(runs) == len(loop.runs),
    )
