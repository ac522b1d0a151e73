"""Laws of the cost model: monotone, scalable, and a knee that is what its definition says."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost import PAIRS, build_cost_model
from simulator.cost.constants import shipped
from simulator.cost.memory import valid_degrees
from simulator.cost.parameters import PUBLISHED

SETUPS = sorted((name, tp) for name, pair in PAIRS.items() for tp in valid_degrees(pair.target))
MODELS = {
    (name, tp, pure): build_cost_model(name, "h100", tp, pure_roofline=pure)
    for name, tp in SETUPS
    for pure in (False, True)
}
models = st.sampled_from(sorted(MODELS)).map(MODELS.__getitem__)
rows = st.integers(1, 4096)
batches = st.integers(1, 256)
contexts = st.integers(0, 4096)


@given(model=models, rows=rows, more=rows, batch=batches, kv=st.integers(0, 10**6))
def test_forwards_never_fall_with_rows_or_kv(model, rows, more, batch, kv):
    for call in (model.verify_s, model.draft_extend_s, model.draft_layer_s):
        base_s = call(rows, batch, kv)
        tolerance_s = 1e-12 * base_s
        assert call(rows + more, batch, kv) >= base_s - tolerance_s > 0
        assert call(rows, batch, kv + more) >= base_s - tolerance_s


@given(model=models, batch=batches, context=contexts)
def test_plain_decode_grows_with_the_batch_but_not_per_request(model, batch, context):
    one_s = model.plain_decode_s(batch, batch * context)
    two_s = model.plain_decode_s(2 * batch, 2 * batch * context)
    assert one_s * (1 - 1e-12) <= two_s <= 2 * one_s * (1 + 1e-12)
    assert one_s == model.verify_s(batch, batch, batch * context)


@given(model=models, batch=batches, context=contexts, factor=st.floats(1.0, 3.0))
def test_knee_is_the_last_row_count_within_the_factor(model, batch, context, factor):
    k_max = model.knee_k_max(batch, context, factor)
    kv = batch * context
    limit_s = factor * model.plain_decode_s(batch, kv)
    assert k_max >= 0
    assert model.verify_s(batch + k_max, batch, kv) <= limit_s
    if batch + k_max < 8192:
        assert model.verify_s(batch + k_max + 1, batch, kv) > limit_s


@pytest.mark.parametrize(("name", "tp"), [("qwen3-235b", 8), ("llama-3.3-70b", 4)])
def test_all_row_counts_up_to_the_knee_are_within_the_factor(name, tp):
    model = build_cost_model(name, "h100", tp)
    k_max = model.knee_k_max(32, 512, 1.5)
    limit_s = 1.5 * model.plain_decode_s(32, 32 * 512)
    assert all(model.verify_s(32 + k, 32, 32 * 512) <= limit_s for k in range(k_max + 1))


def test_knee_search_ends_at_its_limit():
    model = build_cost_model("llama-3.1-8b", "h100", 1)
    assert model.knee_k_max(8, 512, factor=1e6) == 8192 - 8


@given(model=models, rows=rows, batch=batches, context=contexts, scale=st.floats(0.1, 10.0))
def test_scale_multiplies_every_time(model, rows, batch, context, scale):
    scaled = dataclasses.replace(model, scale=scale)
    kv = batch * context
    for name, args in (
        ("verify_s", (rows, batch, kv)),
        ("plain_decode_s", (batch, kv)),
        ("draft_extend_s", (rows, batch, kv)),
        ("draft_layer_s", (rows, batch, kv)),
        ("prefill_s", (rows + context, context)),
        ("draft_prefill_s", (rows + context, context)),
        ("select_s", (20,)),
        ("pack_s", (rows, batch)),
        ("compact_s", (rows,)),
        ("host_s", (3,)),
        ("host_s", (0,)),
    ):
        assert getattr(scaled, name)(*args) == scale * getattr(model, name)(*args)
    assert scaled.check_s == scale * model.check_s
    assert scaled.knee_k_max(batch, 512) == pytest.approx(model.knee_k_max(batch, 512), abs=1)


@given(model=models, prompt=st.integers(2, 8192), share=st.floats(0.0, 1.0))
def test_cached_prefix_only_helps(model, prompt, share):
    cached = int(share * prompt)
    assert model.prefill_s(prompt, cached) <= model.prefill_s(prompt) * (1 + 1e-12)
    assert model.draft_prefill_s(prompt, cached) <= model.draft_prefill_s(prompt) * (1 + 1e-12)


def test_nothing_to_do_costs_nothing():
    model = build_cost_model("llama-3.1-8b", "h100", 1)
    assert model.verify_s(0, 0, 0) == model.draft_extend_s(0, 0, 0) == 0.0
    assert model.draft_layer_s(0, 4, 2048) == model.prefill_s(64, 64) == 0.0
    assert model.draft_prefill_s(64, 64) == 0.0


def test_host_terms_by_kind_of_draft():
    eagle = build_cost_model("llama-3.1-8b", "h100", 1, parameters=PUBLISHED)
    chain_s, tree_s = (eagle.stages.reference_s(5, is_tree=is_tree) for is_tree in (False, True))
    assert eagle.host_s(0) == pytest.approx(0.38e-3)
    whole_s = 0.38e-3 + 1.36e-3 + 5 * 0.048e-3
    assert eagle.host_s(5) + chain_s == pytest.approx(whole_s)
    assert eagle.host_s(5, is_tree=True) + tree_s == pytest.approx(whole_s + 1.12e-3)
    independent = build_cost_model("qwen2.5-coder-1.5b", "h100", 1, parameters=PUBLISHED)
    assert independent.host_s(5) == independent.host_s(0) == pytest.approx(0.38e-3)
    assert independent.host_s(5, is_tree=True) == independent.host_s(0)
    vllm = build_cost_model("qwen3-32b", "h100", 4, engine="vllm", parameters=PUBLISHED)
    assert vllm.host_s(0) == pytest.approx(0.76e-3 + 2 * 0.35e-3)


def test_pure_roofline_has_no_host_terms_and_free_checks():
    pure = build_cost_model("qwen3-32b", "h100", 2, pure_roofline=True)
    assert (
        pure.host_s(8) == pure.host_s(8, is_tree=True) == pure.select_s(99) == pure.check_s == 0.0
    )
    fitted = build_cost_model("qwen3-32b", "h100", 2)
    assert fitted.check_s == 0.15e-3
    assert pure.verify_s(64, 8, 8192) < fitted.verify_s(64, 8, 8192)


def test_independent_draft_reads_its_weights_at_every_layer():
    model = build_cost_model("qwen2.5-coder-1.5b", "h100", 1, pure_roofline=True)
    assert model.draft_layer_s(1, 1, 0) >= model.pair.draft.streamed_bytes / 3.35e12
    # logits of one row per request: extending by more rows adds no LM head rows
    assert model.draft_extend_s(1, 1, 0) == model.draft_layer_s(1, 1, 0)
    assert model.draft_extend_s(64, 1, 0) < model.draft_layer_s(64, 1, 0)


def test_draft_that_tp_does_not_divide_is_replicated():
    model = build_cost_model("qwen2.5-coder-1.5b", "h100", 4)
    assert model.describe()["draft_tp"] == 1
    single = build_cost_model("qwen2.5-coder-1.5b", "h100", 1)
    assert model.draft_layer_s(8, 2, 512) == single.draft_layer_s(8, 2, 512)


def test_more_skewed_experts_are_cheaper():
    times_s = [
        build_cost_model("qwen3-235b", "h100", 8, moe_zipf_alpha=alpha).verify_s(16, 8, 4096)
        for alpha in (0.0, 0.3, 0.6, 1.0)
    ]
    assert times_s == sorted(times_s, reverse=True)
    assert len(set(times_s)) == 4


@pytest.mark.parametrize("pure", [False, True])
def test_description_is_json_and_names_every_constant(pure):
    model = build_cost_model("qwen3-235b", "h100", 8, pure_roofline=pure)
    text = json.dumps(model.describe(), allow_nan=False)
    described = json.loads(text)
    assert described["operators"]["moe_zipf_alpha"] == shipped().expert_zipf
    assert described["check_s"] == (0.0 if pure else 0.15e-3)
    assert described["host"]["step_s"] == (
        0.0 if pure else pytest.approx(shipped().sglang_step_ms * 1e-3)
    )
    assert "qwen3-235b" in model.label
    assert "8 x h100" in model.label
    assert "\n" not in model.label


def test_models_are_equal_by_value():
    assert build_cost_model("qwen3-8b", "h100", 1) == build_cost_model("qwen3-8b", "h100", 1)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"check_s": -1.0}, "check_s must be at least 0"),
        ({"moe_zipf_alpha": 2.5}, r"moe_zipf_alpha lie in \[0, 2\]"),
        ({"scale": 0.0}, "scale exceed 0"),
        ({"check_s": float("nan")}, "check_s must be at least 0"),
    ],
)
def test_values_out_of_range_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        build_cost_model("qwen3-8b", "h100", 1, **options)


def test_unknown_engine_offers_the_nearest():
    with pytest.raises(UnknownNameError, match="Did you mean 'sglang'"):
        build_cost_model("qwen3-8b", "h100", 1, engine="sglan")


@pytest.mark.parametrize("arguments", [(0, 512, 1.25), (8, -1, 1.25), (8, 512, 0.9)])
def test_knee_refuses_values_out_of_range(arguments):
    model = build_cost_model("qwen3-8b", "h100", 1)
    with pytest.raises(InputError, match="knee_k_max needs batch_size >= 1"):
        model.knee_k_max(*arguments)
