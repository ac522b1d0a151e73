"""Every cost model fits the protocol; the price of one more token."""

import inspect
from dataclasses import replace

import numpy as np
import pytest

from echo_policies.errors import InputError
from echo_policies.registry import parse
from simulator.config import make_config
from simulator.cost import build_cost_model
from simulator.cost.affine import AffineCosts, build_affine_costs
from simulator.cost.aic import AicCosts
from simulator.cost.lookup import LookupCosts
from simulator.cost.measured import MeasuredCosts, build_measured_costs
from simulator.cost.protocol import StepCosts, marginal_verify_s
from simulator.cost.step import CostModel
from simulator.cost.step_group import StepGroup
from simulator.cost.step_rows import StepRow
from simulator.run import simulation_run
from simulator.setting import make_setting
from tests.simulator.fake_costs import LineCosts

METHODS = [name for name, _ in inspect.getmembers(StepCosts, inspect.isfunction) if name[0] != "_"]
PROPERTIES = {"check_s", "label"}
KINDS = [CostModel, MeasuredCosts, AffineCosts, AicCosts, LookupCosts, LineCosts]


def test_the_protocol_names_what_the_engine_and_the_setting_use():
    assert set(METHODS) | PROPERTIES == {
        *("verify_s", "plain_decode_s", "draft_extend_s", "draft_layer_s", "prefill_s"),
        *("draft_prefill_s", "check_s", "select_s", "pack_s", "compact_s", "host_s", "knee_k_max"),
        *("fits", "label", "describe", "verify_parts"),
    }


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("method", METHODS)
def test_a_cost_model_takes_the_arguments_of_the_protocol(kind, method):
    wanted = inspect.signature(getattr(StepCosts, method)).parameters
    taken = inspect.signature(getattr(kind, method)).parameters
    assert list(taken)[: len(wanted)] == list(wanted)
    assert all(p.default is not p.empty for p in list(taken.values())[len(wanted) :])
    assert [taken[name].default for name in wanted] == [p.default for p in wanted.values()]


def test_computed_and_fake_models_are_step_costs():
    computed: StepCosts = build_cost_model("llama-3.1-8b", "h100", 1)
    fake: StepCosts = LineCosts()
    assert isinstance(computed, StepCosts)
    assert isinstance(fake, StepCosts)
    assert not isinstance(object(), StepCosts)


def test_prompt_lookup_pays_for_verification_and_host_but_for_no_draft():
    model = build_cost_model("llama-3.1-8b", "h100", 1)
    lookup: StepCosts = LookupCosts(model)
    assert lookup.draft_extend_s(8, 8, 8192) == lookup.draft_layer_s(8, 8, 8192) == 0
    assert lookup.draft_prefill_s(1000) == 0
    assert lookup.host_s(8) == lookup.host_s(1) == model.host_s(1) < model.host_s(8)
    assert lookup.host_s(0) == model.host_s(0)
    assert lookup.verify_s(40, 8, 8192) == model.verify_s(40, 8, 8192)
    assert lookup.knee_k_max(8, 1024) == model.knee_k_max(8, 1024)
    assert "prompt lookup" in lookup.label


@pytest.mark.parametrize("span", [1, 7, 64])
def test_price_of_a_line_is_its_slope(span):
    assert marginal_verify_s(LineCosts(), 40, 8, 8192, span) == pytest.approx(0.01e-3)


def test_price_of_a_computed_model_is_low_before_the_knee_and_high_beyond():
    costs = build_cost_model("llama-3.1-8b", "h100", 1)
    before, beyond = (marginal_verify_s(costs, rows, 8, 8192, span=64) for rows in (16, 1024))
    assert 0.0 <= before < 0.5 * beyond
    assert beyond == pytest.approx(24.3e-6, rel=0.25)  # hardware.md section 3, column m


@pytest.mark.parametrize(("rows", "requests", "span"), [(8, 0, 1), (7, 8, 1), (8, 8, 0)])
def test_price_of_nothing_is_refused(rows, requests, span):
    with pytest.raises(InputError, match=f"got {requests}, {rows} and {span}"):
        marginal_verify_s(LineCosts(), rows, requests, 0, span)


@pytest.mark.parametrize("kind", ["measured", "affine"])
def test_a_simulation_takes_any_step_costs(kind, trace_file):
    """Rows of a law give the same run as the law itself: host and drafts are charged once."""
    line = LineCosts()
    rows = [
        StepRow(
            line=2,
            model="m",
            tp=1,
            batch=batch,
            context=context,
            tokens=tokens,
            ms=1e3 * (line.verify_s(batch * tokens, batch, batch * context) + line.host_s(0)),
        )
        for batch in (1, 4)
        for tokens in (1, 40)
        for context in (1, 4096)
    ]
    build = {"measured": build_measured_costs, "affine": build_affine_costs}[kind]
    spec = "static:tree=0/1/00/01"
    config = make_config(policies=(spec,), trace=str(trace_file), target="llama-3.1-8b", k_max=24)
    setting = make_setting(config)
    wanted, got = (
        simulation_run(replace(setting, cost=cost), parse(spec), 4, 24).records("lower")
        for cost in (line, build(StepGroup(tuple(rows), {}), line))
    )
    assert len(got.step_s) > 0
    np.testing.assert_allclose(got.step_s, wanted.step_s, rtol=1e-9)
