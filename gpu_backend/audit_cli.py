"""The command ``run_gpu audit``: did the target say what was served?"""

from __future__ import annotations

import os

import typer

from gpu_backend.exits import user_errors
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
        is_sound = _audit(given)
    if not is_sound:
        raise typer.Exit(1)


def _audit(given: GivenOptions) -> bool:
    """Serve and audit every policy, print the table; returns whether nothing is wrong."""
    from echo_policies.errors import InputError
    from gpu_backend.audit import MARGINS, audit_outputs
    from gpu_backend.audit_output import AuditedRun, print_audit
    from gpu_backend.progress import ProgressBars
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
    with ProgressBars() as bars:
        ready = prepare(config, located, progress=bars.update)
        target = ready.pair.target
        margin = MARGINS[target.dtype]
        total = sum(len(batch.policies) for batch in ready.batches)
        bars.update("runs", 0, total)
        for batch in ready.batches:
            for policy in batch.policies:
                engine = build_engine(ready.pair, policy, batch.settings)
                serve_all(engine, ready.workload.requests)
                report = audit_outputs(target, engine.finished, margin)
                runs.append(AuditedRun(policy.name, batch.size, report))
                bars.update("runs", len(runs), total)
    print_audit(runs, margin, config.dtype)
    return not any(run.report.violations for run in runs)
