"""Costs as policies know them in a real run: curves by rows, and a policy that goes by them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_backend.curve import Curve
from gpu_backend.measured_costs import MeasuredCosts, measure_costs
from gpu_backend.parity import check_parity
from gpu_backend.serving import ServeSettings
from tests.gpu_backend.serve import (
    GREEDY,
    calibrated,
    make_engine,
    make_pair,
    requests,
    serve,
    true_output,
)
from tests.gpu_backend.tiny import tiny_model

CHEAP = MeasuredCosts(Curve((1, 8), (1.0, 1.1)), Curve((1,), (0.01,)))
DEAR = MeasuredCosts(Curve((1, 8), (1.0, 1.1)), Curve((1,), (0.45,)))
PROMPTS = [[5, 6, 7, 8], [9, 10], [11, 12, 13, 14, 15]]


@pytest.mark.parametrize(
    ("rows", "seconds"),
    [(0, 0.0), (1, 2.0), (2, 2.0), (4, 3.0), (6, 4.0), (8, 6.0), (10, 8.0)],
)
def test_a_curve_is_linear_between_sizes_and_beyond_them(rows, seconds):
    assert Curve((2, 6, 8), (2.0, 4.0, 6.0)).at(rows) == seconds


def test_one_size_is_a_constant():
    assert Curve((4,), (2.0,)).at(100) == 2.0


@given(
    st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=6),
    st.integers(1, 300),
    st.integers(1, 300),
)
def test_more_rows_are_never_cheaper(steps, one, other):
    seconds = [sum(steps[: i + 1]) for i in range(len(steps))]
    curve = Curve(tuple(3 * i + 1 for i in range(len(steps))), tuple(seconds))
    low, high = sorted((one, other))
    assert curve.at(low) <= curve.at(high)


class Paid:
    """A clock under which a forward takes what a price list says of its rows."""

    def __init__(self, *models):
        self.seconds, self.sizes = 0.0, {id(model): [] for model in models}
        for model in models:
            self.watch(model)

    def watch(self, model):
        forward = model.forward

        def counting(input_ids, **options):
            rows = input_ids.shape[1]
            self.sizes[id(model)].append(rows)
            self.seconds += 1.0 + max(0, rows - 8)
            return forward(input_ids=input_ids, **options)

        model.forward = counting

    def __call__(self):
        return self.seconds


def test_target_and_draft_are_timed_from_a_row_to_whole_trees():
    """Three requests: 1 and 2 of them, then trees; 12 rows take 5 s, beyond 4 times 1 s."""
    pair = make_pair(draft="close")
    clock = Paid(pair.target, pair.draft)
    costs = measure_costs(pair, batch_size=3, context=5, most_nodes=20, most_width=3, clock=clock)
    assert costs.verify.rows == (1, 2, 3, 6, 9, 12)
    assert costs.verify.seconds == (1, 1, 1, 1, 2, 5)
    assert costs.draft.rows == (1, 2, 3, 6, 8, 9, 32)  # 8 and 32 of one request that is behind
    assert costs.draft_layer_s(9) == 2.0
    sizes = [1, 2, 3, 6, 8, 9, 32]
    assert clock.sizes[id(pair.draft)] == [n for n in sizes for _ in range(2)] + sizes


def test_without_a_draft_model_only_the_target_is_timed():
    pair = make_pair(draft="lookup")
    clock = Paid(pair.target)
    costs = measure_costs(pair, batch_size=2, context=5, most_nodes=2, most_width=1, clock=clock)
    assert costs.verify.rows == (1, 2, 4, 6)
    assert clock.sizes[id(pair.target)] == [1, 1, 2, 2, 4, 4, 6, 6, 1, 2, 4, 6]
    assert costs.draft is None
    assert costs.draft_layer_s(10) == 0.0


@pytest.mark.parametrize(("costs", "drafts"), [(CHEAP, True), (DEAR, False)])
def test_the_engine_falls_back_by_what_it_measured(costs, drafts):
    """A draft that is never right: five levels at 0.01 s are tried again, at 0.45 s they end."""
    pair, asked = make_pair(draft="same" if drafts else "different"), requests(PROMPTS, 30)
    engine = make_engine(pair, "chain:levels=3+fallback:probe=4", asked, costs=costs)
    expected = {r.number: true_output(tiny_model(seed=1), r) for r in asked}
    assert serve(engine, asked) == expected
    records = engine.log.freeze()
    share = (records.levels_S > 0).mean()
    assert share > 0.8 if drafts else share < 0.4


@pytest.mark.parametrize(
    "spec", ["chain:levels=3", "eagle3:levels=3,top_k=2,nodes=4", "echo:w_topk=2"]
)
@pytest.mark.parametrize("draft", ["close", "different"])
def test_replay_falls_back_in_the_same_steps(spec, draft):
    """Plain steps and probes alternate at these prices; the replay sees the same numbers."""
    costs = MeasuredCosts(Curve((1, 8), (1.0, 1.1)), Curve((1,), (0.3,)))
    options = {"num_slots": 2, "k_max": 8, "max_tokens": 45, "sampling": GREEDY, "costs": costs}
    policy = calibrated(f"{spec}+fallback:probe=2,tax=1,best_case=1")
    report = check_parity(
        make_pair(draft=draft), policy, ServeSettings(**options), requests(PROMPTS, 30)
    )
    assert report.first is None
    assert report.drafts > 0
    if draft == "different":
        assert report.drafts < report.request_steps
