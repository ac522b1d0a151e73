"""Engines, weight formats, expert parallelism, and the laws over the whole domain."""

import math
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from echo_policies.errors import InputError, UnknownNameError
from simulator.cost import PAIRS, build_cost_model
from simulator.cost.host import ENGINES, GRAPHS_SGLANG, GRAPHS_TRTLLM, GRAPHS_VLLM
from simulator.cost.memory import valid_degrees
from simulator.cost.parameters import PUBLISHED
from simulator.cost.vector import verify_many_s

DOMAIN = [
    (name, hardware, tp, engine, dtype)
    for name, pair in sorted(PAIRS.items())
    for hardware, dtype in (("a100", "bf16"), ("h100", "fp8"), ("h200", "fp8_block"))
    for tp in valid_degrees(pair.target)
    for engine in ("sglang", "vllm", "trtllm", "transformers")
] + [("smollm2-135m", "cpu", 1, "cpu", "bf16")]
BUILT = {
    key: build_cost_model(key[0], key[1], key[2], engine=key[3], dtype=key[4]) for key in DOMAIN
}
models = st.sampled_from(sorted(BUILT)).map(BUILT.__getitem__)
rows = st.integers(1, 4096)
batches = st.integers(1, 256)
contexts = st.integers(0, 32_768)
ROUNDING = 1 + 1e-9


@given(model=models, rows=rows, batch=batches, context=contexts)
def test_no_cost_is_negative_or_not_a_number(model, rows, batch, context):
    kv = batch * context
    costs = [
        model.verify_s(rows, batch, kv),
        model.plain_decode_s(batch, kv),
        model.draft_extend_s(rows, batch, kv),
        model.draft_layer_s(rows, batch, kv),
        model.prefill_s(rows),
        model.draft_prefill_s(rows),
        model.host_s(0),
        model.host_s(5),
        model.host_s(5, is_tree=True),
        model.select_s(rows),
        model.pack_s(rows, batch),
        model.compact_s(rows),
        model.check_s,
        *model.verify_parts(rows, batch, kv).values(),
    ]
    assert all(math.isfinite(cost) and cost >= -1e-12 for cost in costs)


@given(
    model=models, rows=rows, more=rows, batch=batches, context_pair=st.tuples(contexts, contexts)
)
def test_cost_grows_with_tokens_and_context(model, rows, more, batch, context_pair):
    context, longer = context_pair
    base_s = model.verify_s(rows, batch, batch * context)
    assert base_s <= ROUNDING * model.verify_s(rows + more, batch, batch * context)
    assert base_s <= ROUNDING * model.verify_s(rows, batch, batch * (context + longer))
    assert model.pack_s(rows, batch) < model.pack_s(rows + more, batch)
    assert model.compact_s(rows) < model.compact_s(rows + more)
    assert model.select_s(rows) < model.select_s(rows + more)


@given(model=models, batch=batches, more=batches, context=contexts)
def test_cost_grows_with_the_batch(model, batch, more, context):
    small_s = model.plain_decode_s(batch, batch * context)
    assert small_s <= ROUNDING * model.plain_decode_s(batch + more, (batch + more) * context)


@given(
    model=models,
    parts=st.tuples(st.integers(1, 128), st.integers(1, 128)),
    tokens=st.integers(1, 16),
    context=contexts,
)
def test_two_halves_never_cost_less_than_the_whole(model, parts, tokens, context):
    one, two = parts
    # padding is a staircase: 9 rows may take the graph of 16 where 8 and 1 have graphs of their own
    model = replace(model, host=replace(model.host, pads_to_graphs=False))
    whole_s = model.verify_s((one + two) * tokens, one + two, (one + two) * context)
    halves_s = sum(model.verify_s(n * tokens, n, n * context) for n in parts)
    assert whole_s <= ROUNDING * halves_s


