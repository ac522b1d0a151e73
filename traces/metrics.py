"""Every figure of the comparison table, as pure functions of run records.

Definitions follow this project's docs: MAT counts the bonus token and is a ratio of sums over all
verify steps, those without a draft included; acceptance rates leave such steps out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from traces.records import SPLIT, RunRecords


@dataclass(frozen=True, slots=True)
class Summary:
    """One row of the table, intervals excluded."""

    tokens_per_s: float
    """Tokens emitted by verify steps per second of the whole batch."""
    mat: float
    """Tokens emitted per verify step and request."""
    mat_drafting: float
    """The same over request-steps that drafted; NaN where none did."""
    mat_by_request: float
    """Mean over requests of each one's MAT."""
    depth: float
    """Mean levels drafted per drafting request-step; NaN where none drafted."""
    utilisation: float
    """u = MAT over drafting request-steps / depth (ECHO paper)."""
    accepted_per_verified: float
    """Accepted draft tokens / candidate nodes verified."""
    accepted_per_drafted: float
    """Accepted draft tokens / candidate nodes generated."""
    no_draft_share: float
    """Share of request-steps without a draft."""
    k_per_step: float
    """Candidate nodes verified per batch step, K."""
    k_max: float
    """Budget per batch step."""
    rows_per_step: float
    """Rows of the verify forward per batch step, R = K + B."""
    levels_per_step: float
    """Draft levels charged per batch step."""
    checks_per_step: float
    """Gate checks charged per batch step."""
    step_ms: float
    """Mean length of a batch step."""
    tpot_p50_ms: float
    tpot_p90_ms: float
    tpot_p99_ms: float
    """Time per output token of finished requests; NaN where none finished."""
    ttft_p50_ms: float
    ttft_p99_ms: float
    """Time to first token; meaningful in an open loop only."""
    jain_index: float
    """Fairness of per-request token rates: 1 is equal, 1/n is one request taking all."""
    unrevealed_rate: float
    """Expanded nodes whose children the recording does not know / expanded nodes."""
    clamped_share: float
    """Share of batch steps whose plan ``--cap-all`` cut."""
    steps: int
    """Batch steps measured."""
    warm_up_steps: int
    """Batch steps dropped before them."""
    request_steps: int
    requests: int
    """Requests finished in the measured part."""
    time_split: dict[str, float]
    """Share of the steps' time by part."""


def summarise(records: RunRecords, keep_SB: npt.NDArray[np.bool_] | None = None) -> Summary:
    """Compute all figures.

    Args:
        records: measured part of a run.
        keep_SB: request-steps to count, such as those of one data set; all by default. Batch
            figures (throughput, split) are then attributed: a step's time is shared equally.
    """
    live_SB = records.live_SB if keep_SB is None else records.live_SB & keep_SB
    share_S = live_SB.sum(axis=1) / np.maximum(records.live_SB.sum(axis=1), 1)
    seconds = float((records.step_s * share_S).sum()) + (records.idle_s if keep_SB is None else 0.0)
    emitted, accepted = records.emitted_SB[live_SB], records.accepted_SB[live_SB]
    verified, drafted = records.verified_SB[live_SB], records.drafted_SB[live_SB]
    depth, request = records.depth_SB[live_SB], records.request_SB[live_SB]
    drafting = depth > 0
    mat_drafting = _mean(emitted[drafting])
    mean_depth = _mean(depth[drafting])
    kept = set(request.tolist())
    served = [r for r in records.requests if keep_SB is None or r.recorded in kept]
    tpot = np.array([r.tpot_s for r in served]) * 1e3
    ttft = np.array([r.ttft_s for r in served]) * 1e3
    k_S = (records.verified_SB * live_SB).sum(axis=1)
    parts = (records.times_SX * share_S[:, None]).sum(axis=0)
    return Summary(
        tokens_per_s=_ratio(emitted.sum(), seconds),
        mat=_mean(emitted),
        mat_drafting=mat_drafting,
        mat_by_request=_mat_by_request(request, emitted),
        depth=mean_depth,
        utilisation=mat_drafting / mean_depth,
        accepted_per_verified=_ratio(accepted.sum(), verified.sum()),
        accepted_per_drafted=_ratio(accepted.sum(), drafted.sum()),
        no_draft_share=1 - _mean(drafting),
        k_per_step=_mean(k_S),
        k_max=_mean(records.k_max_S),
        rows_per_step=_mean(k_S + live_SB.sum(axis=1)),
        levels_per_step=_mean(records.levels_S),
        checks_per_step=_mean(records.checks_S),
        step_ms=_mean(records.step_s) * 1e3,
        tpot_p50_ms=_quantile(tpot, 0.5),
        tpot_p90_ms=_quantile(tpot, 0.9),
        tpot_p99_ms=_quantile(tpot, 0.99),
        ttft_p50_ms=_quantile(ttft, 0.5),
        ttft_p99_ms=_quantile(ttft, 0.99),
        jain_index=_jain(tpot),
        unrevealed_rate=_ratio(
            records.unrevealed_SB[live_SB].sum(), records.expanded_SB[live_SB].sum(), empty=0.0
        ),
        clamped_share=_mean(records.clamped_S),
        steps=int(records.levels_S.size),
        warm_up_steps=records.warm_up_steps,
        request_steps=int(emitted.size),
        requests=len(served),
        time_split={
            name.removesuffix("_s"): float(part / max(parts.sum(), 1e-30))
            for name, part in zip(SPLIT, parts, strict=True)
        },
    )


def _mean(values: npt.NDArray[Any]) -> float:
    return float(np.mean(values)) if values.size else float("nan")


def _ratio(top: float, bottom: float, empty: float = float("nan")) -> float:
    return float(top / bottom) if bottom else empty


def _quantile(values: npt.NDArray[np.float64], q: float) -> float:
    return float(np.quantile(values, q)) if values.size else float("nan")


def _mat_by_request(request: npt.NDArray[np.int32], emitted: npt.NDArray[np.int32]) -> float:
    steps = np.bincount(request)
    tokens = np.bincount(request, weights=emitted)
    return _mean(tokens[steps > 0] / steps[steps > 0])


def _jain(tpot_ms: npt.NDArray[np.float64]) -> float:
    if not tpot_ms.size or (tpot_ms <= 0).any():
        return float("nan")
    rate = 1 / tpot_ms
    return float(rate.sum() ** 2 / (rate.size * (rate**2).sum()))
