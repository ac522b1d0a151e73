"""ECHO's scheduler: examples worked by hand, and the invariants of echo.md 4.4."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.api import Policy, StepContext
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.registry import parse
from echo_policies.schedulers.elastic import Elastic
from echo_policies.testing.play import play
from echo_policies.testing.strategies import UNLIMITED, Situation, situations
from tests.echo_policies.situation import Tree, context, one_step

SURE: Tree = {
    (): [0.9, 0.05],
    (0,): [0.9, 0.05],
    (1,): [0.6, 0.3],
    (0, 0): [0.9, 0.05],
    (0, 0, 0): [0.9, 0.05],
}
DOUBTFUL: Tree = {(): [0.4, 0.3, 0.2], (0,): [0.5, 0.4], (0, 0): [0.5, 0.4]}


def echo(taus: tuple[tuple[int, float], ...] = ((1, 0.5),), **fields: Any) -> Policy:
    shape = {"levels": 3, "top_k": 3, "w_topk": 1, **fields}
    return Policy(
        name="echo", gate=ConfidenceGate(taus=taus), scheduler=Elastic.model_validate(shape)
    )


def test_priority_1_deepens_only_where_the_gate_is_open() -> None:
    kept, decision = one_step(echo(widen="off"), [SURE, DOUBTFUL])
    assert kept == [{"0", "00", "000"}, set()]
    assert decision.drafted_B.tolist() == [6, 3]
    assert decision.depth_B.tolist() == [3, 1]


def test_priority_2_widens_the_truncated_where_they_were_cut() -> None:
    kept, _ = one_step(echo(), [SURE, DOUBTFUL])
    assert kept == [{"0", "00", "000"}, {"0", "1", "2"}]


def test_the_failing_layer_may_be_kept() -> None:
    kept, _ = one_step(echo(failing_layer="keep", widen="off"), [SURE, DOUBTFUL])
    assert kept == [{"0", "00", "000"}, {"0"}]


def test_depth_goes_before_width() -> None:
    kept, _ = one_step(echo(), [SURE, DOUBTFUL], context(2, 4))
    assert kept == [{"0", "00", "000"}, {"0"}]


def test_the_budget_goes_to_the_most_confident_first() -> None:
    trees: list[Tree] = [{(): [0.6]}, {(): [0.9]}, {(): [0.7]}]
    assert one_step(echo(), trees, context(3, 2))[0] == [set(), {"0"}, {"0"}]
    first_come = context(3, 2, arrival=[2, 7, 1])
    assert one_step(echo(budget_order="fcfs"), trees, first_come)[0] == [{"0"}, set(), {"0"}]


def test_a_budget_below_w_topk_is_not_overspent() -> None:
    kept, _ = one_step(echo((), w_topk=3), [DOUBTFUL, DOUBTFUL], context(2, 2))
    assert kept == [{"0", "1"}, set()]


def test_round_robin_gives_one_node_per_turn_and_rotates() -> None:
    policy = echo((), w_topk=3, budget_order="round_robin", levels=1)
    live = [True, False, True, True]
    shares = [
        [len(nodes) for nodes in one_step(policy, [DOUBTFUL] * 4, ctx)[0]]
        for ctx in (context(4, 4, step=step, live=live) for step in range(4))
    ]
    assert shares == [[2, 0, 1, 1], [1, 0, 2, 1], [1, 0, 1, 2], [2, 0, 1, 1]]


def test_widening_takes_w_max_per_turn() -> None:
    wide: Tree = {(): [0.3, 0.25, 0.2, 0.1, 0.05]}
    less: Tree = {(): [0.2, 0.2, 0.2, 0.2, 0.1]}
    policy = echo(top_k=5, w_max=2)
    assert [len(n) for n in one_step(policy, [wide, less], context(2, 3))[0]] == [2, 1]
    assert [len(n) for n in one_step(policy, [wide, less], context(2, 5))[0]] == [3, 2]


def test_widening_may_reach_up_to_the_cut() -> None:
    taus = ((2, 0.99),)
    assert one_step(echo(taus), [SURE])[0] == [{"0", "00", "01"}]
    assert one_step(echo(taus, widen_depths="up_to_cut"), [SURE])[0] == [{"0", "1", "00", "01"}]


def test_complete_requests_may_be_widened_too() -> None:
    assert one_step(echo(widen="truncated"), [SURE])[0] == [{"0", "00", "000"}]
    widened = one_step(echo(widen="truncated_and_complete"), [SURE])[0]
    assert widened == [{"0", "00", "000", "001"}]
    short = context(1, remaining=[3])
    widened = one_step(echo(widen="truncated_and_complete"), [SURE], short)[0]
    assert widened == [{"0", "00", "01"}]


def test_roots_may_count_against_the_budget() -> None:
    policy = echo(budget_counts_roots=True)
    assert one_step(policy, [SURE, DOUBTFUL], context(2, 4))[0] == [{"0", "00"}, set()]
    assert one_step(policy, [SURE, DOUBTFUL], context(2, 1))[0] == [set(), set()]
    one_live = context(2, 4, live=[True, False])
    assert one_step(policy, [SURE, DOUBTFUL], one_live)[0] == [{"0", "00", "000"}, set()]


def test_no_budget_is_plain_decoding() -> None:
    _, decision = one_step(echo(), [SURE], context(1, 0))
    assert (decision.levels, decision.checks, decision.plan.levels) == (0, 0, 0)


def test_drafting_ends_with_the_budget() -> None:
    """Algorithm 1 runs while k_left > 0: no layer is drafted that could admit nothing."""
    _, decision = one_step(echo(((1, 0.5),), levels=3), [SURE], context(1, 1))
    assert decision.levels == 1
    assert decision.drafted_B.tolist() == [2]


def test_a_request_without_room_takes_no_part() -> None:
    kept, _ = one_step(echo(), [SURE, SURE], context(2, remaining=[1, 2]))
    assert kept == [set(), {"0"}]


switches = st.fixed_dictionaries(
    {
        "levels": st.integers(1, 4),
        "top_k": st.integers(1, 4),
        "w_topk": st.integers(1, 4),
        "w_max": st.integers(1, 3),
        "failing_layer": st.sampled_from(["drop", "keep"]),
        "budget_order": st.sampled_from(["confidence", "fcfs", "round_robin"]),
        "widen": st.sampled_from(["off", "truncated", "truncated_and_complete"]),
        "widen_depths": st.sampled_from(["cut_only", "up_to_cut"]),
        "budget_counts_roots": st.booleans(),
    }
)
thresholds = st.dictionaries(st.integers(1, 4), st.sampled_from([0.0, 0.1, 0.3, 0.6, 1.0])).map(
    lambda taus: tuple(taus.items())
)


@given(fields=switches, taus=thresholds, situation=situations())
def test_the_budget_is_shared_out_exactly(
    fields: dict[str, Any], taus: tuple[tuple[int, float], ...], situation: Situation
) -> None:
    """Invariants 1 to 3: within K_max, charged = packed, nothing beyond the last level."""
    states: list[Any] = []

    def note(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "select":
            states.append(args[0])

    for played in play(echo(taus, **fields), situation, note=note):
        decision = played.decision
        packed = int(decision.keep_BN.sum())
        assert packed <= situation.k_max
        assert len(decision.forest.layers) <= fields["levels"]
        if not decision.forest.layers:
            assert packed == 0
            continue
        state = states.pop(0)
        roots = int(played.ctx.live_B.sum()) if fields["budget_counts_roots"] else 0
        budget = max(situation.k_max - roots, 0)
        admitted = sum(int(count_B.sum()) for count_B in state.admitted)
        assert int(state.k_left) == budget - admitted
        assert admitted <= packed <= budget
        if fields["widen"] == "off":
            assert packed == admitted


@given(fields=switches, taus=thresholds, situation=situations())
def test_width_changes_no_depth(
    fields: dict[str, Any], taus: tuple[tuple[int, float], ...], situation: Situation
) -> None:
    """Invariant 4: widening only adds to what deepening alone would take."""
    with_width = play(echo(taus, **fields), situation)
    without = play(echo(taus, **{**fields, "widen": "off"}), situation)
    for wide, narrow in zip(with_width, without, strict=True):
        assert all(a >= b for a, b in zip(wide.plan, narrow.plan, strict=True))
        assert wide.decision.drafted_B.tolist() == narrow.decision.drafted_B.tolist()


@pytest.mark.parametrize("w_topk", [1, 2, 3])
@given(situation=situations())
def test_open_gates_and_no_limit_give_the_ungated_tree(w_topk: int, situation: Situation) -> None:
    """Invariant 5, first half."""
    situation = Situation(situation.slots, UNLIMITED, situation.step, situation.ground)
    taus = tuple((depth, 0.0) for depth in range(1, 4))
    (open_,) = play(echo(taus, w_topk=w_topk), situation)
    (ungated,) = play(echo((), w_topk=w_topk, widen="off"), situation)
    assert open_.plan == ungated.plan
    for layer, keep in zip(
        open_.decision.forest.layers,
        open_.decision.forest.split(open_.decision.keep_BN),
        strict=True,
    ):
        full_B = layer.exists_BW.sum(1).clamp(max=w_topk)
        assert keep.sum(1).tolist() == full_B.tolist()


@given(situation=situations())
def test_a_threshold_of_one_is_plain_decoding_plus_widening(situation: Situation) -> None:
    """Invariant 5, second half."""
    for played in play(echo(((1, 1.0),), widen="off"), situation):
        assert not any(played.plan)
    for played in play(echo(((1, 1.0),)), situation):
        assert len(played.decision.forest.layers) <= 1


def test_roots_that_use_up_the_budget_are_plain_decoding():
    """Kind: drafting that is paid for although nothing can be verified."""
    policy = parse("echo:budget_counts_roots=true,w_topk=1").scheduler
    one = torch.ones(4, dtype=torch.int64)
    for k_max, levels in ((4, 0), (5, 8)):
        ctx = StepContext(k_max, 0, one.bool(), one * 9, one, num_live=4)
        assert policy.begin(ctx, None)[0].levels == levels
