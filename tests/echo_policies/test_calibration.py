"""AUC, Youden's threshold and the choice of gated depths, by brute force and by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.api import CalibrationContext, Policy
from echo_policies.calibration import CalibrationSamples, auc, depth_reports, youden_tau
from echo_policies.errors import InputError
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.gates.open import OpenGate
from echo_policies.schedulers.elastic import Elastic

CONTEXT = CalibrationContext(batch_size=8, k_max=32)

labelled = st.lists(st.tuples(st.integers(0, 6), st.booleans()), min_size=2, max_size=14).filter(
    lambda pairs: len({label for _, label in pairs}) == 2
)


def arrays(pairs: list[tuple[int, bool]]) -> tuple[np.ndarray, np.ndarray]:
    scores, labels = zip(*pairs, strict=True)
    return (np.array(scores) + 1) / 7, np.array(labels)


def j_of(tau: float, scores: np.ndarray, labels: np.ndarray) -> float:
    """Youden's J of `score > tau`, times both class sizes, so that it is a whole number."""
    hits, false = (scores > tau) & labels, (scores > tau) & ~labels
    return int(hits.sum()) * int((~labels).sum()) - int(false.sum()) * int(labels.sum())


@given(pairs=labelled)
def test_auc_is_the_share_of_ordered_pairs(pairs: list[tuple[int, bool]]) -> None:
    accepted = [s for s, label in pairs if label]
    rejected = [s for s, label in pairs if not label]
    won = sum((a > r) + (a == r) / 2 for a in accepted for r in rejected)
    assert auc(*arrays(pairs)) == pytest.approx(won / (len(accepted) * len(rejected)))


@pytest.mark.parametrize(
    ("scores", "labels", "expected"),
    [
        ([0.1, 0.2, 0.8, 0.9], [0, 0, 1, 1], 1.0),
        ([0.1, 0.2, 0.8, 0.9], [1, 1, 0, 0], 0.0),
        ([0.5, 0.5, 0.5], [0, 1, 1], 0.5),
        ([0.1, 0.4, 0.35, 0.8], [0, 0, 1, 1], 0.75),
    ],
)
def test_auc_known_answers(scores: list[float], labels: list[int], expected: float) -> None:
    assert auc(np.array(scores), np.array(labels, dtype=bool)) == expected


def test_auc_of_one_class_is_not_a_number() -> None:
    assert math.isnan(auc(np.array([0.1, 0.2]), np.array([True, True])))


@given(pairs=labelled)
def test_youden_is_the_middle_of_the_lowest_best_plateau(pairs: list[tuple[int, bool]]) -> None:
    scores, labels = arrays(pairs)
    # J is constant on [edge, next edge) for neighbouring edges.
    edges = sorted({0.0, 1.0, *scores.tolist()})
    best = max(j_of(edge, scores, labels) for edge in edges[:-1])
    start = next(edge for edge in edges[:-1] if j_of(edge, scores, labels) == best)
    stop = next((e for e in edges[:-1] if e > start and j_of(e, scores, labels) != best), edges[-1])
    assert youden_tau(scores, labels) == pytest.approx((start + stop) / 2)


@pytest.mark.parametrize(
    ("scores", "labels", "tau"),
    [
        ([0.2, 0.4, 0.6, 0.8], [0, 0, 1, 1], 0.5),  # the gap between the classes
        ([0.2, 0.4, 0.6, 0.8], [1, 1, 0, 0], 0.1),  # no threshold helps: everybody passes
        ([0.1, 0.3, 0.5, 0.7], [0, 1, 0, 1], 0.2),  # [.1, .3) and [.5, .7) tie: the lowest
        ([0.5, 0.5, 0.9], [0, 1, 1], 0.7),  # equal scores stay together
    ],
)
def test_youden_by_hand(scores: list[float], labels: list[int], tau: float) -> None:
    assert youden_tau(np.array(scores), np.array(labels, dtype=bool)) == pytest.approx(tau)


@pytest.mark.parametrize("label", [True, False])
def test_youden_needs_both_outcomes(label: bool) -> None:
    with pytest.raises(InputError, match="accepted and rejected samples; got"):
        youden_tau(np.array([0.1, 0.2]), np.array([label, label]))


def samples(aucs: list[float], per_class: int = 20) -> CalibrationSamples:
    """Depths with about the given AUC: a share of the accepted samples lies above all others."""
    rows = 2 * per_class
    log_c = np.full((rows, len(aucs)), math.log(0.5))
    accepted = np.zeros((rows, len(aucs)), dtype=bool)
    accepted[:per_class] = True
    for d, area in enumerate(aucs):
        high = round((2 * area - 1) * per_class)
        log_c[:high, d] = math.log(0.9)
    return CalibrationSamples(
        log_c, np.ones_like(accepted), accepted, np.arange(rows, dtype=np.int64) % 7
    )


def gated_depths(aucs: list[float], **fields: object) -> tuple[int, ...]:
    gate = ConfidenceGate.model_validate(fields).calibrate(samples(aucs), CONTEXT)
    assert gate.taus is not None
    return tuple(depth for depth, _ in gate.taus)


def test_gated_depths_are_those_above_delta() -> None:
    areas = [0.9, 0.7, 0.75, 0.6]
    assert gated_depths(areas) == (1, 3)  # 0.7 is not above the default 0.70
    assert gated_depths(areas, delta=0.72) == (1, 3)
    assert gated_depths(areas, delta=0.8) == (1,)


