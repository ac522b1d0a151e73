"""A speculative cycle by stage, for drafts of one shape: part of what `simulate costs` prints."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.table import Table

from echo_policies.errors import InputError
from simulator.cost.protocol import StepCosts
from simulator.cost.stages import eagle_ops

STAGES = ("draft", "select", "pack", "verify", "compact", "host")
"""Stages of a cycle in their order; gate checks are priced apart."""


@dataclass(frozen=True, slots=True)
class CycleShape:
    """What a cycle drafts and accepts, per request."""

    levels: int = 5
    width: int = 8
    """Nodes expanded per level; 1 is a chain."""
    accepted: int = 3
    """Draft tokens that the target accepts."""

    def check(self) -> None:
        """Refuse a shape that no draft has.

        Raises:
            InputError: fewer than one level or node, or more accepted than drafted.
        """
        if self.levels < 1 or self.width < 1 or not 0 <= self.accepted <= self.levels:
            raise InputError(
                "A cycle needs levels >= 1, width >= 1 and 0 <= accepted <= levels; got "
                f"{self.levels}, {self.width} and {self.accepted}."
            )

    @property
    def is_tree(self) -> bool:
        """Whether the draft branches."""
        return self.width > 1

    @property
    def ops(self) -> int:
        """Operations of EAGLE-3's selection."""
        return eagle_ops(self.levels, is_tree=self.is_tree)


def cycle_row(
    costs: StepCosts, shape: CycleShape, tokens: int, requests: int, kv_tokens: int
) -> dict[str, float]:
    """Return the seconds of a cycle by stage, and their total.

    Args:
        costs: any cost model.
        shape: what is drafted and accepted.
        tokens: candidate nodes verified, over the batch; 0 is plain decoding.
        requests: requests of the batch.
        kv_tokens: committed tokens of these requests.
    """
    rows = tokens + requests
    stages = dict.fromkeys(STAGES, 0.0)
    stages["verify"] = costs.verify_s(rows, requests, kv_tokens)
    stages["host"] = costs.host_s(0)
    if tokens > 0:
        layer_s = costs.draft_layer_s(requests * shape.width, requests, kv_tokens)
        behind = requests * (shape.accepted + 1)
        stages["draft"] = costs.draft_extend_s(behind, requests, kv_tokens)
        stages["draft"] += (shape.levels - 1) * layer_s
        stages["select"] = costs.select_s(shape.ops)
        stages["pack"] = costs.pack_s(rows, requests)
        moved = min(tokens, requests * shape.accepted)
        stages["compact"] = costs.compact_s(moved) if shape.is_tree else 0.0
        stages["host"] = costs.host_s(shape.levels, is_tree=shape.is_tree)
    return {"tokens": float(tokens)} | stages | {"total": sum(stages.values())}


@dataclass(frozen=True, slots=True)
class CycleTable:
    """Cycles of one shape by candidate tokens."""

    shape: CycleShape
    check_s: float
    """Seconds of a gate check, which come on top."""
    rows: tuple[dict[str, float], ...]

    def to_dict(self) -> dict[str, Any]:
        """Return it ready for JSON."""
        shape = asdict(self.shape) | {"policy_operations": self.shape.ops}
        return {"shape": shape, "check": self.check_s, "rows": list(self.rows)}

    @property
    def title(self) -> str:
        """What is costed, in words."""
        shape = self.shape
        kind = f"tree of {shape.levels} levels, {shape.width} nodes expanded per level"
        kind = kind if shape.is_tree else f"chain of {shape.levels} levels"
        return (
            f"cycle by stage: {kind}, {shape.accepted} accepted per request, EAGLE-3's selection "
            f"({shape.ops} operations); a gate check adds {self.check_s * 1e3:.2f} ms"
        )

    def render(self) -> Table:
        """Return what is printed: milliseconds, small stages in microseconds."""
        small = ("select", "pack", "compact")
        names = (f"{name} {'us' if name in small else 'ms'}" for name in (*STAGES, "total"))
        grid = Table("K", *names, box=None)
        for column in grid.columns:
            column.justify = "right"
        for row in self.rows:
            cells = [f"{row[n] * 1e6:.1f}" if n in small else f"{row[n] * 1e3:.3f}" for n in STAGES]
            grid.add_row(f"{row['tokens']:.0f}", *cells, f"{row['total'] * 1e3:.3f}")
        return grid


def cycle_table(
    costs: StepCosts,
    shape: CycleShape,
    tokens: Sequence[int],
    batch_size: int,
    context_tokens: int,
) -> CycleTable:
    """Cost cycles that verify ``tokens`` candidates.

    Raises:
        InputError: a shape that no draft has, or a step that the cost model refuses.
    """
    shape.check()
    kv_tokens = batch_size * context_tokens
    rows = tuple(cycle_row(costs, shape, count, batch_size, kv_tokens) for count in tokens)
    return CycleTable(shape, costs.check_s, rows)
