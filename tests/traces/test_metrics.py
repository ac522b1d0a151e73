"""Metrics on a run of three requests computed by hand, intervals, the steady-state check."""

from __future__ import annotations

import math

import numpy as np
import pytest

from traces.metrics import summarise
from traces.records import IDLE, RequestRecord, RunLog, StepTimes
from traces.stats import speedup_interval, steadiness, work_by_request


def run():
    """Two slots, three steps; request 2 never drafts, slot 1 is idle in the last step.

    request  step 0: 0, 1   step 1: 0, 2   step 2: 0, idle
    """
    log = RunLog()
    columns = {
        # request, emitted, accepted, verified, drafted, depth, unrevealed, expanded
        0: [(0, 3, 2, 4, 8, 2, 0, 2), (1, 1, 0, 3, 9, 3, 1, 3)],
        1: [(0, 1, 1, 4, 8, 2, 0, 2), (2, 1, 0, 0, 0, 0, 0, 0)],
        2: [(0, 2, 1, 2, 4, 1, 0, 1), (IDLE, 0, 0, 0, 0, 0, 0, 0)],
    }
    for step, slots in columns.items():
        log.times.append(StepTimes(draft_s=1.0, verify_s=2.0, host_s=1.0))
        log.batch.append((3 - step, 1, 8, step == 2))
        log.slots.append(np.array(slots, dtype=np.int32).T)
    log.requests = [RequestRecord(0, 0.0, 1.0, 5.0, 5), RequestRecord(2, 1.0, 2.0, 10.0, 2)]
    return log.freeze()


def test_every_figure_by_hand():
    s = summarise(run())
    assert s.tokens_per_s == pytest.approx(8 / 12)
    assert s.mat == pytest.approx(8 / 5)
    assert s.mat_drafting == pytest.approx(7 / 4)
    assert s.depth == pytest.approx(8 / 4)
    assert s.utilisation == pytest.approx(7 / 8)
    assert s.accepted_per_verified == pytest.approx(4 / 13)
    assert s.accepted_per_drafted == pytest.approx(4 / 29)
    assert s.no_draft_share == pytest.approx(1 / 5)
    assert s.k_per_step == pytest.approx(13 / 3)
    assert s.rows_per_step == pytest.approx((13 + 5) / 3)
    assert s.levels_per_step == 2
    assert s.mat_by_request == pytest.approx((2 + 1 + 1) / 3)
    assert s.tpot_p50_ms == pytest.approx((1000 + 8000) / 2)
    assert s.ttft_p50_ms == 1000
    assert s.jain_index == pytest.approx((1 + 1 / 8) ** 2 / (2 * (1 + 1 / 64)))
    assert s.unrevealed_rate == pytest.approx(1 / 8)
    assert s.clamped_share == pytest.approx(1 / 3)
    assert s.time_split == pytest.approx(
        dict.fromkeys(("check", "select", "pack", "compact", "prefill"), 0)
        | {"draft": 0.25, "verify": 0.5, "host": 0.25}
    )


def test_a_part_of_the_batch_is_charged_its_share():
    records = run()
    only = records.request_SB == 2
    s = summarise(records, only)
    assert s.tokens_per_s == pytest.approx(1 / 2)
    assert math.isnan(s.accepted_per_verified)
    assert s.requests == 1
    tokens, seconds = work_by_request(records, 3)
    assert tokens.tolist() == [6, 1, 1]
    assert seconds.tolist() == [2 + 2 + 4, 2, 2]


def test_interval_is_paired_and_needs_two_requests():
    records = run()
    rng = np.random.default_rng(0)
    sources = ["a", "b", "c", "d", "e"]
    same = speedup_interval(records, records, sources[:3], rng)
    assert (same.value, same.low, same.high) == (1, 1, 1)
    one = speedup_interval(records, records, sources[:3], rng, only=np.array([1]))
    assert one.value == 1
    assert math.isnan(one.low)
    # Requests drawn from one recorded request are one cluster, so there is nothing to resample.
    alike = speedup_interval(records, records, ["a", "a", "a"], rng)
    assert alike.value == 1
    assert math.isnan(alike.low)
    none = speedup_interval(records, records, sources, rng, only=np.array([4]))
    assert math.isnan(none.value)


def log_with_rates(rates):
    log = RunLog()
    for emitted in rates:
        log.times.append(StepTimes(verify_s=1.0))
        log.batch.append((0, 0, 0, False))
        log.slots.append(np.array([[0, emitted, 0, 0, 0, 0, 0, 0]], dtype=np.int32).T)
    return log.freeze()


def test_drift_is_seen_and_noise_is_not():
    rng = np.random.default_rng(1)
    steady = steadiness(log_with_rates(rng.integers(2, 6, 400)))
    assert steady.is_steady
    drifting = steadiness(log_with_rates(np.linspace(2, 8, 400).astype(int)))
    assert not drifting.is_steady
    assert drifting.drift > 0.3
    assert steadiness(log_with_rates([1, 2])).is_steady
