"""A cost model read from a table of measured steps."""

import csv
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError
from simulator.cost import build_cost_model
from simulator.cost.interpolate import build_table
from simulator.cost.measured import build_measured_costs
from simulator.cost.protocol import StepCosts, marginal_verify_s
from simulator.cost.step_group import select_rows
from simulator.cost.step_rows import read_step_rows
from tests.simulator.fake_costs import LineCosts
from tests.simulator.outside import STEP_TIMES

HEADER = "model,tp,batch,context,tokens,ms"
BATCHES, TOKENS, CONTEXTS = (1, 4, 16), (1, 2, 8, 32), (256, 1024, 4096)


def law_ms(batch, tokens, context):
    """Multilinear, so that interpolation is exact; grows along every axis."""
    return 2.0 + 0.01 * batch * tokens + 1e-5 * batch * context


GRID = [f"m,2,{b},{c},{t},{law_ms(b, t, c)!r}" for b in BATCHES for t in TOKENS for c in CONTEXTS]


@pytest.fixture
def write(tmp_path):
    def written(lines, header=HEADER):
        path = tmp_path / "steps.csv"
        path.write_text("\n".join([header, *lines]) + "\n")
        return path

    return written


def measured(path, **options):
    group = select_rows(read_step_rows(path), "m", 2)
    return build_measured_costs(group, LineCosts(), **options)


def test_the_tables_own_points_are_returned_exactly(write):
    costs = measured(write(GRID))
    for b in BATCHES:
        for t in TOKENS:
            for c in CONTEXTS:
                assert costs.verify_s(b * t, b, b * c) == law_ms(b, t, c) / 1e3
    assert isinstance(costs, StepCosts)
    assert costs.verify_s(0, 4, 4096) == 0.0


@given(st.integers(1, 16), st.integers(0, 500), st.integers(256, 4096))
def test_a_multilinear_law_is_interpolated_exactly(batch, nodes, context):
    points = {(b, t, c): law_ms(b, t, c) for b in BATCHES for t in TOKENS for c in CONTEXTS}
    table = build_table("t", ("b", "t", "c"), points)
    tokens = 1 + nodes / batch if nodes <= 31 * batch else 32
    expected = law_ms(batch, tokens, context)
    assert table.at(batch, tokens, context) == pytest.approx(expected, rel=1e-12)


@given(
    st.lists(st.floats(0.0, 5.0), min_size=27, max_size=27),
    st.tuples(*[st.floats(0.95, 10.5)] * 3),
    st.tuples(*[st.floats(0.0, 5.0)] * 3),
)
def test_a_table_that_grows_is_interpolated_growing(steps, place, more):
    axis = (1.0, 3.0, 10.0)
    places = [(a, b, c) for a in range(3) for b in range(3) for c in range(3)]
    values = {  # the sum of the steps at or below a place grows along every axis
        tuple(axis[i] for i in place): 1.0
        + sum(s for s, q in zip(steps, places, strict=True) if all(map(int.__le__, q, place)))
        for place in places
    }
    table = build_table("t", ("a", "b", "c"), values, margin=0.05)
    beyond = tuple(min(10.5, a + b) for a, b in zip(place, more, strict=True))
    low, high = table.at(*place), table.at(*beyond)
    assert 1.0 <= low <= high * (1.0 + 1e-12)


@pytest.mark.parametrize(
    ("rows", "batch", "kv", "message"),
    [
        (18, 18, 18 * 256, "covers batch 1 to 16 and may be left by 10%; got 18"),
        (36 * 4, 4, 4 * 256, r"tokens per request 1 to 32 \(at batch 4\) and .* got 36"),
        (8, 4, 4 * 200, r"context 256 to 4096 \(at batch 4, tokens per request 2\).* got 200"),
        (8, 4, 4 * 5000, "got 5000. Measure there, or use a computed cost model"),
    ],
)
def test_far_outside_is_refused_with_the_measured_range(rows, batch, kv, message, write):
    with pytest.raises(InputError, match=message):
        measured(write(GRID)).verify_s(rows, batch, kv)


def test_the_margin_is_the_callers(write):
    path = write(GRID)
    assert measured(path, margin=0.5).verify_s(18, 18, 18 * 256) > 0.0
    with pytest.raises(InputError, match="left by 0%; got 17"):
        measured(path, margin=0.0).verify_s(17, 17, 17 * 256)
    with pytest.raises(InputError, match=r"margin must lie in \[0, 1\]; got 1.5"):
        measured(path, margin=1.5)


def test_points_need_not_fill_a_grid(write):
    lines = ["m,2,1,512,1,3.0", "m,2,8,512,1,4.0", "m,2,8,512,4,5.0", "m,2,8,2048,4,6.0"]
    costs = measured(write(lines))
    assert costs.verify_s(32, 8, 8 * 1280) == pytest.approx(5.5e-3)
    assert costs.verify_s(20, 8, 8 * 512) == pytest.approx(4.5e-3)
    with pytest.raises(InputError, match=r"context 512 to 512 \(at batch 8, tokens per request 1"):
        costs.verify_s(8, 8, 8 * 1024)


def test_rows_at_one_point_count_as_their_median(write):
    lines = [f"m,2,1,512,1,{ms}" for ms in (3.0, 3.1, 9.0)]
    assert measured(write(lines)).plain_decode_s(1, 512) == pytest.approx(3.1e-3)


