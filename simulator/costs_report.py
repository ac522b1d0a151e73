"""What `simulate costs` computes and prints: step times by operator, knees, and error tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, TypeVar

from rich.console import Console
from rich.table import Table

from echo_policies.errors import InputError
from simulator.cost.accuracy import Accuracy, Errors, accuracy, affine_in_sample
from simulator.cost.parameters import CONSTANTS, PUBLISHED, CostParameters
from simulator.cost.predict import predict_all, without_flags
from simulator.cost.protocol import StepCosts, marginal_verify_s
from simulator.cost.stepfile import MeasuredStep
from simulator.costs_cycle import CycleShape, CycleTable, cycle_table

KNEES: Final = (1.25, 1.5, 2.0)
WIDTH: Final = 150
NOTHING_S: Final = 1e-9
"""A column that is below this everywhere is left out."""
MARGINAL_SPAN: Final = 64
"""Tokens that the marginal cost is averaged over, so that graph buckets do not show."""


def console() -> Console:
    """A console that is wide enough for the tables when it is no terminal."""
    plain = Console(highlight=False)
    return plain if plain.is_terminal else Console(highlight=False, width=max(WIDTH, plain.width))


@dataclass(frozen=True, slots=True)
class StepTable:
    """Times of verify forwards of one batch, by candidate tokens."""

    label: str
    batch_size: int
    context_tokens: int
    rows: tuple[dict[str, float | None], ...]
    """Seconds by operator; ``tokens`` K and ``rows`` K + B beside them."""
    cycle: CycleTable
    knees: dict[str, int | None]
    """K at which the kernels take 1.25, 1.5 and 2 times a plain step; None where a table ends."""
    k_max: int | None
    weight_bytes: float
    kv_bytes: float
    costs: dict[str, object]
    """The cost model, with every constant."""

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        names = ("label", "batch_size", "context_tokens", "knees", "k_max")
        fields: dict[str, Any] = {name: getattr(self, name) for name in names}
        return fields | {
            "rows": list(self.rows),
            "cycle": self.cycle.to_dict(),
            "costs": self.costs,
            "weight_bytes_per_gpu": self.weight_bytes,
            "kv_bytes_per_gpu": self.kv_bytes,
        }


def step_table(
    model: StepCosts,
    batch_size: int,
    context_tokens: int,
    first: int,
    last: int,
    *,
    shape: CycleShape | None = None,
) -> StepTable:
    """Cost verify forwards of 0 and of ``first`` to ``last`` candidate tokens (powers of two).

    Raises:
        InputError: an empty batch or range, a model that does not fit into memory, or a step that
            a table of measured steps does not cover.
    """
    if batch_size < 1 or context_tokens < 0 or not 0 <= first <= last:
        raise InputError(
            "A step table needs batch-size >= 1, context >= 0 and tokens FIRST..LAST with "
            f"0 <= FIRST <= LAST; got {batch_size}, {context_tokens} and {first}..{last}."
        )
    need = model.fits(batch_size, context_tokens)
    counts = _tokens(first, last)
    rows = tuple(_row(model, tokens, batch_size, context_tokens) for tokens in counts)
    knees = {
        f"{factor:g}": _known(partial(model.knee_k_max, batch_size, context_tokens, factor))
        for factor in KNEES
    }
    return StepTable(
        label=model.label,
        batch_size=batch_size,
        context_tokens=context_tokens,
        rows=rows,
        cycle=cycle_table(model, shape or CycleShape(), counts, batch_size, context_tokens),
        knees=knees,
        k_max=knees["1.25"],
        weight_bytes=need.weight_bytes,
        kv_bytes=need.kv_bytes,
        costs=model.describe(),
    )


def _row(model: StepCosts, tokens: int, batch_size: int, context: int) -> dict[str, float | None]:
    rows, kv_tokens = tokens + batch_size, batch_size * context
    parts = model.verify_parts(rows, batch_size, kv_tokens)
    host_s = model.host_s(0)
    price = partial(marginal_verify_s, model, rows, batch_size, kv_tokens, MARGINAL_SPAN)
    total_s = sum(parts.values()) + host_s
    counts = {"tokens": float(tokens), "rows": float(rows)}
    return {
        **counts,
        **parts,
        "host": host_s,
        "total": total_s,
        "marginal_per_token": _known(price),
    }


T = TypeVar("T")


def _known(ask: Callable[[], T]) -> T | None:
    """Return the answer, or None beyond the end of a table, which the output then shows."""
    try:
        return ask()
    except InputError:
        return None


def _tokens(first: int, last: int) -> list[int]:
    powers = {2**power for power in range(max(1, last).bit_length() + 1)}
    return sorted({0, first, last} | {power for power in powers if first <= power <= last})


def render_steps(table: StepTable) -> Iterator[str | Table]:
    """Yield what `simulate costs` prints."""
    yield f"{table.label}; batch {table.batch_size}, context {table.context_tokens}"
    yield (
        f"per GPU: weights {table.weight_bytes / 1e9:.1f} GB, KV cache "
        f"{table.kv_bytes / 1e9:.1f} GB"
    )
    hidden = {"tokens", "rows", "marginal_per_token"}
    parts = [name for name in table.rows[0] if name not in hidden]
    shown = [name for name in parts if any((row[name] or 0.0) > NOTHING_S for row in table.rows)]
    grid = Table("K", "R", *(f"{name} ms" for name in shown), "us/token", box=None)
    for column in grid.columns:
        column.justify = "right"
    for row in table.rows:
        cells = [f"{row['tokens']:.0f}", f"{row['rows']:.0f}"]
        cells += [f"{(row[name] or 0.0) * 1e3:.3f}" for name in shown]
        price = row["marginal_per_token"]
        grid.add_row(*cells, "-" if price is None else f"{price * 1e6:.1f}")
    yield grid
    knees = ", ".join(
        f"{factor}x " + ("beyond what was measured" if tokens is None else f"at K = {tokens}")
        for factor, tokens in table.knees.items()
    )
    k_max = "" if table.k_max is None else f"; k_max {table.k_max} (knee rule, 1.25x)"
    yield f"knee of the forward: {knees}{k_max}"
    yield f"us/token: marginal cost, averaged over the next {MARGINAL_SPAN} tokens"
    yield f"\n{table.cycle.title}"
    yield table.cycle.render()


@dataclass(frozen=True, slots=True)
class Validation:
    """Errors of the cost model on a file, with simpler models beside it."""

    file: str
    left_out: int
    """Flagged rows."""
    models: dict[str, Accuracy]
    """``fitted`` first: the constants in use; then what it is compared with."""

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON: the model's errors on top, the others below ``baselines``."""
        fitted, *others = self.models
        return {
            "file": self.file,
            "flagged_rows_left_out": self.left_out,
            **self.models[fitted].to_dict(),
            "baselines": {name: self.models[name].to_dict() for name in others},
        }


