"""Paying for drafts: purchases against brute force, and what depth and readers follow."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.api import DraftPlan, Feedback, LayerView, ModelDepth, StepContext
from echo_policies.errors import SignalError
from echo_policies.forest import Forest, model_record, promised_nodes
from echo_policies.market import Market
from echo_policies.model_means import ModelMeans
from echo_policies.registry import parse
from echo_policies.schedulers.price import Price, PriceMemory
from echo_policies.session import open_session, widest_plan
from echo_policies.testing.drafter import SyntheticDrafter

NEW = PriceMemory(pace=1.0)
"""A token per step, for easy sums."""


@dataclass(frozen=True)
class Costs:
    """Seconds: a target forward is flat up to ``free`` rows, then each row costs ``row_s``."""

    row_s: float = 0.1
    free: int = 0
    layer_s: float = 0.0
    draft_row_s: float = 0.0

    def verify_s(self, rows: int) -> float:
        return 1.0 + self.row_s * max(0, rows - self.free)

    def draft_layer_s(self, rows: int) -> float:
        return self.layer_s + self.draft_row_s * rows


def context(live, costs, *, left=500, **known):
    ones = torch.ones(live, dtype=torch.int64)
    return StepContext(
        k_max=0,  # it buys instead of keeping to a budget
        step=0,
        live_B=ones.bool(),
        remaining_B=ones * left,
        arrival_B=ones.cumsum(0),
        level_limit=left - 1,
        num_live=live,
        costs=costs,
        remaining=(left,) * live,
        **known,
    )


def chains(probabilities):
    """A forest of one chain per request, from conditional probabilities [B][levels]."""
    path_BD = torch.tensor(probabilities, dtype=torch.float32).log().cumsum(1)
    layers = []
    for depth in range(path_BD.shape[1]):
        parent = None if depth == 0 else torch.zeros((len(path_BD), 1), dtype=torch.int64)
        score_B1 = path_BD[:, depth : depth + 1]
        layers.append(LayerView(depth + 1, score_B1 > -torch.inf, parent, score_B1))
    return Forest(tuple(layers), len(path_BD), path_BD.device)


def bought(probabilities, costs, *, memory=NEW, **fields):
    """Nodes per request that are verified."""
    live = len(probabilities)
    scheduler = Price(levels=len(probabilities[0]), **fields)
    _, offer = scheduler.begin(context(live, costs), memory)
    return scheduler.select(offer, chains(probabilities)).sum(1).tolist()


def test_what_a_row_costs_decides():
    """A row of 1.5 s, a plain step of 2.5 s: a row must be worth 0.6 tokens."""
    path = [[0.9] * 8]  # .9 .81 .729 .656 .59 .531 .478 .43
    assert bought(path, Costs(row_s=1.5), margin=0) == [4]
    assert bought(path, Costs(row_s=0.1), margin=0) == [8]
    assert bought(path, Costs(row_s=19.0), margin=0) == [0]


def test_known_purchase():
    """Two requests, plain step 1.4 s: a second is 10/7 tokens, a row 2/7; with the margin 0.343."""
    costs = Costs(row_s=0.2)
    given_BD = [[0.9, 0.5, 0.7], [0.33, 0.9, 0.9]]  # .9 .45 .315 and .33 .297 .267
    assert bought(given_BD, costs, margin=0) == [3, 2]
    assert bought(given_BD, costs) == [2, 0]


def test_a_dear_second_buys_less():
    """A batch that earns twice what plain decoding does must get twice as much for a row."""
    path = [[0.9] * 8]
    assert bought(path, Costs(row_s=0.5), margin=0, memory=replace(NEW, gain=2.0)) == [3]
    # Who earns less than plain decoding would could always decode plainly.
    poor = bought(path, Costs(row_s=0.5), margin=0, memory=replace(NEW, gain=0.2))
    assert poor == bought(path, Costs(row_s=0.5), margin=0)


def test_rows_that_are_free_are_bought_to_the_last():
    """Kind: stopping at the first drop of a staircase."""
    path = [[0.5, 0.1, 0.1, 0.1]]
    assert bought(path, Costs(row_s=5.0, free=4)) == [3]


@given(
    st.lists(st.lists(st.floats(0.05, 1), min_size=3, max_size=3), min_size=1, max_size=3),
    st.floats(0, 1),
    st.integers(0, 6),
    st.floats(0, 1),
    st.floats(1, 3),
)
def test_no_other_purchase_is_worth_more(probabilities, row_s, free, margin, gain):
    """Of all prefixes of all chains, by brute force."""
    costs, live = Costs(row_s=row_s, free=free), len(probabilities)
    memory = replace(NEW, gain=gain)
    market = Market.of(costs, live, gain)

    def profit(counts):
        earned = sum(
            math.prod(row[: depth + 1])
            for row, count in zip(probabilities, counts, strict=True)
            for depth in range(count)
        )
        return earned - (1 + margin) * market.nodes(sum(counts))

    best = max(map(profit, itertools.product(range(4), repeat=live)))
    chosen = bought(probabilities, costs, margin=margin, memory=memory)
    assert profit(chosen) == pytest.approx(best, abs=1e-4)


def tried(accepted, *, asked=1.0, steps=1e9):
    """A depth that was offered in so many request-steps; everything asked for is verified."""
    return ModelMeans(steps, asked * steps, asked * steps, accepted * steps)


def plan_of(costs, *, live=1, memory=NEW, **known):
    fields = {name: known.pop(name) for name in ("margin", "levels") if name in known}
    return Price(**fields).begin(context(live, costs, **known), memory)[0]


def test_a_lookup_is_always_welcome():
    plan = plan_of(Costs(row_s=0.9), live=16)
    assert plan == DraftPlan(8)


def test_depth_by_acceptance():
    """Rows free: a layer of 0.3 s, 0.3 tokens, at 0.7 adds .7, .49, .343, then .24."""
    costs = Costs(row_s=0.0, layer_s=0.3)
    assert plan_of(costs, margin=0).levels == 3
    sure = replace(NEW, depths=tuple(tried(0.9**depth) for depth in range(1, 31)))
    assert plan_of(costs, margin=0, memory=sure, levels=30).levels == 11  # 0.9 ** 11 = 0.314
    never = replace(NEW, depths=(tried(0.0),))
    assert plan_of(costs, margin=0, memory=never).levels == 0


def test_who_is_seldom_asked_must_read_more_each_time():
    """Half of the requests ask, of two; each then reads what two steps emitted."""
    seldom = replace(NEW, depths=(tried(0.35, asked=0.5),))
    dear = Costs(row_s=0.0, draft_row_s=0.34)
    assert plan_of(dear, live=2, margin=0, levels=1, memory=seldom) == DraftPlan(0)  # 0.7 for 1.36
    assert plan_of(dear, live=2, margin=0, levels=1).levels == 1  # 1.4 for 1.36


def test_a_model_that_does_not_pay_leaves_the_lookup_alone():
    costs = Costs(row_s=0.0, layer_s=0.75)
    assert plan_of(costs).levels == 0
    plan = plan_of(costs, looks_up=True)
    assert (plan.levels, plan.model_levels, plan.model_slots) == (8, 0, None)


def test_the_model_reads_up_only_where_enough_output_is_left():
    """Profit of one level: 0.7 - 0.1 tokens in every step; 1,000 tokens of 0.1 s cost 100."""
    costs = Costs(row_s=0.0, layer_s=0.0, draft_row_s=0.1)
    known = {"margin": 0, "levels": 1, "unread": (1000,)}
    assert plan_of(costs, left=200, **known).model_slots == frozenset({0})
    assert plan_of(costs, left=160, **known) == DraftPlan(0)
    alone = plan_of(costs, left=160, looks_up=True, **known)
    assert (alone.levels, alone.model_levels) == (1, 0)


def test_those_who_have_read_go_on():
    costs = Costs(row_s=0.0, layer_s=0.1, draft_row_s=0.01)
    plan = plan_of(costs, live=3, left=9, unread=(2, 5000, 1))
    assert plan.model_slots == frozenset({0, 2})
    assert plan.levels > 0


def test_a_forward_must_pay_for_those_who_share_it():
    """A layer of 0.4 s is 0.8 tokens where two decode: two of 0.7 pay for it, one does not.

    Kind: a forward that is weighed as if the whole batch drafted, and then runs for a few.
    """
    costs, known = Costs(row_s=0.0, layer_s=0.4, draft_row_s=1e-3), {"margin": 0, "levels": 1}
    both = plan_of(costs, live=2, unread=(1, 1), **known)
    assert (both.levels, both.model_slots) == (1, frozenset({0, 1}))
    assert plan_of(costs, live=2, unread=(1, 10**5), **known) == DraftPlan(0)
    cheap = plan_of(replace(costs, layer_s=0.3), live=2, unread=(1, 10**5), **known)
    assert cheap.model_slots == frozenset({0})


def test_without_costs_everything_is_planned_and_nothing_runs():
    assert widest_plan(parse("price:levels=5,top_k=2,width=3")) == DraftPlan(5, 2, 3)
    drafter = SyntheticDrafter(torch.tensor([1]))
    session = open_session(parse("price"), drafter)
    with pytest.raises(SignalError, match="weighs costs"):
        session.decide(replace(context(1, Costs()), costs=None), parse("price").scheduler.start())


def feedback(live, accepted, verified, *, layers=0, model=(), costs=Costs(), promised=0.0):
    none_B = torch.zeros(live, dtype=torch.int64)
    return Feedback(
        none_B,
        none_B[:, None] == 1,
        none_B == 0,
        0.0,
        0.0,
        0.0,
        costs=costs,
        plan=DraftPlan(4),
        num_live=live,
        num_accepted=accepted,
        num_verified=verified,
        promised=promised,
        draft_layers=layers,
        model=model,
    )


def test_a_step_that_earns_what_plain_decoding_does_changes_no_price():
    """Two rows more take 0.2 of 1.2 s, and so must bring a third of a token per request."""
    scheduler = Price()
    memory = scheduler.observe(NEW, feedback(6, 0, 0))
    assert memory.gain == pytest.approx(1.0)
    step = feedback(1, 1, 2, layers=2, costs=Costs(row_s=0.1, layer_s=0.35))
    # Plain 1.1 s; this one 1.3 s and two layers of 0.35 s for two tokens.
    memory = scheduler.observe(NEW, step)
    assert memory.gain == pytest.approx(1 + 0.1 * (2 * 1.1 / 2.0 - 1))
    assert memory.pace == pytest.approx(1.1)


def test_acceptance_that_is_not_tried_any_more_is_forgotten():
    """Kind: a model that is given up for good after a bad stretch."""
    scheduler, costs = Price(window=50), Costs(row_s=0.0, layer_s=0.3)
    memory = replace(NEW, depths=(tried(0.0, steps=100.0),))
    assert plan_of(costs, memory=memory).levels == 0
    for _ in range(500):
        memory = scheduler.observe(memory, feedback(4, 0, 0))
    assert plan_of(costs, memory=memory).levels == plan_of(costs).levels > 0


def test_scores_that_promise_too_much_are_believed_less():
    """Of 10 nodes promised, one was accepted: with the 4 before, 5 of 14.

    Kind: nodes chosen because their scores are high are those whose scores are too high.
    """
    path, costs = [[0.9] * 8], Costs(row_s=0.25)  # a row of 0.2 tokens; .9 .81 .729 .656 .59 ...
    assert bought(path, costs, margin=0) == [8]
    misled = replace(NEW, promised=10.0, paid=1.0)
    assert bought(path, costs, margin=0, memory=misled) == [5]  # 0.56 tokens
    assert bought(path, costs, margin=0, memory=misled, trust=1e6) == [8]
    # Who promises too little is taken at its word: that costs nothing but drafts.
    assert bought(path, costs, margin=0, memory=replace(NEW, promised=1.0, paid=10.0)) == [8]


def test_broken_promises_are_forgotten():
    scheduler = Price(window=10)
    memory = scheduler.observe(NEW, feedback(5, 2, 6, promised=4.5))
    assert (memory.promised, memory.paid) == (4.5, 2)
    memory = scheduler.observe(memory, feedback(5, 0, 0))
    assert memory.promised == pytest.approx(4.5 * math.exp(-0.5))
    assert memory.paid == pytest.approx(2 * math.exp(-0.5))


def test_what_kept_nodes_promise():
    forest = chains([[0.9, 0.5, 0.5], [0.5, 0.5, 0.5]])
    keep_BN = torch.tensor([[True, True, False], [True, False, False]])
    assert promised_nodes(forest, keep_BN) == pytest.approx(0.9 + 0.45 + 0.5)
    assert promised_nodes(Forest((), 2, keep_BN.device), keep_BN[:, :0]) == 0.0


def test_what_became_of_a_models_proposals():
    """Of request 0 one of three is accepted; of 1 the model made the second only, both are."""
    forest = chains([[0.9] * 3, [0.9] * 3])
    keep_BN = torch.tensor([[True, True, False], [True, True, False]])
    by_model = [torch.tensor([[one], [two]]) for one, two in ((1, 0), (1, 1), (1, 0))]
    by_model = [layer.bool() for layer in by_model]
    found = model_record(forest, keep_BN, torch.tensor([1, 2]), by_model)
    assert found == (ModelDepth(1, 1, 1), ModelDepth(2, 2, 1), ModelDepth(1, 0, 0))


def test_long_run_throughput_is_that_of_the_best_constant_rule():
    """Easy and hard steps in turn, a row at a constant price: no common number of nodes is better.

    Kind: weighing a step by itself, which buys too little where drafts are good.
    """
    costs, live = Costs(row_s=0.1), 1
    steps = [[[0.95] * 8], [[0.3] * 8]]

    def throughput(count_of):
        memory, scheduler = NEW, Price(margin=0)
        tokens = seconds = 0.0
        for number in range(400):
            chain = steps[number % 2]
            count = count_of(chain, memory, scheduler)
            emitted = sum(math.prod(chain[0][: d + 1]) for d in range(count))
            tokens += live + emitted
            seconds += costs.verify_s(live + count)
            memory = scheduler.observe(
                memory, replace(feedback(live, 0, count, costs=costs), num_accepted=emitted)
            )
        return tokens / seconds

    def priced(chain, memory, scheduler):
        _, offer = scheduler.begin(context(live, costs), memory)
        return int(scheduler.select(offer, chains(chain)).sum())

    constant = max(throughput(lambda *_, n=n: n) for n in range(9))
    assert throughput(priced) > 1.02 * constant
