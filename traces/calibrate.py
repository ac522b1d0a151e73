"""Calibration samples from a recording: the full ungated envelope at every position.

Shape letters: N samples, B positions of a chunk, D depths, W candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import torch

from echo_policies.api import DraftPlan, Frontier
from echo_policies.calibration import CalibrationSamples
from traces.replay import RecordedDrafter, replay_tables
from traces.schema import PAST_END, Trace

CHUNK: Final = 2048
"""Positions that are replayed together."""


def calibration_samples(trace: Trace, requests: Sequence[int]) -> CalibrationSamples:
    """Replay the recorded beam, ungated and without a rerank cut, at every position.

    Args:
        trace: the recording.
        requests: recorded requests to use, which must not be evaluated later.

    Raises:
        InputError: the requests have no position.
    """
    header = trace.header
    position = np.concatenate(
        [np.arange(trace.positions(q).start, trace.positions(q).stop) for q in requests]
        or [np.zeros(0, dtype=np.int64)]
    )
    request = np.repeat(
        np.asarray(requests, dtype=np.int64),
        [trace.positions(q).stop - trace.positions(q).start for q in requests],
    )
    drafter = RecordedDrafter(replay_tables(trace))
    plan = DraftPlan(header.levels, header.top_k, header.beam_width)
    log_c = np.full((position.size, header.levels), -np.inf)
    accepted = np.zeros((position.size, header.levels), dtype=bool)
    revealed = np.zeros_like(accepted)
    with torch.inference_mode():
        for start in range(0, position.size, CHUNK):
            rows = slice(start, start + CHUNK)
            log_c[rows], accepted[rows], revealed[rows] = _draft(drafter, plan, position[rows])
    reached = revealed.copy()
    reached[:, 1:] &= accepted[:, :-1]
    # Beyond the end of the output nothing was accepted and nothing was rejected either.
    reached &= trace.arrays.path_rank[position, : header.levels] != PAST_END
    return CalibrationSamples(log_c, reached, accepted, request)


def _draft(
    drafter: RecordedDrafter, plan: DraftPlan, position: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence, acceptance and existence [B, D] of the full beam."""
    drafter.seek(torch.from_numpy(position))
    layer = drafter.begin(plan, torch.ones(position.size, dtype=torch.bool))
    log_c, accepted, revealed = [], [], []
    for depth in range(1, plan.levels + 1):
        log_c.append(layer.best_B)
        accepted.append(drafter.on_path_layer().any(1))
        revealed.append(layer.exists_BW.any(1))
        if depth == plan.levels:
            break
        index_BF = layer.order_BW[:, : plan.width]
        layer = drafter.expand(layer, Frontier(index_BF, layer.exists_BW.gather(1, index_BF)))
    return (
        torch.stack(log_c, dim=1).numpy(),
        torch.stack(accepted, dim=1).numpy(),
        torch.stack(revealed, dim=1).numpy(),
    )
