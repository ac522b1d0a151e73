"""Where a forward begins to cost more, for every target: the table of ``simulate costs knees``."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from rich.table import Table

from echo_policies.errors import InputError
from simulator.cost.build import build_cost_model
from simulator.cost.catalogue import PAIRS
from simulator.cost.memory import valid_degrees
from simulator.cost.parameters import PUBLISHED, CostParameters
from simulator.cost.step import CostModel

FACTORS: Final = (1.25, 1.5, 2.0)


@dataclass(frozen=True, slots=True)
class Knee:
    """One target on one machine at one batch size; R = K + B at each of `FACTORS`."""

    target: str
    tp: int
    batch_size: int
    published: tuple[int, ...]
    """With the published constants and no padding."""
    smooth: tuple[int, ...]
    """With the constants in use and no padding."""
    padded: tuple[int, ...]
    """With the constants in use and the engine's CUDA graphs."""
    k_max: int
    """The default budget: the padded knee at 1.25, minus B."""


def knees(
    targets: Iterable[str] | None,
    hardware: str,
    batch_sizes: Sequence[int],
    context_tokens: int,
    *,
    engine: str = "sglang",
    parameters: CostParameters | None = None,
) -> Iterator[Knee]:
    """Yield the knees of targets at every tensor-parallel degree and batch that fits the memory.

    Args:
        targets: names of the catalogue; all by default.
        hardware: machine.
        batch_sizes: requests.
        context_tokens: committed tokens per request.
        engine: whose CUDA graphs pad a forward.
        parameters: constants in use; the shipped ones by default.

    Raises:
        UnknownNameError: an unknown target, machine or engine.
        InputError: an empty batch, or a negative context.
    """
    if not batch_sizes or min(batch_sizes) < 1 or context_tokens < 0:
        raise InputError(
            f"Knees need batch sizes >= 1 and context >= 0; got {list(batch_sizes)} and "
            f"{context_tokens}."
        )

    def built(target: str, tp: int, constants: CostParameters | None, *, pads: bool) -> CostModel:
        return build_cost_model(
            target, hardware, tp, engine=engine, parameters=constants, pads_to_graphs=pads
        )

    for target in targets or PAIRS:
        pair = built(target, 1, parameters, pads=True).pair
        for tp in valid_degrees(pair.target):
            padded = built(target, tp, parameters, pads=True)
            smooth = built(target, tp, parameters, pads=False)
            published = built(target, tp, PUBLISHED, pads=False)
            for batch in batch_sizes:
                if not _fits(padded, batch, context_tokens):
                    continue
                last, middle, first = (
                    _rows(m, batch, context_tokens) for m in (padded, smooth, published)
                )
                yield Knee(target, tp, batch, first, middle, last, last[0] - batch)


def _fits(model: CostModel, batch_size: int, context_tokens: int) -> bool:
    try:
        model.fits(batch_size, context_tokens)
    except InputError:
        return False
    return True


def _rows(model: CostModel, batch_size: int, context_tokens: int) -> tuple[int, ...]:
    return tuple(batch_size + model.knee_k_max(batch_size, context_tokens, f) for f in FACTORS)


def render_knees(found: Iterable[Knee]) -> Table:
    """Return what is printed."""
    names = ("target", "tp", "B", "published, no padding", "here, no padding", "here, graphs")
    grid = Table(*names, "k_max", box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    for knee in found:
        kinds = (knee.published, knee.smooth, knee.padded)
        cells = ("/".join(map(str, rows)) for rows in kinds)
        grid.add_row(knee.target, str(knee.tp), str(knee.batch_size), *cells, str(knee.k_max))
    return grid


def markdown(found: Iterable[Knee]) -> Iterator[str]:
    """Yield the lines of the table in docs/costs.md: one for each target and degree."""
    by_place: dict[tuple[str, int], list[Knee]] = {}
    for knee in found:
        by_place.setdefault((knee.target, knee.tp), []).append(knee)
    batches = sorted({k.batch_size for rows in by_place.values() for k in rows})
    heads = [f"B = {b}: {what}" for b in batches for what in ("expected", "here", "graphs")]
    yield "| " + " | ".join(["target, tp", *heads, f"k_max, B {_slashed(batches)}"]) + " |"
    yield "|---" * (len(heads) + 2) + "|"
    for (target, tp), rows in by_place.items():
        of_batch = {knee.batch_size: knee for knee in rows}
        cells = [f"{target}, {tp}"]
        for batch in batches:
            one = of_batch.get(batch)
            kinds = (one.published, one.smooth, one.padded) if one else ((), (), ())
            cells += [_slashed(rows) if rows else "-" for rows in kinds]
        budgets = [of_batch[batch].k_max if batch in of_batch else "-" for batch in batches]
        yield "| " + " | ".join([*cells, _slashed(budgets)]) + " |"


def _slashed(values: Iterable[object]) -> str:
    return "/".join(map(str, values))


def to_dict(found: Iterable[Knee]) -> list[dict[str, Any]]:
    """Return the table ready for JSON."""
    return [asdict(knee) for knee in found]
