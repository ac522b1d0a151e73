"""Falling back to plain decoding: known answers, what probes may cost, and how it is named."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.api import Feedback, Policy, StepContext
from echo_policies.errors import InputError, SignalError, UnknownNameError
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.registry import parse, parse_list
from echo_policies.schedulers.fallback import FIRST_WAIT, Fallback
from echo_policies.schedulers.static import Chain
from echo_policies.session import open_session
from echo_policies.testing.drafter import SyntheticDrafter


@dataclass(frozen=True)
class Prices:
    """A forward of the target takes a second and so much per row; a draft layer a constant."""

    row_s: float = 0.0
    layer_s: float = 0.0

    def verify_s(self, rows: int) -> float:
        return 1.0 + self.row_s * rows

    def draft_layer_s(self, rows: int) -> float:
        del rows
        return self.layer_s


def context(live, costs, step=0):
    ones = torch.ones(live, dtype=torch.int64)
    return StepContext(
        64, step, ones.bool(), ones * 500, ones.cumsum(0), 499, num_live=live, costs=costs
    )


def plain_feedback(live):
    none = torch.zeros(live, dtype=torch.int64)
    keep = torch.zeros((live, 0), dtype=torch.bool)
    return Feedback(none, keep, none == 0, 0.0, 1.0, 1.0, num_live=live)


def drafted_feedback(live, levels, accepted):
    return replace(
        plain_feedback(live),
        num_accepted=accepted,
        num_verified=live * levels,
        has_drafted=True,
        draft_layers=levels,
    )


def drive(scheduler, costs_at, accepted_at, *, live, steps):
    """Which steps drafted, and seconds and tokens per request over all of them."""
    memory = scheduler.start()
    drafted, seconds, tokens = [], 0.0, 0.0
    for step in range(steps):
        costs = costs_at(step)
        plan, _ = scheduler.begin(context(live, costs, step), memory)
        drafted.append(plan.levels > 0)
        if plan.levels:
            levels, accepted = plan.levels, accepted_at(step)
            seconds += costs.verify_s(live * (1 + levels)) + levels * costs.layer_s
            tokens += 1 + accepted / live
            memory = scheduler.observe(memory, drafted_feedback(live, levels, accepted))
        else:
            seconds += costs.verify_s(live)
            tokens += 1
            memory = scheduler.observe(memory, plain_feedback(live))
    return drafted, seconds, tokens


def chain(levels=2, **fields):
    return Fallback(inner=Chain(levels=levels), **fields)


def test_drafting_that_pays_is_left_alone():
    """Two layers at 0.2 s, one token accepted: 2 tokens in 1.4 s against 1 in 1 s."""
    drafted, _, _ = drive(chain(), lambda _: Prices(layer_s=0.2), lambda _: 8, live=8, steps=50)
    assert all(drafted)


def test_drafting_that_does_not_pay_ends_with_the_probe_and_waits_longer_each_time():
    """Two layers at 0.3 s, half a token: 1.5 tokens in 1.6 s. A probe loses 0.1 plain steps."""
    drafted, _, _ = drive(
        chain(probe=8), lambda _: Prices(layer_s=0.3), lambda _: 4, live=8, steps=120
    )
    starts = [step for step, is_drafted in enumerate(drafted) if is_drafted]
    gaps = [b - a - 1 for a, b in itertools.pairwise(starts)]
    assert gaps == [FIRST_WAIT, 2 * FIRST_WAIT, 4 * FIRST_WAIT]


def test_a_probe_at_batch_1_lasts_as_many_steps_as_it_needs_request_steps():
    drafted, _, _ = drive(
        chain(probe=8), lambda _: Prices(layer_s=0.4), lambda _: 0, live=1, steps=20
    )
    assert drafted == [True] * 8 + [False] * 12


def test_a_dear_probe_waits_until_its_loss_is_a_hundredth_of_the_time():
    """Two layers at 0.8 s, nothing accepted: 1 token in 2.6 s loses 1.6 steps, so 160 of quiet."""
    drafted, _, _ = drive(
        chain(tax=0.01), lambda _: Prices(layer_s=0.8), lambda _: 0, live=8, steps=200
    )
    assert [step for step, is_drafted in enumerate(drafted) if is_drafted] == [0, 161]


def test_what_could_not_pay_at_best_is_never_tried():
    """0.95 a level gives 2.85 tokens; a step of two layers at 0.95 s takes 2.9."""
    drafted, _, _ = drive(chain(), lambda _: Prices(layer_s=0.95), lambda _: 16, live=8, steps=300)
    assert not any(drafted)


def test_cheaper_steps_take_drafting_up_again_without_a_probe():
    """Kind: an estimate that is forgotten, or prices that are looked at once."""
    drafted, _, _ = drive(
        chain(),
        lambda step: Prices(layer_s=0.4 if step < 5 else 0.1),
        lambda _: 4,
        live=8,
        steps=8,
    )
    assert drafted == [True, *[False] * 4, True, True, True]


def test_better_acceptance_is_found_by_a_probe():
    drafted, _, _ = drive(
        chain(), lambda _: Prices(layer_s=0.2), lambda s: 0 if s < 10 else 16, live=8, steps=200
    )
    assert not any(drafted[1:10])
    assert all(drafted[-50:])


def test_a_step_in_which_nobody_can_draft_ends_nothing():
    """Kind: the last token of an output that is taken for a verdict."""
    scheduler, costs = chain(probe=4), Prices(layer_s=0.2)
    memory = scheduler.start()
    for _ in range(6):
        memory = scheduler.observe(memory, drafted_feedback(1, 2, 1))
    last = replace(context(1, costs), level_limit=0)
    plan, _ = scheduler.begin(last, memory)
    memory = scheduler.observe(memory, plain_feedback(1))
    plan, _ = scheduler.begin(context(1, costs), memory)
    assert plan.levels == 2
    assert memory.failed == 0


def test_drafting_that_costs_nothing_goes_on_without_earning_anything():
    """Kind: a lookup that finds nothing for a while and is not asked when it would."""
    drafted, _, _ = drive(chain(), lambda _: Prices(), lambda _: 0, live=8, steps=40)
    assert all(drafted)


@pytest.mark.parametrize(("accepted", "goes_on"), [(45, True), (44, False)])
def test_drafting_must_earn_its_cost_and_the_margin_of_it(accepted, goes_on):
    """Two layers at 0.2 s cost 0.4 steps, with the margin 0.46; a loss of 0.01 is let go."""
    drafted, _, _ = drive(
        chain(), lambda _: Prices(layer_s=0.2), lambda _: accepted, live=100, steps=16
    )
    assert drafted == [True, *[goes_on] * 15]


def drive_slow(scheduler, *, plain, drafted, accepted, live, steps):
    """Which steps drafted where steps take longer than the cost view says."""
    costs, memory, found = Prices(layer_s=0.2), scheduler.start(), []
    for step in range(steps):
        plan, _ = scheduler.begin(context(live, costs, step), memory)
        found.append(plan.levels > 0)
        seen = plain_feedback(live)
        said_s, ratio = costs.verify_s(live), plain
        if plan.levels:
            seen = drafted_feedback(live, plan.levels, accepted)
            said_s, ratio = costs.verify_s(live * 3) + 2 * costs.layer_s, drafted
        prefill_s = 5.0 * (step % 3)  # is no part of what drafting costs
        spent_s = ratio * said_s + prefill_s
        seen = replace(seen, step_s=spent_s, prefill_s=prefill_s, costs=costs, plan=plan)
        memory = scheduler.observe(memory, seen)
    return found


def test_drafted_steps_that_take_longer_than_the_cost_view_says_end_drafting():
    """1.5 tokens in 1.4 s pay, in 1.68 s they do not. Kind: a forecast nobody checks."""
    slow = drive_slow(chain(), plain=1.0, drafted=1.2, accepted=4, live=8, steps=16)
    assert slow == [True, *[False] * 15]


def test_a_machine_that_is_slow_at_everything_goes_on_drafting():
    """Plain steps are believed until one is seen; then drafting is taken up without a probe."""
    slow = drive_slow(chain(), plain=1.2, drafted=1.2, accepted=5, live=8, steps=60)
    assert slow[:4] == [True, False, True, True]
    assert all(slow[2:])


@settings(max_examples=40, deadline=None)
@given(
    layer_s=st.floats(0.0, 1.0),
    row_s=st.floats(0.0, 0.2),
    live=st.integers(1, 32),
    levels=st.integers(1, 6),
    accepted=st.floats(0.0, 1.0),
)
def test_never_below_plain_beyond_probes(layer_s, row_s, live, levels, accepted):
    """Whatever the prices and the acceptance, all but two probes is within the tax."""
    costs, tokens_each = Prices(row_s, layer_s), round(accepted * levels * live)
    scheduler = chain(levels, probe=4, tax=0.01)
    _, seconds, tokens = drive(
        scheduler, lambda _: costs, lambda _: tokens_each, live=live, steps=400
    )
    plain_s = costs.verify_s(live)
    step_s = costs.verify_s(live * (1 + levels)) + levels * layer_s
    loss_s = max(0.0, step_s - (1 + tokens_each / live) * plain_s) * math.ceil(4 / live)
    assert seconds <= tokens * plain_s * (1 + scheduler.tax) + 2 * loss_s + 1e-6


def test_it_refuses_to_run_without_costs():
    policy = parse("chain+fallback")
    session = open_session(policy, SyntheticDrafter(torch.zeros(2, dtype=torch.int64)))
    with pytest.raises(SignalError, match=r"'chain\+fallback' weighs costs"):
        session.decide(context(2, None), policy.scheduler.start())


def test_names_and_parameters():
    one, two, three = parse_list(
        ["chain:levels=3+fallback,echo:w_topk=1+fallback:probe=2,tax=0.1", "eagle3"]
    )
    assert one.name == "chain:levels=3+fallback"
    assert one.scheduler == chain(3)
    assert two.name == "echo:w_topk=1+fallback:probe=2,tax=0.1"
    assert isinstance(two.scheduler, Fallback)
    assert (two.scheduler.probe, two.scheduler.tax) == (2, 0.1)
    assert two.scheduler.inner == parse("echo:w_topk=1").scheduler
    assert isinstance(two.gate, ConfidenceGate)
    assert two.needs == parse("echo").needs
    assert three.name == "eagle3"


def test_what_is_no_wrapper_is_refused():
    with pytest.raises(UnknownNameError, match="Did you mean 'fallback'"):
        parse("chain+fallbak")
    with pytest.raises(UnknownNameError, match="parameter of 'chain'"):
        parse("chain+fallback:prob=3")
    with pytest.raises(InputError, match="probe"):
        parse("chain+fallback:probe=0")


def test_json_knows_the_inner_scheduler_again():
    scheduler = parse("eagle3:levels=3+fallback").scheduler
    assert Fallback.model_validate_json(scheduler.model_dump_json()) == scheduler
    broken = scheduler.model_dump() | {"inner": {"kind": "NoSuch"}}
    with pytest.raises(ValueError, match="loaded scheduler"):
        Fallback.model_validate(broken)


def test_a_policy_of_ones_own_can_be_wrapped():
    policy = Policy(name="own", gate=parse("chain").gate, scheduler=Fallback(inner=Chain()))
    assert policy.parameters()["inner"] == {"kind": "Chain", "levels": 4}
