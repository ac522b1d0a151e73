"""The ``simulate`` command: parse, call, render. Nothing heavy is imported before it is needed."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from echo_policies.errors import EchoError
from simulator.costs_cli import app as costs_app
from simulator.traces_cli import app as traces_app
from traces.arguments import whole_numbers

INTERRUPTED: Final = 130
"""Exit status after Ctrl-C, as shells give it."""

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="Replay speculative-decoding policies on recordings, in a simulated serving engine.",
)
app.add_typer(traces_app, name="traces")
app.add_typer(costs_app, name="costs")

PolicyOption = Annotated[
    list[str] | None,
    typer.Option(
        "--policy",
        "-p",
        help="NAME[:field=value,...] or FILE.py:CLASS; repeat it, or separate by commas.",
    ),
]
TraceOption = Annotated[str | None, typer.Option(help="Path or bundled name of a trace.")]


@app.callback(invoke_without_command=True)
def simulate(
    context: typer.Context,
    policy: PolicyOption = None,
    trace: TraceOption = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Concurrent requests, comma-separated: 1,8,32.")
    ] = None,
    task: Annotated[str | None, typer.Option(help="Only requests of this data set.")] = None,
    target: Annotated[
        str | None, typer.Option(help="Cost as this target; 'recorded' is the recorded pair.")
    ] = None,
    hardware: Annotated[str | None, typer.Option(help="a100, h100, h200 or cpu.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree: 1, 2, 4 or 8.")] = None,
    engine: Annotated[str | None, typer.Option(help="sglang (default), vllm, trtllm, ...")] = None,
    dtype: Annotated[str | None, typer.Option(help="bf16 (default), fp8 or fp8_block.")] = None,
    costs: Annotated[
        str | None,
        typer.Option(help="FILE.toml, table:STEPS.csv, affine:STEPS.csv or aiconfigurator."),
    ] = None,
    context_tokens: Annotated[
        int | None, typer.Option("--context", help="Tokens of context; default: as recorded.")
    ] = None,
    k_max: Annotated[
        int | None, typer.Option(help="Candidate nodes per batch step; default: knee rule.")
    ] = None,
    k_max_factor: Annotated[
        float | None, typer.Option(help="Knee rule: t(k_max + B) <= factor * t(B) [1.25].")
    ] = None,
    cap_all: Annotated[
        bool, typer.Option("--cap-all", help="Clamp every policy to k_max.")
    ] = False,
    mode: Annotated[
        str | None, typer.Option(help="staged saves draft layers at checks; masked does not.")
    ] = None,
    arrivals: Annotated[str | None, typer.Option(help="closed (default) or poisson.")] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals per second (poisson).")] = None,
    requests: Annotated[
        int | None, typer.Option(help="Requests to finish in the measured part.")
    ] = None,
    unrevealed: Annotated[
        str | None, typer.Option(help="lower, upper, or both (default): unknown children.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="The draft's config.json, beside a --target of that kind.")
    ] = None,
    ep: Annotated[int | None, typer.Option(help="Ranks that experts are spread over [1].")] = None,
    verify: Annotated[
        str | None, typer.Option(help="ragged (default) or padded to the widest tree.")
    ] = None,
    pure_roofline: Annotated[
        bool, typer.Option("--pure-roofline", help="Textbook roofline: no floors, no host terms.")
    ] = False,
    check_ms: Annotated[
        float | None, typer.Option(help="Milliseconds per gate check [0.15].")
    ] = None,
    cost_interval: Annotated[
        int | None,
        typer.Option(help="Run again with this many draws of the costs' constants, such as 20."),
    ] = None,
    calibration: Annotated[
        Path | None,
        typer.Option(
            help="Calibration file of `simulate calibrate`, or the name of a bundled trace."
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option(help="Processes; batch sizes run beside each other [1].")
    ] = None,
    by_task: Annotated[bool, typer.Option("--by-task", help="A row per data set.")] = False,
    seed: Annotated[int, typer.Option(help="Seed of request order and intervals.")] = 0,
    json: Annotated[Path | None, typer.Option(help="Write everything to this file.")] = None,
    csv: Annotated[Path | None, typer.Option(help="Write one line per row to this file.")] = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Compare policies; plain decoding is always the first row."""
    if context.invoked_subcommand is not None:
        return
    if version:
        from importlib.metadata import version as installed

        typer.echo(f"echo-spec {installed('echo-spec')}")
        return
    from traces.terminal import check_writable

    check_writable([path for path in (json, csv) if path is not None])
    options: dict[str, Any] = {
        "trace": trace,
        "batch_sizes": whole_numbers("--batch-size", batch_size),
        "task": task,
        "target": target,
        "hardware": hardware,
        "tp": tp,
        "draft": draft,
        "ep": ep,
        "verify": verify,
        "engine": engine,
        "dtype": dtype,
        "costs": costs,
        "context": context_tokens,
        "k_max": k_max,
        "k_max_factor": k_max_factor,
        "cap_all": cap_all,
        "mode": mode,
        "arrivals": arrivals,
        "rate": rate,
        "requests": requests,
        "unrevealed": unrevealed,
        "pure_roofline": pure_roofline,
        "check_ms": check_ms,
        "cost_interval": cost_interval,
        "calibration": calibration,
        "jobs": jobs,
        "by_task": by_task,
        "seed": seed,
    }
    _compare(policy or ["echo"], options, json, csv)