@given(
    model=models,
    parts=st.tuples(st.integers(1, 128), st.integers(1, 128)),
    tokens=st.integers(1, 16),
    context=contexts,
)
@example(model=BUILT["qwen3-235b", "a100", 1, "vllm", "bf16"], parts=(8, 1), tokens=1, context=0)
def test_padding_alone_may_make_the_whole_cost_more(model, parts, tokens, context):
    """With graphs, 9 rows run as 16 while 8 and 1 run as themselves.

    The whole then costs at most what the halves do, and what the smooth model asks for the rows
    that its padding has beyond theirs.
    """
    smooth = replace(model, host=replace(model.host, pads_to_graphs=False))
    both, rows_of = sum(parts), [n * tokens for n in parts]
    whole_s = model.verify_s(sum(rows_of), both, both * context)
    halves_s = sum(model.verify_s(r, n, n * context) for r, n in zip(rows_of, parts, strict=True))
    padded, apart = model.host.padded(sum(rows_of)), sum(map(model.host.padded, rows_of))
    extra_s = smooth.verify_s(padded, both, both * context)
    extra_s -= smooth.verify_s(apart, both, both * context)
    assert whole_s <= ROUNDING * (halves_s + max(0.0, extra_s))


def test_the_staircase_is_what_the_bound_is_for():
    model = BUILT["qwen3-235b", "a100", 1, "vllm", "bf16"]
    apart_s = model.verify_s(8, 8, 0) + model.verify_s(1, 1, 0)
    assert 1.0 < model.verify_s(9, 9, 0) / apart_s < 1.1


WIDER = sorted(
    (few, (*few[:2], many, *few[3:]))
    for few in DOMAIN
    for many in (2 * few[2],)
    if (*few[:2], many, *few[3:]) in BUILT
)


@given(pair=st.sampled_from(WIDER), rows=rows, batch=batches, context=contexts)
def test_tp_never_raises_the_time_of_memory(pair, rows, batch, context):
    few, many = (BUILT[key] for key in pair)
    kv = batch * context
    one, other = (model.verify_parts(rows, batch, kv) for model in (few, many))
    for part in ("gemm", "experts", "attention", "elementwise", "argmax"):
        assert other[part] <= ROUNDING * one[part]
    assert many.compact_s(rows) <= few.compact_s(rows)


def test_parts_sum_to_the_whole():
    for model in BUILT.values():
        whole_s = model.verify_s(70, 8, 4096)
        assert sum(model.verify_parts(70, 8, 4096).values()) == pytest.approx(whole_s)


def test_graphs_make_a_staircase():
    model = build_cost_model("llama-3.1-8b", "h100", 1)
    assert model.verify_s(33, 8, 4096) == model.verify_s(40, 8, 4096)
    assert model.verify_s(40, 8, 4096) < model.verify_s(41, 8, 4096)
    smooth = build_cost_model("llama-3.1-8b", "h100", 1, pads_to_graphs=False)
    assert smooth.verify_s(33, 8, 4096) < model.verify_s(33, 8, 4096)
    assert smooth.verify_s(40, 8, 4096) == model.verify_s(40, 8, 4096)
    assert model.describe()["verification"] == "ragged, padded to CUDA graphs"
    assert smooth.describe()["verification"] == "ragged"
    for sizes in (GRAPHS_SGLANG, GRAPHS_VLLM, GRAPHS_TRTLLM):
        assert list(sizes) == sorted(set(sizes))


def test_without_graphs_a_step_takes_its_launches():
    eager = build_cost_model("llama-3.1-8b", "h100", 1, engine="transformers")
    bound_s = eager.host.launch_bound_s(eager.target.kernels)
    assert eager.plain_decode_s(1, 512) == bound_s
    assert eager.verify_s(4096, 8, 4096) > bound_s  # kernels hide the launches
    graphed = build_cost_model("llama-3.1-8b", "h100", 1)
    assert graphed.plain_decode_s(1, 512) < bound_s


def test_weight_formats():
    bf16, fp8 = (build_cost_model("qwen3-32b", "h100", 1, dtype=d) for d in ("bf16", "fp8"))
    assert fp8.plain_decode_s(1, 512) < 0.65 * bf16.plain_decode_s(1, 512)
    assert fp8.draft_layer_s(8, 1, 512) == bf16.draft_layer_s(8, 1, 512)  # drafts stay bf16
    assert fp8.fits(1, 512).weight_bytes < 0.6 * bf16.fits(1, 512).weight_bytes
    assert "fp8" in fp8.label
    with pytest.raises(InputError, match="fp8 matrix units; a100 has none"):
        build_cost_model("qwen3-8b", "a100", 1, dtype="fp8")
    with pytest.raises(UnknownNameError, match="Did you mean 'fp8_block'"):
        build_cost_model("qwen3-8b", "h100", 1, dtype="fp8block")