def test_without_a_depth_above_delta_the_three_best_are_gated() -> None:
    assert gated_depths([0.6, 0.5, 0.65, 0.55, 0.6]) == (1, 3, 5)


def test_dense_gates_every_depth() -> None:
    assert gated_depths([0.9, 0.5, 0.75, 0.6], gate_set="dense") == (1, 2, 3, 4)


def test_depths_given_by_hand_are_taken() -> None:
    assert gated_depths([0.9, 0.5, 0.75, 0.6], depths=(4, 2)) == (2, 4)


def test_a_depth_needs_ten_samples_of_both_outcomes() -> None:
    few = samples([0.9, 0.9], per_class=9)
    with pytest.raises(InputError, match="at least 10 accepted and 10 rejected"):
        ConfidenceGate().calibrate(few, CONTEXT)
    enough = samples([0.9, 0.9], per_class=10)
    enough.reached_ND[0, 1] = False  # nine accepted ones are left at depth 2
    assert [report.is_usable for report in depth_reports(enough, num_resamples=0)] == [True, False]
    gate = ConfidenceGate(gate_set="dense").calibrate(enough, CONTEXT)
    assert gate.taus is not None
    assert [depth for depth, _ in gate.taus] == [1]


def test_every_gated_depth_has_its_own_youden_threshold() -> None:
    given_samples = samples([0.9, 0.5, 0.8])
    gate = ConfidenceGate().calibrate(given_samples, CONTEXT)
    assert gate.taus == tuple((d, youden_tau(*given_samples.labelled(d))) for d in (1, 3))


def test_fixed_is_one_threshold_on_the_pooled_samples() -> None:
    given_samples = samples([0.9, 0.5, 0.8])
    gate = ConfidenceGate(threshold="fixed").calibrate(given_samples, CONTEXT)
    scores, labels = (
        np.concatenate(both)
        for both in zip(given_samples.labelled(1), given_samples.labelled(3), strict=True)
    )
    tau = youden_tau(scores, labels)
    assert gate.taus == ((1, tau), (3, tau))


def test_normalized_pools_the_depth_th_root() -> None:
    given_samples = samples([0.9, 0.5, 0.8])
    gate = ConfidenceGate(threshold="normalized").calibrate(given_samples, CONTEXT)
    (one, first), (three, third) = given_samples.labelled(1), given_samples.labelled(3)
    tau = youden_tau(np.concatenate([one, np.cbrt(three)]), np.concatenate([first, third]))
    assert gate.taus is not None
    assert [depth for depth, _ in gate.taus] == [1, 3]
    assert [t for _, t in gate.taus] == pytest.approx([tau, tau])


def test_labels_are_conditional_on_the_depth_above() -> None:
    given_samples = samples([0.9, 0.9])
    given_samples.reached_ND[5:, 1] = False
    scores, labels = given_samples.labelled(2)
    assert (scores.size, labels.size) == (5, 5)


def test_intervals_resample_requests() -> None:
    reports = depth_reports(samples([0.9, 0.6]), rng=np.random.default_rng(0), num_resamples=200)
    for report in reports:
        assert report.auc_low <= report.auc <= report.auc_high
        assert report.auc_low < report.auc_high
    one_class = samples([0.9])
    one_class.accepted_ND[:] = True
    (report,) = depth_reports(one_class, rng=np.random.default_rng(0))
    assert math.isnan(report.auc)
    assert math.isnan(report.auc_low)
    assert math.isnan(report.tau)


def test_an_empty_split_is_refused() -> None:
    with pytest.raises(InputError, match="needs recorded positions"):
        CalibrationSamples(
            np.zeros((0, 2)), np.zeros((0, 2), bool), np.zeros((0, 2), bool), np.zeros(0, np.int64)
        )


def test_width_is_chosen_by_tokens_per_second() -> None:
    speed = {1: 10.0, 2: 30.0, 3: 20.0, 4: 30.0}

    def rate(policy: Policy) -> float:
        assert isinstance(policy.scheduler, Elastic)
        assert isinstance(policy.scheduler.w_topk, int)
        return speed[policy.scheduler.w_topk]

    policy = Policy(name="echo", gate=ConfidenceGate(), scheduler=Elastic())
    context = CalibrationContext(batch_size=8, k_max=32, tokens_per_second=rate)
    fitted = policy.calibrate(samples([0.9, 0.8]), context)
    assert fitted.parameters()["w_topk"] == 2  # the smaller of two equals
    assert fitted.is_calibrated
    assert not policy.is_calibrated
    assert fitted.calibrate(samples([0.9]), context) is fitted


@pytest.mark.parametrize("k_max", [0, 32])
def test_width_is_one_where_nobody_can_tell(k_max: int) -> None:
    context = CalibrationContext(batch_size=8, k_max=k_max)
    fitted = Elastic().calibrate(samples([0.9]), context, OpenGate())
    assert fitted.w_topk == 1
    assert Elastic(w_topk=3).calibrate(samples([0.9]), context, OpenGate()).w_topk == 3


def test_a_calibrated_or_open_gate_is_left_alone() -> None:
    for gate in (ConfidenceGate(taus=((1, 0.5),)), ConfidenceGate(gate_set="off"), OpenGate()):
        assert gate.is_calibrated
        assert gate.calibrate(samples([0.9]), CONTEXT) is gate