def test_the_rest_comes_from_the_fallback_and_is_named(write):
    costs = measured(write(GRID), scale=2.0)
    line = LineCosts()
    assert costs.draft_extend_s(4, 4, 99) == 2.0 * line.draft_extend_s(4, 4, 99)
    assert costs.draft_layer_s(4, 4, 99) == 2.0 * line.draft_layer_s(4, 4, 99)
    assert costs.prefill_s(100, 10) == 2.0 * line.prefill_s(100, 10)
    assert costs.draft_prefill_s(100) == 2.0 * line.draft_prefill_s(100)
    assert costs.check_s == 2.0 * line.check_s
    assert costs.select_s(7) == 2.0 * line.select_s(7)
    assert costs.pack_s(40, 4) == 2.0 * line.pack_s(40, 4)
    assert costs.compact_s(9) == 2.0 * line.compact_s(9)
    assert costs.fits(8, 512).is_enough
    told = costs.describe()
    assert "draft_layer_s" in told["from_fallback"]
    assert "verify_s" in told["from_rows"]
    assert told["fallback"] == {"label": "line"}
    assert told["ranges"] == {
        "batch": [1.0, 16.0],
        "tokens per request": [1.0, 32.0],
        "context": [256.0, 4096.0],
    }
    assert costs.label == (
        "m tp 2: table of 36 measured steps; drafts, prefill, checks, selection, packing, "
        "compaction, host and memory from line"
    )
    assert replace(costs, scale=1.0).verify_s(4, 4, 4096) == costs.verify_s(4, 4, 4096) / 2.0


def test_the_host_is_charged_once(write):
    whole = measured(write(GRID))
    kernels = measured(write(GRID), has_host=False)
    assert whole.host_s(0) == 0.0
    assert whole.host_s(4) == pytest.approx(4 * 0.05e-3)
    assert whole.host_s(4, is_tree=True) == pytest.approx(4 * 0.05e-3 + 0.1e-3)
    assert kernels.host_s(4) == LineCosts().host_s(4)


def test_knee_is_the_last_row_within_the_factor(write):
    costs = measured(write(GRID))
    plain_ms = law_ms(4, 1, 1024)
    assert costs.knee_k_max(4, 1024) == int(0.25 * plain_ms / 0.01)
    assert costs.knee_k_max(4, 1024, 1.0) == 0


def test_knee_beyond_the_table_is_refused(write):
    with pytest.raises(InputError, match="beyond the 32 tokens per request that were measured"):
        measured(write(GRID)).knee_k_max(1, 1024)
    with pytest.raises(InputError, match="batch_size >= 1"):
        measured(write(GRID)).knee_k_max(0, 1024)


def test_price_from_a_table(write):
    assert marginal_verify_s(measured(write(GRID)), 32, 4, 4096, 8) == pytest.approx(0.01e-3)


def test_microseconds_for_milliseconds_are_found_by_the_computed_model(write):
    lines = [f"m,2,{b},1024,1,{1e3 * law_ms(b, 1, 1024)}" for b in BATCHES]
    with pytest.raises(InputError, match="as if they were in microseconds"):
        measured(write(lines))


@pytest.mark.skipif(not STEP_TIMES.exists(), reason="needs the shared data")
def test_the_development_rows_of_an_engine_are_returned():
    rows = read_step_rows(STEP_TIMES)
    with STEP_TIMES.open(newline="") as file:
        assert len(rows) == len(list(csv.DictReader(file)))
    group = select_rows(rows, "llama-3.1-8b", 4, engine="trtllm")
    costs = build_measured_costs(group, build_cost_model("llama-3.1-8b", "h100", 4))
    row = group.rows[0]
    got_s = costs.plain_decode_s(row.batch, int(row.batch * row.context))
    assert got_s == pytest.approx(row.step_s)


def test_rows_of_a_draft_time_drafts_by_rows(write):
    """2 rows 3 ms, 4 rows 4 ms (median of two), then the last slope; target rows stay apart."""
    lines = [f"{line},verify" for line in GRID]
    lines += [
        "m,2,1,256,2,3,draft_layer",
        "m,2,2,256,2,4,draft_layer",
        "m,2,1,1024,4,4,draft_layer",
    ]
    costs = measured(write(lines, f"{HEADER},kind"))
    assert costs.draft_layer_s(1, 1, 0) == costs.draft_extend_s(2, 1, 0) == 0.003
    assert costs.draft_layer_s(3, 1, 0) == pytest.approx(0.0035)
    assert costs.draft_extend_s(10, 2, 9999) == pytest.approx(0.007)
    assert costs.draft_layer_s(0, 1, 0) == 0.0
    assert costs.verify_s(4, 1, 256) == measured(write(GRID)).verify_s(4, 1, 256)
    assert costs.label.startswith("m tp 2: table of 36 measured steps and 3 draft layers; prefill")
    assert "draft_layer_s" in costs.describe()["from_rows"]
    assert "draft_layer_s" not in costs.describe()["from_fallback"]


def test_rows_of_a_draft_alone_are_no_table(write):
    with pytest.raises(InputError, match="must hold a target's forwards"):
        measured(write(["m,2,1,256,2,3,draft_layer"], f"{HEADER},kind"))
