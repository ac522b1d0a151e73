"""One kernel: floors, bounds, the smooth knee, expert coverage and all-reduce."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulator.cost.experts import distinct_experts, inclusion_probabilities
from simulator.cost.operators import ALL_REDUCE, build_operators
from simulator.cost.parameters import PUBLISHED
from simulator.hardware import find_hardware

H100 = find_hardware("h100")
FITTED = build_operators(H100, 8, PUBLISHED, pure_roofline=False, moe_zipf_alpha=0.6)
PURE = build_operators(H100, 8, PUBLISHED, pure_roofline=True, moe_zipf_alpha=0.6)


@pytest.mark.parametrize(
    ("alpha", "expected"),
    [
        (0.0, (8, 29, 52, 82, 101, 112, 126, 128)),
        (0.6, (8, 27, 46, 71, 88, 99, 119, 127)),
        (1.0, (8, 22, 36, 54, 68, 78, 102, 120)),
    ],
)
def test_expert_coverage_matches_section_4_3(alpha, expected):
    tokens = (1, 4, 8, 16, 24, 32, 64, 128)
    coverage = [distinct_experts(128, 8, alpha, count) for count in tokens]
    # the page prints 36 for 35.486 (alpha 1, T = 8); all else is met by rounding
    assert coverage == pytest.approx(expected, abs=0.52)


@given(
    experts=st.integers(1, 200),
    share=st.floats(0.0, 1.0),
    alpha=st.floats(0.0, 3.0),
)
def test_inclusion_probabilities_sum_to_the_experts_per_token(experts, share, alpha):
    per_token = max(1, round(share * experts))
    probabilities = inclusion_probabilities(experts, per_token, alpha)
    assert len(probabilities) == experts
    assert all(0.0 < p <= 1.0 + 1e-12 for p in probabilities)
    assert list(probabilities) == sorted(probabilities, reverse=True)
    assert math.fsum(probabilities) == pytest.approx(per_token)


def test_uniform_coverage_has_its_closed_form():
    for tokens in (1, 7, 50):
        closed = 128 * (1 - (1 - 8 / 128) ** tokens)
        assert distinct_experts(128, 8, 0.0, tokens) == pytest.approx(closed)


def test_pure_operator_is_the_larger_bound():
    rows, out, width = 64.0, 4096.0, 4096.0
    compute_s = 2 * rows * out * width / 989e12
    memory_s = 2 * (rows * width + width * out + rows * out) / 3.35e12
    assert PURE.gemm_s(rows, out, width) == pytest.approx(max(compute_s, memory_s))
    assert PURE.elementwise_s(3.35e6) == pytest.approx(1e-6)


def test_fitted_gemm_lies_between_its_bounds():
    rows, out, width = 256.0, 8192.0, 8192.0
    compute_s = 2 * rows * out * width / (989e12 * PUBLISHED.gemm_compute)
    memory_s = 2 * (2 * rows * width + width * out) / (3.35e12 * PUBLISHED.gemm_memory)
    kernel_s = FITTED.gemm_s(rows, out, width) - PUBLISHED.gemm_floor_us * 1e-6
    assert max(compute_s, memory_s) < kernel_s < compute_s + memory_s


@pytest.mark.parametrize("tp", [2, 4, 8])
def test_all_reduce_takes_the_faster_algorithm(tp):
    table = ALL_REDUCE[tp]
    small, large = 1024.0, 64e6
    assert table.time_s(small) == table.small_floor_s + small / table.small_byte_per_s
    assert table.time_s(large) == table.large_floor_s + large / table.large_byte_per_s


def test_all_reduce_is_free_on_one_gpu_and_passes_the_link_twice_in_the_pure_version():
    single = build_operators(H100, 1, PUBLISHED, pure_roofline=False, moe_zipf_alpha=0.6)
    assert single.all_reduce_s(1e6) == 0.0
    assert PURE.all_reduce_s(1e6) == pytest.approx(2 * 1e6 / 450e9)


def test_keys_are_read_once_per_request_not_per_query():
    one = PURE.attention_s(1, 4096, 4096, 4096, 1024)
    four = PURE.attention_s(4, 4 * 4096, 4096, 4096, 1024)
    assert four == pytest.approx(one, rel=0.01)
