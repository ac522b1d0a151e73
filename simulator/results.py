"""What a simulation returns: everything the table shows and everything needed to repeat it."""

from __future__ import annotations

import csv
import io
import json
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, ConfigDict

from simulator.config import SimulationConfig
from traces.metrics import Summary
from traces.schema import TraceHeader
from traces.stats import Interval, Steadiness


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class TaskRow(_Frozen):
    """One policy on the requests of one data set, out of the same run."""

    task: str
    summary: Summary
    speedup: Interval


class Row(_Frozen):
    """One policy at one batch size."""

    policy: str
    parameters: dict[str, Any]
    """Hyperparameters as they ran, calibrated ones included."""
    summary: Summary
    speedup: Interval
    """Over plain decoding, paired by recorded request."""
    steadiness: Steadiness
    upper_tokens_per_s: float | None = None
    """Throughput with the target path visible at unrevealed nodes; None where there were none."""
    cost_tokens_per_s: tuple[float, float] | None = None
    """Central 95 % of throughput under drawn cost constants; None where none were drawn."""
    tasks: tuple[TaskRow, ...] = ()


class OrderFlip(_Frozen):
    """Two policies whose order depends on the cost constants."""

    faster: str
    """At the constants in use."""
    slower: str
    share: float
    """Of the draws, in which the order is the other."""


class BatchResult(_Frozen):
    """One table: every policy at one batch size."""

    batch_size: int
    k_max: int
    k_max_rule: str
    """How ``k_max`` was chosen."""
    rows: tuple[Row, ...]
    """Plain decoding first."""
    order_flips: tuple[OrderFlip, ...] = ()


class Result(_Frozen):
    """The outcome of :func:`simulator.simulate`."""

    config: SimulationConfig
    trace: TraceHeader
    trace_digest: str
    evaluated_requests: tuple[int, ...]
    calibration_requests: tuple[int, ...]
    cost: dict[str, Any]
    """Every constant of the cost model."""
    cost_label: str
    context_label: str
    is_what_if: bool
    """The acceptance of one pair is costed as another."""
    versions: dict[str, str]
    batches: tuple[BatchResult, ...]

    def row(self, policy: str, batch_size: int) -> Row:
        """Return one row.

        Raises:
            KeyError: there is none.
        """
        for batch in self.batches:
            for row in batch.rows:
                if batch.batch_size == batch_size and row.policy == policy:
                    return row
        raise KeyError((policy, batch_size))

    def to_json(self) -> str:
        """Everything, as JSON; figures that do not exist are null."""
        return self.model_dump_json(indent=2) + "\n"

    def to_csv(self) -> str:
        """One line per policy, batch size and data set (``all`` first)."""
        lines = [line for batch in self.batches for line in self._lines(batch)]
        out = io.StringIO()
        writer = csv.DictWriter(out, fieldnames=list(lines[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(lines)
        return out.getvalue()

    def _lines(self, batch: BatchResult) -> list[dict[str, Any]]:
        lines = []
        for row in batch.rows:
            cost_low, cost_high = row.cost_tokens_per_s or (None, None)
            parts = [("all", row.summary, row.speedup)]
            parts += [(part.task, part.summary, part.speedup) for part in row.tasks]
            for task, summary, speedup in parts:
                figures = asdict(summary)
                split = figures.pop("time_split")
                figures["k_max"] = batch.k_max
                lines.append(
                    {
                        "trace": self.trace.name,
                        "provenance": self.trace.provenance.kind,
                        "trace_digest": self.trace_digest,
                        "costed_as": self.cost_label,
                        "is_what_if": self.is_what_if,
                        "context": self.context_label,
                        "seed": self.config.seed,
                        "batch_size": batch.batch_size,
                        "k_max_rule": batch.k_max_rule,
                        "policy": row.policy,
                        "task": task,
                        "speedup": speedup.value,
                        "speedup_low": speedup.low,
                        "speedup_high": speedup.high,
                        "is_steady": row.steadiness.is_steady,
                        "upper_tokens_per_s": row.upper_tokens_per_s,
                        "cost_low_tokens_per_s": cost_low,
                        "cost_high_tokens_per_s": cost_high,
                        "parameters": json.dumps(row.parameters, sort_keys=True),
                        "config": self.config.model_dump_json(),
                        "versions": json.dumps(self.versions, sort_keys=True),
                        **figures,
                        **{f"share_{name}": share for name, share in split.items()},
                    }
                )
        return lines
