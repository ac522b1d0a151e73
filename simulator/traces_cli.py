"""``simulate traces``: list, describe, check, convert, join and compare recordings."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from echo_policies.errors import InputError

SUFFIXES: Final = (".safetensors", ".pkl")

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="List, describe, check, convert, join and compare traces.",
)

Trace = Annotated[str, typer.Argument(help="Path of a trace, or the name of a bundled one.")]
JsonOption = Annotated[Path | None, typer.Option("--json", help="Write everything to this file.")]


@app.command("list")
def list_() -> None:
    """List the bundled traces."""
    from simulator.listings import print_traces

    print_traces()


@app.command()
def info(trace: Trace, json: JsonOption = None) -> None:
    """Describe a trace: provenance, models, data sets, acceptance, confidence, walks."""
    from simulator.card_listing import print_card
    from simulator.output import json_text
    from traces.card import describe
    from traces.library import open_trace
    from traces.terminal import check_writable, write_text

    check_writable([json] if json is not None else [])
    card = describe(open_trace(trace))
    print_card(card)
    if json is not None:
        write_text(json, json_text(card))


@app.command()
def validate(trace: Trace) -> None:
    """Check every invariant of the format; exit with 1 and every finding if one is broken."""
    from traces.library import resolve
    from traces.store import load
    from traces.validate import check

    path = resolve(trace)
    findings = check(load(path, validates=False))
    for finding in findings:
        typer.echo(finding)
    if findings:
        raise typer.Exit(1)
    typer.echo(f"{path.name}: every invariant holds.")


@app.command()
def convert(
    trace: Trace,
    out: Annotated[Path, typer.Argument(help="New file: .safetensors or .pkl.")],
) -> None:
    """Write a trace in the other format; the content digest stays the same."""
    from traces.library import open_trace
    from traces.store import save

    _check_trace_file(out)
    save(open_trace(trace), out)
    typer.echo(f"Wrote {out}.")


@app.command()
def merge(
    traces: Annotated[list[str], typer.Argument(help="Recordings of one pair, two or more.")],
    out: Annotated[Path, typer.Option(help="New file: .safetensors or .pkl.")],
    name: Annotated[
        str | None, typer.Option(help="Name of the result; default: the parts', else the file's.")
    ] = None,
) -> None:
    """Join recordings of one pair that were made in parts, in the order given."""
    from traces.library import open_trace
    from traces.merge import merge as join
    from traces.store import save

    _check_trace_file(out)
    parts = [open_trace(trace) for trace in traces]
    names = {part.header.name for part in parts}
    chosen = name or (names.pop() if len(names) == 1 else out.stem)
    files = [Path(trace).name for trace in traces]
    merged = join(parts, files if len(set(files)) == len(files) else traces, chosen)
    save(merged, out)
    typer.echo(
        f"Wrote {out}: {merged.num_requests} requests, {merged.num_positions} positions, "
        f"digest {merged.digest}."
    )


@app.command()
def compare(
    one: Trace,
    other: Trace,
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Policies to replay on both; default: seven of them."),
    ] = None,
    positions: Annotated[
        int, typer.Option(help="Most positions to replay, evenly spread; 0: all.", min=0)
    ] = 2000,
    batch_size: Annotated[int, typer.Option(help="Positions that share a budget.", min=1)] = 16,
    k_per_request: Annotated[
        int, typer.Option(help="Candidate nodes per position of that budget.", min=0)
    ] = 6,
    json: JsonOption = None,
) -> None:
    """Say where two recordings of the same prompts differ, and what it does to policies."""
    from simulator.comparison_listing import print_comparison
    from simulator.output import json_text, use_one_thread
    from traces.compare import compare as put_side_by_side
    from traces.library import open_trace
    from traces.policy_difference import Replaying
    from traces.terminal import check_writable, write_text

    use_one_thread()
    check_writable([json] if json is not None else [])
    comparison = put_side_by_side(
        open_trace(one),
        open_trace(other),
        labels=(one, other),
        policies=policy,
        replaying=Replaying(positions, batch_size, k_per_request),
    )
    print_comparison(comparison, (one, other))
    if json is not None:
        write_text(json, json_text(comparison))


def _check_trace_file(out: Path) -> None:
    from traces.terminal import check_writable

    if out.suffix.lower() not in SUFFIXES:
        raise InputError(f"A trace file must end in .safetensors or .pkl; got {out}.")
    check_writable([out])
