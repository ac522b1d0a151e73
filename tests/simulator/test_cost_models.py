"""Shapes give the parameters, bytes and flops that hardware.md section 1 lists."""

import pytest

from echo_policies.errors import UnknownNameError
from simulator.cost import PAIRS, Eagle3Head, Transformer, find_pair
from simulator.hardware import HARDWARE, find_hardware

# target: parameters in 1e9, streamed GB, GFLOP per token, KV KiB per token
TARGETS = {
    "vicuna-13b": (13.0, 25.7, 25.7, 800),
    "llama-3.1-8b": (8.03, 15.0, 15.0, 128),
    "llama-3.3-70b": (70.6, 139.0, 139.0, 320),
    "qwen3-8b": (8.19, 15.1, 15.1, 144),
    "qwen3-32b": (32.8, 64.0, 64.0, 256),
    "qwen3-235b": (235.1, 469, 43.1, 188),
}

# target: GFLOP per row without fc, GB without embedding
HEADS = {
    "vicuna-13b": (1.12, 1.28),
    "llama-3.1-8b": (0.75, 0.85),
    "llama-3.3-70b": (1.27, 1.58),
    "qwen3-8b": (0.70, 0.80),
    "qwen3-32b": (1.41, 1.56),
    "qwen3-235b": (1.08, 1.18),
}


@pytest.mark.parametrize("name", sorted(TARGETS))
def test_target_matches_the_check_values(name):
    billions, streamed_gb, gflop, kv_kib = TARGETS[name]
    target = find_pair(name).target
    assert target.parameters / 1e9 == pytest.approx(billions, rel=2e-3)
    assert target.streamed_bytes / 1e9 == pytest.approx(streamed_gb, rel=4e-3)
    assert target.flops_per_token / 1e9 == pytest.approx(gflop, rel=4e-3)
    assert target.kv_bytes_per_token == kv_kib * 1024


@pytest.mark.parametrize("name", sorted(HEADS))
def test_head_matches_the_check_values(name):
    gflop, gigabytes = HEADS[name]
    head = find_pair(name).draft
    assert isinstance(head, Eagle3Head)
    assert head.target_hidden == find_pair(name).target.hidden
    assert head.flops_per_token / 1e9 == pytest.approx(gflop, abs=0.0051)
    assert head.streamed_bytes / 1e9 == pytest.approx(gigabytes, abs=0.0051)


def test_recorded_pair_has_an_independent_draft_and_tied_heads():
    pair = find_pair("qwen2.5-coder-1.5b")
    assert isinstance(pair.draft, Transformer)
    assert pair.target.parameters / 1e9 == pytest.approx(1.54, abs=0.01)
    assert pair.draft.parameters / 1e9 == pytest.approx(0.49, abs=0.01)
    # a tied head is stored once and read by the step all the same
    assert pair.target.streamed_bytes == 2 * pair.target.parameters


def test_unverified_heads_say_so():
    unverified = {name for name, pair in PAIRS.items() if not getattr(pair.draft, "is_verified", 1)}
    assert unverified == {"llama-3.3-70b", "vicuna-13b", "smollm2-135m"}


def test_unknown_target_offers_the_nearest():
    with pytest.raises(UnknownNameError, match=r"No target model named 'llama-3.1-8'.*'llama-3.1-"):
        find_pair("llama-3.1-8")


def test_hardware_figures():
    h100, h200 = find_hardware("h100"), find_hardware("h200")
    assert h100.peak_bf16_flop_per_s == h200.peak_bf16_flop_per_s == 989e12
    assert (h100.memory_byte_per_s, h200.memory_byte_per_s) == (3.35e12, 4.8e12)
    assert (h100.memory_bytes, h200.memory_bytes) == (80 * 2**30, 141e9)
    assert find_hardware("a100").peak_fp8_flop_per_s == 0.0
    assert h100.peak_fp8_flop_per_s == 1979e12
    assert all(name == gpu.name for name, gpu in HARDWARE.items())


def test_unknown_hardware_offers_the_nearest():
    with pytest.raises(UnknownNameError, match=r"No hardware named 'h10'. Did you mean 'h100'\?"):
        find_hardware("h10")
