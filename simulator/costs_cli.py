"""``simulate costs``: step times of a target, errors against measured steps, and fits to them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from echo_policies.errors import InputError

if TYPE_CHECKING:
    from simulator.cost.parameters import CostParameters
    from simulator.cost.stepfile import MeasuredStep

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode=None,
    help="Step times by operator, the knee and k_max; validate and fit the cost model.",
)

StepFile = Annotated[Path, typer.Argument(help="CSV of measured steps; see docs/costs.md.")]
CostsOption = Annotated[
    Path | None, typer.Option("--costs", help="Constants of `simulate costs fit`.")
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
    constants: CostsOption = None,
    json: Annotated[Path | None, typer.Option(help="Write the table to this file.")] = None,
) -> None:
    """Print the time of verify forwards by operator, the knee and k_max."""
    if context.invoked_subcommand is not None:
        return
    if target is None:
        raise InputError("costs needs --target, such as --target llama-3.1-8b.")
    from simulator.cost.build import build_cost_model
    from simulator.cost.pairs import resolve_pair
    from simulator.costs_report import console, render_steps, step_table

    model = build_cost_model(
        resolve_pair(target, draft),
        hardware,
        tp,
        ep=ep,
        engine=engine,
        dtype=dtype,
        pure_roofline=pure_roofline,
        parameters=_constants(constants),
    )
    table = step_table(model, batch_size, context_tokens, *_range(tokens))
    for line in render_steps(table):
        console().print(line)
    _write_json(json, table.to_dict)


@app.command()
def validate(
    file: StepFile,
    costs: CostsOption = None,
    cross_validate: Annotated[
        bool,
        typer.Option(
            "--cross-validate", help="Also refit without each model and engine, and predict it."
        ),
    ] = False,
    json: Annotated[Path | None, typer.Option(help="Write the errors to this file.")] = None,
) -> None:
    """Compare the cost model with measured steps: errors over all, by model, engine and kind."""
    from simulator.cost.constants import shipped
    from simulator.costs_report import console, render_validation
    from simulator.costs_report import validate as compare

    steps = _steps(file)
    held_out = _cross_validated(steps) if cross_validate else None
    result = compare(str(file), steps, _constants(costs) or shipped(), held_out)
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
    typer.echo(f"Wrote {out}.")


def _provenance(file: Path, start: str, models: dict[str, Any], rows: int) -> dict[str, Any]:
    from hashlib import sha256

    from simulator.cost.fit import GROUP_ROWS, NOISE

    known: dict[str, Any] = {
        "file": file.name,
        "sha256": sha256(file.read_bytes()).hexdigest(),
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


def _constants(path: Path | None) -> CostParameters | None:
    from simulator.cost.constants import load

    return load(path).parameters if path is not None else None


def _start(start: str) -> CostParameters:
    from simulator.cost.constants import load, shipped
    from simulator.cost.parameters import NEUTRAL

    if start == "neutral":
        return NEUTRAL
    return shipped() if start == "shipped" else load(Path(start)).parameters


def _range(text: str) -> tuple[int, int]:
    first, _, last = text.partition("..")
    try:
        return int(first), int(last or first)
    except ValueError:
        raise InputError(
            f"--tokens must be one number or FIRST..LAST, such as 1..512; got {text!r}."
        ) from None


def _write_json(path: Path | None, content: Any) -> None:
    if path is not None:
        from json import dumps

        _write(path, dumps(content(), indent=2, allow_nan=False) + "\n")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise InputError(f"{path} must be a file that can be written: {error}.") from None
