"""``run_gpu`` without a subcommand, or ``run_gpu compare``: compare policies on real models."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer

from gpu_backend.exits import INTERRUPTED, first_interrupt_asks, user_errors
from gpu_backend.serve_options import GivenOptions, takes_run_options
from gpu_backend.serve_start import start
from traces.version import package_version

JsonOption = Annotated[Path | None, typer.Option(help="Write everything to this file.")]
WriteCostsOption = Annotated[
    Path | None,
    typer.Option(help="Write timed forwards to this file, for `simulate --costs table:FILE`."),
]


@takes_run_options
def serve(
    given: GivenOptions,
    *,
    context: typer.Context,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Print the outputs of the last policy.")
    ] = False,
    json: JsonOption = None,
    write_costs: WriteCostsOption = None,
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    """Serve prompts with real models; plain decoding is always the first row.

    `run_gpu --policy echo` alone runs: it fetches a small model and serves bundled prompts.
    """
    if version:
        typer.echo(package_version())
        raise typer.Exit
    if context.invoked_subcommand is not None:
        with user_errors(""):
            given.require_none(context.invoked_subcommand)
        return
    run_comparison(given, json, write_costs, shows_text=show_text)


@takes_run_options
def compare(
    given: GivenOptions,
    *,
    show_text: Annotated[
        bool, typer.Option("--show-text", help="Print the outputs of the last policy.")
    ] = False,
    json: JsonOption = None,
    write_costs: WriteCostsOption = None,
) -> None:
    """The table of `simulate`, measured on real models: one per batch size, plain decoding first.

    The same as `run_gpu` without a command.
    """
    run_comparison(given, json, write_costs, shows_text=show_text)


def run_comparison(
    given: GivenOptions, json: Path | None, costs: Path | None, *, shows_text: bool
) -> None:
    """Serve, print and write; ends the program with an error's or an interrupt's status."""
    # transformers' own bars for reading weights would run into ours; read once, at import.
    os.environ.setdefault("TQDM_DISABLE", "1")
    with user_errors("Nothing was measured yet."):
        is_complete = _compare(given, json, costs, shows_text=shows_text)
    if not is_complete:
        raise typer.Exit(INTERRUPTED)


def _compare(
    given: GivenOptions, json: Path | None, costs: Path | None, *, shows_text: bool
) -> bool:
    """Run, print, write; returns whether every request was served."""
    from gpu_backend.progress import ProgressBars
    from gpu_backend.serve_output import print_result
    from gpu_backend.serve_prepare import prepare, written_costs
    from gpu_backend.serve_run import serve_policies
    from traces.terminal import check_writable, write_text

    check_writable([path for path in (json, costs) if path is not None])
    config, located = start(given)
    with ProgressBars() as bars:
        ready = prepare(config, located, progress=bars.update, writes_costs=costs is not None)
        if costs is not None:
            write_text(costs, written_costs(config, ready))
        with first_interrupt_asks() as should_stop:
            result = serve_policies(config, ready, progress=bars.update, should_stop=should_stop)
    print_result(result, shows_text=shows_text)
    if json is not None:
        write_text(json, result.to_json())
    return result.is_complete
