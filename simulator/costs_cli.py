"""``simulate costs``: step times of a target, errors against measured steps, and fits to them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_policies.errors import InputError
from simulator.arguments import first_to_last
from simulator.costs_policies_cli import policies
from traces.arguments import whole_numbers

if TYPE_CHECKING:
    from simulator.cost.constants import ConstantsFile
    from simulator.cost.parameters import CostParameters
    from simulator.cost.stepfile import MeasuredStep

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Step times by operator, the knee and k_max; validate and fit the cost model.",
)

app.command("policies")(policies)

StepFile = Annotated[Path, typer.Argument(help="CSV of measured steps; see docs/costs.md.")]
CostsOption = Annotated[
    str | None,
    typer.Option(
        "--costs",
        help="FILE.toml (constants), table:STEPS.csv, affine:STEPS.csv or aiconfigurator.",
    ),
]
ConstantsOption = Annotated[
    str | None, typer.Option("--costs", help="Constants of `simulate costs fit`.")
]


@app.callback(invoke_without_command=True)
def costs(
    context: typer.Context,
    target: Annotated[
        str | None, typer.Option(help="A target of the catalogue, or its HF config.json.")
    ] = None,
    draft: Annotated[
        str | None, typer.Option(help="The draft's config.json, for a target given by its own.")
    ] = None,
    tp: Annotated[int, typer.Option(help="Tensor-parallel degree: 1, 2, 4 or 8.")] = 1,
    ep: Annotated[int, typer.Option(help="Ranks that experts are spread over.")] = 1,
    hardware: Annotated[str, typer.Option(help="a100, h100, h200 or cpu.")] = "h100",
    engine: Annotated[
        str, typer.Option(help="sglang, vllm, trtllm, transformers or cpu.")
    ] = "sglang",
    dtype: Annotated[str, typer.Option(help="Weights: bf16, fp8 or fp8_block.")] = "bf16",
    batch_size: Annotated[int, typer.Option(help="Concurrent requests.")] = 8,
    context_tokens: Annotated[
        int, typer.Option("--context", help="Committed tokens per request.")
    ] = 1024,
    tokens: Annotated[
        str, typer.Option(help="Candidate tokens of the batch, FIRST..LAST or one number.")
    ] = "1..512",
    pure_roofline: Annotated[
        bool, typer.Option("--pure-roofline", help="No floors, no host terms.")
    ] = False,
    costs_text: CostsOption = None,
    levels: Annotated[int, typer.Option(help="Draft levels of the cycle by stage.")] = 5,
    width: Annotated[
        int, typer.Option(help="Nodes expanded per level and request in it; 1 is a chain.")
    ] = 8,
    accepted: Annotated[int, typer.Option(help="Draft tokens accepted per request in it.")] = 3,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
) -> None:
    """Print verify forwards by operator, the knee and k_max, and a cycle by stage."""
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise InputError("costs needs --target, such as --target llama-3.1-8b.")
    from simulator.cost.build import build_cost_model
    from simulator.cost.choice import apply_choice, constants_of, parse_choice
    from simulator.cost.pairs import resolve_pair
    from simulator.costs_cycle import CycleShape
    from simulator.costs_report import console, render_steps, step_table

    _check_writable(json)
    choice = parse_choice(costs_text)
    computed = build_cost_model(
        resolve_pair(target, draft),
        hardware,
        tp,
        ep=ep,
        engine=engine,
        dtype=dtype,
        pure_roofline=pure_roofline,
        parameters=constants_of(choice),
    )
    shape = CycleShape(levels, width, accepted)
    model = apply_choice(choice, computed)
    table = step_table(
        model, batch_size, context_tokens, *first_to_last("--tokens", tokens), shape=shape
    )
    for line in render_steps(table):
        console().print(line, soft_wrap=isinstance(line, str))
    _write_json(json, table.to_dict)


@app.command()
def validate(
    file: StepFile,
    costs: ConstantsOption = None,
    cross_validate: Annotated[
        bool,
        typer.Option(
            "--cross-validate", help="Also refit without each model and engine, and predict it."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the errors to this file.")] = None,
) -> None:
    """Compare the cost model with measured steps: errors over all, by model, engine and kind."""
    from simulator.costs_report import console, render_validation
    from simulator.costs_report import validate as compare

    _check_writable(json)
    content = _content(costs)
    steps = _steps(file)
    held_out = _cross_validated(steps) if cross_validate else None
    result = compare(str(file), steps, content.parameters, held_out)
    is_known = content.provenance.get("sha256") == _digest(file)
    if is_known:
        typer.echo(
            "The constants in use were fitted to this very file: errors of this model are in-sample"
            + ("." if cross_validate else "; --cross-validate adds held-out ones.")
        )
    for line in render_validation(result):
        console().print(line)
    _write_json(json, result.to_dict)


@app.command()
def fit(
    file: StepFile,
    out: Annotated[Path, typer.Option(help="Write the constants to this file (TOML).")],
    start: Annotated[
        str,
        typer.Option(
            help="Where the constants start and are drawn to: shipped, neutral, or a file of a fit."
        ),
    ] = "shipped",
    cross_validate: Annotated[
        bool,
        typer.Option("--cross-validate", help="Also fit without each model and engine (slow)."),
    ] = False,
) -> None:
    """Calibrate the cost model to measured steps, with error bars."""
    from simulator.cost.constants import ConstantsFile, render
    from simulator.cost.fit import fit_constants
    from simulator.cost.predict import without_flags
    from simulator.costs_report import console, render_constants, render_validation
    from simulator.costs_report import validate as compare

    _check_writable(out)
    steps = _steps(file)
    kept, origin = without_flags(steps), _start(start)
    found = fit_constants(kept, origin)
    held_out = _cross_validated(steps, origin) if cross_validate else None
    result = compare(str(file), steps, found.parameters, held_out)
    content = ConstantsFile(
        parameters=found.parameters,
        intervals=found.intervals,
        names=found.names,
        covariance=found.covariance,
        provenance=_provenance(file, start, result.models, len(kept)),
    )
    _write(out, render(content))
    console().print(render_constants(found.parameters, found.intervals))
    for line in render_validation(result):
        console().print(line)


@app.command()
def knees(
    target: Annotated[
        list[str] | None, typer.Option(help="A target of the catalogue; default: all.")
    ] = None,
    hardware: Annotated[str, typer.Option(help="a100, h100 or h200.")] = "h100",
    engine: Annotated[str, typer.Option(help="Whose CUDA graphs pad a forward.")] = "sglang",
    batch_size: Annotated[str, typer.Option(help="Concurrent requests: 8,64.")] = "8,64",
    context_tokens: Annotated[
        int, typer.Option("--context", help="Committed tokens per request.")
    ] = 1024,
    costs: ConstantsOption = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print it as Markdown.")] = False,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
) -> None:
    """Print where the forward of every target takes 1.25, 1.5 and 2 times a plain step."""
    from simulator import costs_knees
    from simulator.costs_report import console

    _check_writable(json)
    sizes = whole_numbers("--batch-size", batch_size)
    found = list(
        costs_knees.knees(
            target, hardware, sizes, context_tokens, engine=engine, parameters=_constants(costs)
        )
    )
    if markdown:
        typer.echo("\n".join(costs_knees.markdown(found)))
    else:
        console().print(costs_knees.render_knees(found))
    _write_json(json, lambda: {"knees": costs_knees.to_dict(found)})


def _provenance(file: Path, start: str, models: dict[str, Any], rows: int) -> dict[str, Any]:
    from simulator.cost.fit import GROUP_ROWS, NOISE

    known: dict[str, Any] = {
        "file": file.name,
        "sha256": _digest(file),
        "rows": rows,
        "start": start,
        "noise": NOISE,
        "group_rows": GROUP_ROWS,
    }
    for name, key in (("this model", "in_sample"), ("cross-validated", "cross_validated")):
        if name in models:
            overall = models[name].overall
            known[f"{key}_median"] = round(overall.median, 4)
            known[f"{key}_p90"] = round(overall.p90, 4)
    return known


def _digest(file: Path) -> str:
    from hashlib import sha256

    return sha256(file.read_bytes()).hexdigest()


def _content(text: str | None) -> ConstantsFile:
    """Return the constants in use, with what is known of them."""
    from simulator.cost.choice import parse_choice
    from simulator.cost.constants import load, shipped_file

    _constants(text)  # refuses what is no file of constants
    path = parse_choice(text).path
    return shipped_file() if path is None else load(path)


def _steps(file: Path) -> list[MeasuredStep]:
    from simulator.cost.host import ENGINES
    from simulator.cost.stepfile import read_steps

    return read_steps(file, ENGINES)


def _cross_validated(steps: list[MeasuredStep], start: CostParameters | None = None) -> list[float]:
    from simulator.cost.fit import cross_validate
    from simulator.cost.parameters import NEUTRAL
    from simulator.cost.predict import without_flags

    def progress(label: str, done: int, total: int) -> None:
        typer.echo(f"{label} ({done + 1} of {total})", err=True)

    return cross_validate(without_flags(steps), start or NEUTRAL, progress)


def _constants(text: str | None) -> CostParameters | None:
    from simulator.cost.choice import ROOFLINE, constants_of, parse_choice

    choice = parse_choice(text)
    if choice.kind != ROOFLINE:
        raise InputError(
            "This command is about the computed model: --costs takes a file of its constants, as "
            f"`simulate costs fit` writes; got {text!r}."
        )
    return constants_of(choice)


def _start(start: str) -> CostParameters:
    from simulator.cost.constants import load, shipped
    from simulator.cost.parameters import NEUTRAL

    if start == "neutral":
        return NEUTRAL
    return shipped() if start == "shipped" else load(Path(start)).parameters


def _check_writable(path: Path | None) -> None:
    from traces.terminal import check_writable

    check_writable([] if path is None else [path])


def _write_json(path: Path | None, content: Callable[[], dict[str, Any]]) -> None:
    if path is not None:
        from json import dumps

        _write(path, dumps(content(), indent=2, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    from traces.terminal import write_text

    write_text(path, text)