def _compare(
    policies: Sequence[str], options: dict[str, Any], json: Path | None, csv: Path | None
) -> None:
    from simulator.output import print_result, progress_bar, use_one_thread
    from simulator.run import simulate as run
    from traces.terminal import write_text

    use_one_thread()
    try:
        with progress_bar() as progress:
            result = run(list(policies), progress=progress, **options)
    except KeyboardInterrupt:
        typer.echo("Interrupted; nothing was written.", err=True)
        raise typer.Exit(INTERRUPTED) from None
    print_result(result)
    if json is not None:
        write_text(json, result.to_json())
    if csv is not None:
        write_text(csv, result.to_csv())


@app.command()
def policies() -> None:
    """List policies: presets and installed ones, with their hyperparameters."""
    from simulator.listings import print_policies

    print_policies()


@app.command()
def calibrate(
    policy: PolicyOption = None,
    trace: TraceOption = None,
    batch_size: Annotated[
        str | None, typer.Option(help="Batch sizes to choose w_topk for.")
    ] = None,
    target: Annotated[str | None, typer.Option(help="Cost as this target.")] = None,
    hardware: Annotated[str | None, typer.Option(help="h100 or h200.")] = None,
    tp: Annotated[int | None, typer.Option(help="Tensor-parallel degree.")] = None,
    k_max: Annotated[int | None, typer.Option(help="Candidate nodes per batch step.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of intervals and request order.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the calibration to this file.")] = None,
) -> None:
    """Fit gates on the calibration requests: AUC per depth, gated depths, thresholds."""
    from simulator.fitting import calibrate as fit
    from simulator.listings import print_calibration
    from simulator.output import use_one_thread
    from traces.terminal import check_writable, write_text

    use_one_thread()
    check_writable([out] if out is not None else [])
    fitted = fit(
        policy or ["echo", "dense", "fixed"],
        trace=trace,
        batch_sizes=whole_numbers("--batch-size", batch_size),
        target=target,
        hardware=hardware,
        tp=tp,
        k_max=k_max,
        seed=seed,
    )
    print_calibration(fitted)
    if out is not None:
        write_text(out, fitted.to_json())


@app.command("check-policy")
def check_policy(
    policy: Annotated[str, typer.Argument(help="NAME[:field=value,...] or FILE.py:CLASS.")],
    examples: Annotated[int, typer.Option(help="Random situations per rule.", min=1)] = 30,
) -> None:
    """Run the contract of policies against one and print a minimal counterexample."""
    from echo_policies.registry import parse
    from echo_policies.testing import run_checks
    from simulator.check_policy import render
    from traces.terminal import console

    results = run_checks(parse(policy), max_examples=examples)
    console().print(render(results))
    if any(result.status == "failed" for result in results):
        raise typer.Exit(1)


def main() -> None:
    """Run the command; one sentence and status 2 for an error of the user's."""
    try:
        app()
    except EchoError as error:
        typer.echo(f"Error: {error}", err=True)
        sys.exit(2)


if __name__ == "__main__":
    main()
