"""A cost model read from a table of measured step times: interpolated, never extrapolated far.

The rows are whole steps of one model on one engine. What they cannot give (prefill, checks,
memory, and drafts unless the file has rows of their forwards) comes from a computed cost model, and
`describe` says so.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Final

from echo_policies.errors import InputError
from simulator.cost.draft_times import DraftTimes, draft_times
from simulator.cost.fallback import (
    FROM_DRAFT_ROWS,
    FROM_ROWS,
    REST,
    FallbackCosts,
    check_fallback,
    check_knee,
)
from simulator.cost.interpolate import LinearTable, build_table
from simulator.cost.protocol import StepCosts
from simulator.cost.step import KNEE_ROWS_LIMIT
from simulator.cost.step_group import StepGroup
from simulator.cost.step_rows import StepRow

AXES: Final = ("batch", "tokens per request", "context")
DEFAULT_MARGIN: Final = 0.1
"""Share of the measured range's ends that may be gone beyond."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredCosts(FallbackCosts):
    """Verification times interpolated in (batch, tokens per request, context).

    Made by `build_measured_costs`. A ragged batch is looked up at its means per request.
    """

    group: StepGroup
    table: LinearTable
    drafts: DraftTimes | None = None
    """Of the draft model's forwards; None where the rows hold none."""

    @property
    def source(self) -> str:
        """The group and its number of rows."""
        table = f"{self.group.name}: table of {len(self.group.rows)} measured steps"
        return table if self.drafts is None else f"{table} and {len(self.group.draft)} draft layers"

    @property
    def rest(self) -> str:
        """What comes from the fallback, in words."""
        return REST if self.drafts is None else REST.removeprefix("drafts, ")

    @property
    def from_rows(self) -> tuple[str, ...]:
        """Names of the times that come from the rows."""
        return FROM_ROWS if self.drafts is None else (*FROM_ROWS, *FROM_DRAFT_ROWS)

    def verify_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the interpolated seconds of one step; 0 for no rows.

        Raises:
            InputError: if it lies too far outside of what was measured.
        """
        if rows <= 0:
            return 0.0
        seconds = self.table.at(requests, rows / requests, kv_tokens / requests)
        return self.scale * seconds

    def draft_extend_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of a draft's first forward, as of any forward over its rows."""
        if self.drafts is None:
            return FallbackCosts.draft_extend_s(self, rows, requests, kv_tokens)
        return self.scale * self.drafts.at(rows)

    def draft_layer_s(self, rows: int, requests: int, kv_tokens: int) -> float:
        """Return the seconds of one later draft layer."""
        if self.drafts is None:
            return FallbackCosts.draft_layer_s(self, rows, requests, kv_tokens)
        return self.scale * self.drafts.at(rows)

    def knee_k_max(self, batch_size: int, context_tokens: int, factor: float = 1.25) -> int:
        """Return the candidate rows until a verification takes ``factor`` times a plain step.

        The largest measured R with ``t(R) <= factor * t(B)``, minus B, at least 0; measured times
        need not grow, so all R are looked at.

        Raises:
            InputError: if the knee is not defined, or lies beyond the measured tokens per request.
        """
        check_knee(batch_size, context_tokens, factor)
        kv_tokens = batch_size * context_tokens
        limit_s = factor * self.plain_decode_s(batch_size, kv_tokens)
        most = self.table.limits(1, (batch_size,))[1]
        last = min(int(most * batch_size), KNEE_ROWS_LIMIT)
        for rows in range(last, batch_size, -1):
            if self.verify_s(rows, batch_size, kv_tokens) <= limit_s:
                break
        else:
            rows = batch_size
        if rows == last < KNEE_ROWS_LIMIT:
            raise InputError(
                f"The knee of {self.group.name} at batch {batch_size} lies beyond the {most:g} "
                f"tokens per request that were measured: a step still takes at most {factor:g} "
                "times a plain one. Measure more tokens per request, or give k_max."
            )
        return rows - batch_size

    def describe_source(self) -> dict[str, object]:
        """Return the rows, and points, ranges and margin of the table."""
        ranges = {axis: list(ends) for axis, ends in self.table.ranges().items()}
        return {
            "kind": "measured table",
            "measured": self.group.describe(),
            "points": self.table.num_points,
            "ranges": ranges,
            "margin": self.table.margin,
        }


def build_measured_costs(
    group: StepGroup,
    fallback: StepCosts,
    *,
    margin: float = DEFAULT_MARGIN,
    has_host: bool = True,
    scale: float = 1.0,
) -> MeasuredCosts:
    """Make a cost model of measured steps.

    Args:
        group: rows of one model on one engine, from `step_group.select_rows`. Rows at the same
            point count as their median.
        fallback: cost model of the same pair on the same machine, for what rows cannot give.
        margin: share of the measured range's ends that may be gone beyond.
        has_host: whether the measured times hold the host's part, as an engine's steps do.
        scale: factor on every returned time.

    Raises:
        InputError: for an option out of range, or rows that are not in milliseconds.
    """
    check_fallback(group, fallback, has_host=has_host, scale=scale)
    table = build_table(f"The table of {group.name}", AXES, _points(group.rows), margin)
    return MeasuredCosts(
        group=group,
        fallback=fallback,
        has_host=has_host,
        scale=scale,
        table=table,
        drafts=draft_times(group.draft) if group.draft else None,
    )


def _points(rows: Sequence[StepRow]) -> dict[tuple[float, ...], float]:
    seconds: dict[tuple[float, ...], list[float]] = {}
    for row in rows:
        seconds.setdefault((float(row.batch), row.tokens, row.context), []).append(row.step_s)
    return {point: median(values) for point, values in seconds.items()}
