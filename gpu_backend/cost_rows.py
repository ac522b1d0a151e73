"""Timed forwards of a run as the measured steps that ``simulate --costs table:FILE`` reads."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Mapping
from typing import Final

from gpu_backend.curve import Curve
from gpu_backend.measured_costs import MeasuredCosts

COLUMNS: Final = ("model", "tp", "batch", "context", "tokens", "ms", "gpu", "kind")


def cost_rows(costs: Mapping[int, Mapping[int, MeasuredCosts]], *, model: str, gpu: str) -> str:
    """Write curves as CSV.

    Args:
        costs: by batch size, then by context in tokens per request.
        model: name of the target, as the simulator is to know it.
        gpu: what it ran on.
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(COLUMNS)
    for batch_size, by_context in sorted(costs.items()):
        for context, measured in sorted(by_context.items()):
            curves = {"verify": measured.verify, "draft_layer": measured.draft}
            for kind, curve in curves.items():
                for batch, tokens, seconds in _points(curve, batch_size):
                    row = (model, 1, batch, context, tokens, f"{1e3 * seconds:.6g}", gpu, kind)
                    writer.writerow(row)
    return out.getvalue()


def _points(curve: Curve | None, batch_size: int) -> Iterator[tuple[int, int, float]]:
    """Requests, rows of each, seconds; few rows are single ones of fewer requests."""
    if curve is None:
        return
    for rows, seconds in zip(curve.rows, curve.seconds, strict=True):
        batch = min(rows, batch_size)
        yield batch, rows // batch, seconds