def validate(
    file: str,
    steps: Sequence[MeasuredStep],
    parameters: CostParameters,
    cross_validated_ms: Sequence[float] | None = None,
) -> Validation:
    """Compare the cost model and simpler ones with measured steps; flagged rows are left out."""
    kept = without_flags(steps)
    if not kept:
        raise InputError(f"{file} must hold a row without a flag; all are flagged.")
    models = {"this model": accuracy(kept, predict_all(kept, parameters))}
    if cross_validated_ms is not None:
        models["cross-validated"] = accuracy(kept, cross_validated_ms)
    models["published constants"] = accuracy(kept, predict_all(kept, PUBLISHED))
    models["pure roofline"] = accuracy(kept, predict_all(kept, pure_roofline=True))
    line = affine_in_sample(kept)
    if line is not None:
        models["affine per machine, in-sample"] = accuracy(*line)
    return Validation(file, len(steps) - len(kept), models)


def render_validation(result: Validation) -> Iterator[str | Table]:
    """Yield what `simulate costs validate` prints."""
    left = f"; {result.left_out} flagged rows left out" if result.left_out else ""
    yield f"{result.file}: errors of the step time, |predicted / measured - 1|{left}"
    grid = _error_grid()
    for name, found in result.models.items():
        _add(grid, name, found.overall)
    fitted = result.models["this model"]
    for title, split in _splits(fitted):
        grid.add_section()
        for name, errors in split.items():
            _add(grid, f"{title} {name}", errors)
    yield grid
    worst = Table("worst rows of this model", "line", "measured", "predicted", "error", box=None)
    for row in fitted.worst:
        times = f"{row.measured_ms:.2f} ms", f"{row.predicted_ms:.2f} ms"
        worst.add_row(row.row, str(row.line), *times, f"{row.error:+.1%}")
    yield worst


def _splits(found: Accuracy) -> Iterator[tuple[str, Mapping[str, Errors]]]:
    yield "model", found.by_model
    yield "engine", found.by_engine
    yield "kind", found.by_kind


def _error_grid() -> Table:
    grid = Table("", "rows", "median", "p90", "max", "bias", box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    return grid


def _add(grid: Table, name: str, errors: Errors) -> None:
    figures = (f"{value:.1%}" for value in (errors.median, errors.p90, errors.max))
    grid.add_row(name, str(errors.rows), *figures, f"{errors.bias:+.1%}")


def render_constants(
    parameters: CostParameters, intervals: Mapping[str, tuple[float, float]]
) -> Table:
    """Return a table of the fitted constants with their error bars."""
    grid = Table("constant", "unit", "value", "95 % interval", "meaning", box=None)
    for name, (low, high) in intervals.items():
        constant = CONSTANTS[name]
        value = getattr(parameters, name)
        interval = f"[{low:.3g}, {high:.3g}]"
        grid.add_row(name, constant["unit"], f"{value:.4g}", interval, constant["meaning"])
    return grid
