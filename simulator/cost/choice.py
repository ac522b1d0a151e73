"""Which cost model a command uses: ``KIND[:FILE][:field=value,...]``, as ``--costs`` takes it.

``FILE.toml`` (or ``roofline:FILE.toml``) are constants for the computed model, the default.
``table:STEPS.csv`` and ``affine:STEPS.csv`` take verification from measured steps,
``aiconfigurator`` from measured kernels. What these do not know comes from the computed model, the
fallback.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Final

from echo_policies.errors import InputError, UnknownNameError

if TYPE_CHECKING:
    from simulator.cost.parameters import CostParameters
    from simulator.cost.protocol import StepCosts
    from simulator.cost.step import CostModel
    from simulator.cost.step_group import StepGroup
    from simulator.cost.step_rows import StepRow

ROOFLINE: Final = "roofline"
ROW_FIELDS: Final = ("model", "engine", "gpu", "dtype", "moe_ep")
KINDS: Final[Mapping[str, tuple[str, ...]]] = {
    ROOFLINE: (),
    "table": ROW_FIELDS,
    "affine": ROW_FIELDS,
    "aiconfigurator": ("version",),
}
"""Every kind of cost model, with the fields it takes."""
CHOICES: Final = (
    "FILE.toml (constants of `simulate costs fit`), table:STEPS.csv, affine:STEPS.csv or "
    "aiconfigurator"
)


@dataclass(frozen=True, slots=True)
class CostChoice:
    """A parsed ``--costs``."""

    kind: str = ROOFLINE
    path: Path | None = None
    """Constants of a roofline (None: the shipped ones), steps of a table or an affine fit."""
    fields: Mapping[str, str] = field(default_factory=dict)


def parse_choice(text: str | None) -> CostChoice:
    """Read ``--costs``; None is the computed model with the shipped constants.

    Raises:
        UnknownNameError: an unknown kind or field.
        InputError: a file that is missing from the text, or that is too much.
    """
    if text is None:
        return CostChoice()
    kind, _, rest = text.partition(":")
    if kind not in KINDS:
        if Path(text).suffix.lower() == ".toml" or Path(text).is_file():
            return CostChoice(path=Path(text))
        raise InputError(f"--costs must be {CHOICES}; got {text!r}.")
    file, _, given = rest.rpartition(":") if "=" in rest.rpartition(":")[2] else (rest, "", "")
    values = dict(_pair(text, part) for part in given.split(",")) if given else {}
    for name in values:
        if name not in KINDS[kind]:
            raise UnknownNameError(f"field of --costs {kind}", name, KINDS[kind])
    needs_file = kind in {"table", "affine"}
    if needs_file and not file:
        raise InputError(f"--costs {kind} needs a file of measured steps: {kind}:STEPS.csv.")
    if kind == "aiconfigurator" and file:
        raise InputError(f"--costs aiconfigurator takes no file; got {file!r}.")
    return CostChoice(kind, Path(file) if file else None, values)


def _pair(text: str, part: str) -> tuple[str, str]:
    name, equals, value = part.partition("=")
    if not (equals and name and value):
        raise InputError(f"--costs takes fields as field=value,...; got {part!r} in {text!r}.")
    return name.strip(), value.strip()


def constants_of(choice: CostChoice) -> CostParameters | None:
    """Return the constants of the computed model or fallback; None for the shipped ones."""
    from simulator.cost.constants import load

    if choice.kind != ROOFLINE or choice.path is None:
        return None
    return load(choice.path).parameters


def apply_choice(choice: CostChoice, computed: CostModel) -> StepCosts:
    """Return the cost model that was chosen, with ``computed`` as fallback, or ``computed`` itself.

    Every time is scaled as those of ``computed`` are.

    Raises:
        InputError: a file that cannot be used, or rows that do not suffice.
        UnknownNameError: rows of another model or engine than asked for.
        MissingExtraError: the extra of the kernel tables is not installed.
    """
    if choice.kind == ROOFLINE:
        return computed
    if choice.kind == "aiconfigurator":
        from simulator.cost.aic import build_aic_costs

        return build_aic_costs(computed, version=choice.fields.get("version"))
    from simulator.cost.affine import build_affine_costs
    from simulator.cost.measured import build_measured_costs

    build = build_measured_costs if choice.kind == "table" else build_affine_costs
    return build(_group(choice, computed), computed)


def _group(choice: CostChoice, computed: CostModel) -> StepGroup:
    """Return the rows of the machine that is costed; a column that is empty decides nothing."""
    from simulator.cost.step_group import select_rows
    from simulator.cost.step_rows import read_step_rows

    assert choice.path is not None, "parse_choice asks for the file"
    rows = read_step_rows(choice.path)
    model = choice.fields.get("model", computed.pair.target.name)
    own = [row for row in rows if row.model == model]
    machine = {
        "engine": computed.host.engine,
        "gpu": _gpu(own, computed.hardware.name),
        "dtype": computed.dtype,
        "moe_ep": None,
    }
    wanted = {
        name: choice.fields.get(name) or (value if any(getattr(r, name) for r in own) else None)
        for name, value in machine.items()
    }
    return select_rows(rows, model, computed.tp, **wanted)


def _gpu(rows: Sequence[StepRow], hardware: str) -> str:
    """Return our name of a machine as the rows spell it: ``H100 SXM`` is h100."""
    words = {row.gpu.split()[0] for row in rows if row.gpu}
    return next((word for word in sorted(words) if word.lower() == hardware), hardware)