def test_one_fp8_gemm_by_hand():
    ops = build_cost_model("qwen3-8b", "h100", 1, dtype="fp8", parameters=PUBLISHED).target.ops
    compute_s = 2 * 64 * 8192 * 4096 / (1979e12 * 0.584)
    memory_s = (64 * 4096 + 8192 * 4096 + 2 * 64 * 8192) / (3.35e12 * 0.841)
    expected_s = 6.5e-6 + (compute_s**2.52 + memory_s**2.52) ** (1 / 2.52)
    assert ops.gemm_s(64, 8192, 4096) == pytest.approx(expected_s)


def test_one_all_reduce_by_hand():
    ops = build_cost_model("qwen3-32b", "h100", 4, parameters=PUBLISHED).target.ops
    num_bytes = 64 * 5120 * 2
    assert ops.all_reduce_s(num_bytes) == pytest.approx(
        min(2.73e-6 + num_bytes / 94.5e9, 5.90e-6 + num_bytes / 209.9e9)
    )


def test_expert_parallelism():
    whole, spread = (build_cost_model("qwen3-235b", "h100", 8, ep=ep) for ep in (1, 8))
    # the same weights per rank are read either way
    one, other = (m.verify_parts(8, 8, 8192)["experts"] for m in (whole, spread))
    assert one == pytest.approx(other, rel=0.05)
    with pytest.raises(InputError, match="ep must divide tp 8 and the 128 experts"):
        build_cost_model("qwen3-235b", "h100", 8, ep=3)
    with pytest.raises(InputError, match="a dense model, which runs at ep 1"):
        build_cost_model("qwen3-8b", "h100", 8, ep=2)


def test_engines():
    assert set(ENGINES) >= {"sglang", "vllm", "trtllm", "transformers", "cpu"}
    now, then = (build_cost_model("llama-3.3-70b", "h100", 8, engine=e).host_s(8)
                 for e in ("sglang", "sglang-2025-03"))  # fmt: skip
    assert then - now == pytest.approx(2.25e-3 * (1 + 3))
    with pytest.raises(InputError, match="tp must be 1 on cpu"):
        build_cost_model("qwen3-8b", "cpu", 2, engine="cpu")


@pytest.mark.parametrize("key", sorted(BUILT)[::7])
def test_arrays_give_what_the_scalar_model_gives(key):
    model = BUILT[key]
    points = np.random.default_rng(0).integers(1, 2000, size=(50, 3))
    expected = [model.verify_s(*point) for point in points.tolist()]
    assert verify_many_s(model, *points.T) == pytest.approx(expected, rel=1e-9)


def test_ten_thousand_points_are_finite():
    rng = np.random.default_rng(0)
    rows_N, requests_N = rng.integers(64, 2048, 10_000), rng.integers(1, 64, 10_000)
    kv_N = rng.integers(0, 10**6, 10_000)
    for name, tp in (("llama-3.1-8b", 4), ("qwen3-235b", 8)):
        model = build_cost_model(name, "h100", tp)
        times_N = verify_many_s(model, rows_N, requests_N, kv_N)
        assert times_N.shape == (10_000,)
        assert np.all(np.isfinite(times_N) & (times_N > 0))


@pytest.mark.parametrize(
    ("name", "ms"),
    [("smollm2-135m", (22, 17, 19, 20, 25, 36, 56)),
     ("qwen2.5-coder-1.5b", (118, 108, 109, 126, 158, 213, 342))],
)  # fmt: skip
def test_cpu_profile_is_near_the_two_cores_it_was_set_by(name, ms):
    model = build_cost_model(name, "cpu", 1, engine="cpu")
    for tokens, measured in zip((1, 2, 4, 8, 16, 32, 64), ms, strict=True):
        assert model.verify_s(tokens, 1, 512) * 1e3 == pytest.approx(measured, rel=0.3)
