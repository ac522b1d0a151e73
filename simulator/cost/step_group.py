"""Rows of measured step times that belong together: one model on one engine and machine."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost.step_rows import StepRow

CYCLE: Final = "spec_cycle"
"""Kind of row whose time holds drafting as well; it says nothing of verification alone."""
DRAFT_LAYER: Final = "draft_layer"
"""Kind of row that times a forward of the draft model, its head included."""
UNIT_RATIO: Final = 200.0
"""Between the spread of machines (a CPU is 100 times an H100) and a wrong unit (1000 times)."""


@dataclass(frozen=True, slots=True)
class StepGroup:
    """Rows of one model, tp, engine, GPU and number type; made by `select_rows`."""

    rows: tuple[StepRow, ...]
    dropped: Mapping[str, int]
    """Rows of the group that were left out, by reason."""
    draft: tuple[StepRow, ...] = ()
    """Rows of the draft model's forwards, where the file has some."""

    @property
    def name(self) -> str:
        """The group in words."""
        row = self.rows[0]
        parts = (f"{row.model} tp {row.tp}", row.engine, row.gpu, row.dtype)
        return ", ".join(part for part in parts if part)

    def describe(self) -> dict[str, object]:
        """Return what the rows are, ready for JSON."""
        row = self.rows[0]
        kinds = Counter(row.kind or "not stated" for row in self.rows)
        keys = ("model", "tp", "engine", "gpu", "dtype", "moe_ep")
        return {key: getattr(row, key) for key in keys} | {
            "rows": len(self.rows),
            "rows_by_kind": dict(kinds),
            "rows_left_out": dict(self.dropped),
            "draft_rows": len(self.draft),
        }


def select_rows(
    rows: Sequence[StepRow],
    model: str,
    tp: int,
    *,
    engine: str | None = None,
    gpu: str | None = None,
    dtype: str | None = None,
    moe_ep: str | None = None,
) -> StepGroup:
    """Choose the rows of one model on one engine, flagged rows and speculative cycles left out.

    Args:
        rows: from `read_step_rows`.
        model: name of the model in the file.
        tp: tensor-parallel degree.
        engine: engine, with or without its version; needed where the rows have several.
        gpu: likewise.
        dtype: likewise.
        moe_ep: expert-parallel degree as the file writes it; likewise.

    Raises:
        UnknownNameError: for a model or engine that the rows do not have.
        InputError: no row at that ``tp``, several engines (GPUs, ..) and none named, or nothing
            but rows that are left out.
    """
    if model not in {row.model for row in rows}:
        raise UnknownNameError("model in the step times", model, {row.model for row in rows})
    chosen = [row for row in rows if (row.model, row.tp) == (model, tp)]
    if not chosen:
        degrees = ", ".join(map(str, sorted({row.tp for row in rows if row.model == model})))
        raise InputError(f"{model} was measured at tp {degrees}; got tp {tp}. Choose one of them.")
    wanted = {"engine": engine, "gpu": gpu, "dtype": dtype, "moe_ep": moe_ep}
    for key, value in wanted.items():
        chosen = _narrow(chosen, key, value, f"{model} at tp {tp}")
    return _without_unfit(chosen)


def check_scale(group: StepGroup, expected_s: Sequence[float]) -> None:
    """Refuse a group whose times are a thousand times off what a cost model expects.

    Args:
        group: the measured rows.
        expected_s: seconds that a computed cost model gives for each of them.

    Raises:
        InputError: if the median ratio is beyond `UNIT_RATIO` either way.
    """
    ratios = sorted(row.step_s / want for row, want in zip(group.rows, expected_s, strict=True))
    ratio = ratios[len(ratios) // 2]
    if 1.0 / UNIT_RATIO <= ratio <= UNIT_RATIO:
        return
    unit = "microseconds" if ratio > 1.0 else "seconds"
    raise InputError(
        f"Step times must be in milliseconds; those of {group.name} are {ratio:.3g} times what "
        f"the computed model expects, as if they were in {unit}. Convert them, or name the "
        "GPU they were measured on."
    )


def _narrow(rows: list[StepRow], key: str, value: str | None, what: str) -> list[StepRow]:
    found = {getattr(row, key) for row in rows}
    if value is None:
        if len(found) > 1:
            names = "; ".join(sorted(map(repr, found)))
            raise InputError(
                f"Step times must be of one {key}; those of {what} have {names}. "
                f"Name one: {key}=NAME."
            )
        return rows
    matching = {name for name in found if name == value}
    matching = matching or {name for name in found if name.startswith(f"{value} ")}
    if not matching:
        raise UnknownNameError(f"{key} in the step times of {what}", value, found)
    return _narrow([row for row in rows if getattr(row, key) in matching], key, None, what)


def _without_unfit(rows: Sequence[StepRow]) -> StepGroup:
    draft = tuple(row for row in rows if row.kind == DRAFT_LAYER and not row.flag)
    rows = [row for row in rows if row.kind != DRAFT_LAYER]
    reasons = ["flagged" if row.flag else CYCLE if row.kind == CYCLE else "" for row in rows]
    kept = tuple(row for row, reason in zip(rows, reasons, strict=True) if not reason)
    if not rows:
        raise InputError(
            f"Step times must hold a target's forwards; all {len(draft)} rows chosen of "
            f"{draft[0].model} are of its draft. Measure verification steps, too."
        )
    if not kept:
        raise InputError(
            f"Step times must be of a target's forward alone; all {len(rows)} rows chosen of "
            f"{rows[0].model} are flagged or speculative cycles, which hold drafting too. Measure "
            "plain or verification steps."
        )
    return StepGroup(kept, Counter(reason for reason in reasons if reason), draft)
