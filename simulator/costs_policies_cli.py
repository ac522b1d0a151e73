"""``simulate costs policies``: operations and time of the policies' own code."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from traces.arguments import whole_numbers


def policies(
    policy: Annotated[
        list[str] | None,
        typer.Option("--policy", "-p", help="Specifications, as `simulate` takes them."),
    ] = None,
    batch_size: Annotated[str, typer.Option(help="Requests per step: 1,8,64.")] = "1,8,64",
    trace: Annotated[str | None, typer.Option(help="Path or bundled name of a trace.")] = None,
    target: Annotated[str | None, typer.Option(help="Cost as this target (sets k_max).")] = None,
    steps: Annotated[int, typer.Option(help="Recorded steps per policy and batch size.")] = 24,
    repeats: Annotated[int, typer.Option(help="Times that all of them are run.")] = 7,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda; default: cuda where there is one.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of the positions that are drawn.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the figures to this file.")] = None,
) -> None:
    """Time the decision code of policies on this machine, and count its operations."""
    from simulator.output import use_one_thread
    from simulator.policy_times import measure_policies, render
    from traces.terminal import check_writable, console, write_text

    use_one_thread()
    check_writable([] if out is None else [out])
    found = measure_policies(
        policy or ["echo", "chain", "eagle3"],
        batch_sizes=whole_numbers("--batch-size", batch_size),
        steps=steps,
        repeats=repeats,
        device=device,
        trace=trace,
        target=target,
        seed=seed,
    )
    for line in render(found):
        console().print(line, soft_wrap=isinstance(line, str))
    if out is not None:
        write_text(out, found.to_toml())
