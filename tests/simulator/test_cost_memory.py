"""Which tensor-parallel degrees run, and what fits in memory."""

import pytest

from echo_policies.errors import InputError
from simulator.cost import PAIRS, build_cost_model
from simulator.cost.memory import valid_degrees

DEGREES = {
    "vicuna-13b": (1, 2, 4, 8),
    "llama-3.1-8b": (1, 2, 4, 8),
    "llama-3.3-70b": (1, 2, 4, 8),
    "qwen3-8b": (1, 2, 4, 8),
    "qwen3-32b": (1, 2, 4, 8),
    "qwen3-235b": (1, 2, 4, 8),  # at 8 the 4 kv heads are replicated
    "qwen2.5-coder-1.5b": (1, 2, 4),  # 12 heads
    "smollm2-135m": (1,),  # 9 heads
}


def test_degrees_each_target_can_run_at():
    assert {name: valid_degrees(pair.target) for name, pair in PAIRS.items()} == DEGREES


@pytest.mark.parametrize("tp", [0, 3, 16, -1])
def test_tp_outside_the_known_degrees_is_refused(tp):
    with pytest.raises(InputError, match=f"tp must be 1, 2, 4 or 8; got {tp}. llama-3.1-8b runs"):
        build_cost_model("llama-3.1-8b", "h100", tp)


def test_tp_that_does_not_divide_the_heads_is_refused():
    with pytest.raises(InputError, match=r"divide the 12 attention heads.*got 8. It runs at 1, 2"):
        build_cost_model("qwen2.5-coder-1.5b", "h100", 8)


def test_need_is_weights_and_kv():
    need = build_cost_model("llama-3.1-8b", "h100", 1).fits(8, 1024)
    assert need.weight_bytes == pytest.approx(16.06e9 + 0.85e9, rel=1e-3)
    assert need.kv_bytes == 8 * 1024 * (128 + 4) * 1024  # 32 layers and the head's one
    assert need.total_bytes == need.weight_bytes + need.kv_bytes
    assert need.memory_bytes == 80 * 2**30
    assert need.is_enough


def test_replicated_kv_heads_take_memory_on_every_rank():
    four = build_cost_model("qwen3-235b", "h200", 4).fits(1, 1024)
    eight = build_cost_model("qwen3-235b", "h200", 8).fits(1, 1024)
    assert eight.kv_bytes == four.kv_bytes
    assert eight.weight_bytes == four.weight_bytes / 2


@pytest.mark.parametrize(
    ("name", "hardware", "tp", "batch", "least"),
    [
        ("qwen3-235b", "h100", 1, 1, 8),
        ("qwen3-235b", "h200", 2, 1, 4),
        ("llama-3.3-70b", "h100", 1, 1, 2),
        ("vicuna-13b", "h100", 1, 256, 2),
    ],
)
def test_too_large_names_the_least_tp_that_fits(name, hardware, tp, batch, least):
    model = build_cost_model(name, hardware, tp)
    message = rf"{name} at batch {batch} .* {hardware}, .* The least tp that fits is {least}\."
    with pytest.raises(InputError, match=message):
        model.fits(batch, 512)
    build_cost_model(name, hardware, least).fits(batch, 512)


def test_far_too_large_says_that_nothing_fits():
    with pytest.raises(InputError, match="No tp fits"):
        build_cost_model("vicuna-13b", "h100", 1).fits(4096, 8192)
