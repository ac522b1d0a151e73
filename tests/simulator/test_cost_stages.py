"""Selection, packing and compaction: by hand, and taken out of the host's terms, not added."""

from dataclasses import replace

import pytest
import torch

from echo_policies.api import StepContext
from echo_policies.registry import parse
from simulator.cost import build_cost_model
from simulator.cost.parameters import PUBLISHED
from simulator.cost.predict import predict_s
from simulator.cost.stages import eagle_ops
from simulator.cost.stepfile import MeasuredStep
from simulator.policy_ops import policy_meter
from traces.replay import replay_tables

MODEL = build_cost_model("llama-3.1-8b", "h100", 1, parameters=PUBLISHED)
BANDWIDTH = 3.35e12 * 0.75


def test_by_hand():
    assert MODEL.select_s(100) == pytest.approx(100 * 2.2e-6)
    pack_bytes = 40 * 48 + 40 * 40 / 8 + 8 * 8
    assert MODEL.pack_s(40, 8) == pytest.approx(6 * 2.2e-6 + pack_bytes / BANDWIDTH)
    assert MODEL.compact_s(24) == pytest.approx(2 * 2.2e-6 + 2 * 24 * 128 * 1024 / BANDWIDTH)
    assert MODEL.pack_s(0, 8) == 0.0


def test_kv_heads_are_split_but_not_below_one():
    sizes = [
        build_cost_model("qwen3-235b", "h100", tp).stages.kv_token_bytes for tp in (1, 2, 4, 8)
    ]
    assert sizes[0] == 188 * 1024
    assert sizes == [sizes[0], sizes[0] / 2, sizes[0] / 4, sizes[0] / 4]


def test_without_graphs_an_operation_takes_its_launch():
    eager = build_cost_model("llama-3.1-8b", "h100", 1, engine="transformers")
    assert eager.select_s(10) == pytest.approx(10 * 10e-6)
    assert build_cost_model("llama-3.1-8b", "h100", 1, pure_roofline=True).select_s(10) == 0.0


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("levels", [1, 5, 8])
def test_a_cycle_of_the_fit_costs_what_it_did(levels, is_tree):
    """The fitted terms hold whole cycles: the stages split them, at the cycles they are from."""
    host = MODEL.host
    whole_s = host.step_s + host.cycle_s + levels * host.draft_step_s
    whole_s += host.tree_s if is_tree else 0.0
    stages_s = MODEL.select_s(eagle_ops(levels, is_tree=is_tree)) + MODEL.pack_s(8, 1)
    stages_s += MODEL.compact_s(3) if is_tree else 0.0
    assert stages_s + MODEL.host_s(levels, is_tree=is_tree) == pytest.approx(whole_s)


def test_no_term_falls_below_zero():
    bare = replace(MODEL, host=replace(MODEL.host, cycle_s=0.0, draft_step_s=0.0, tree_s=0.0))
    assert bare.host_s(8, is_tree=True) == bare.host_s(0)


@pytest.mark.parametrize(("batch", "topk"), [(1, 1), (1, 4), (8, 8)])
def test_predicted_cycles_hold_every_stage(batch, topk):
    step = MeasuredStep(
        line=2, model="llama-3.1-8b", hardware="h100", tp=1, ep=1, dtype="bf16", engine="sglang",
        kind="spec_cycle", batch=batch, context=500, measured_ms=9.0, tokens_per_request=16,
        steps=5, topk=topk,
    )  # fmt: skip
    kv = batch * 500
    kernels_s = MODEL.verify_s(16 * batch, batch, kv) + MODEL.draft_extend_s(16 * batch, batch, kv)
    kernels_s += 4 * MODEL.draft_layer_s(batch * topk, batch, kv)
    host = MODEL.host
    whole_s = kernels_s + host.step_s + host.cycle_s + 5 * host.draft_step_s
    whole_s += host.tree_s if topk > 1 else 0.0
    got_s = predict_s(MODEL, step)
    assert whole_s - 1e-6 < got_s < 1.001 * whole_s


@pytest.mark.parametrize("levels", [1, 2, 3, 5])
@pytest.mark.parametrize("batch", [1, 4])
def test_reference_operations_are_those_of_the_policies(trace, levels, batch):
    """Kind: a constant that goes stale when the code it counts changes."""
    long_B = torch.full((batch,), 99)
    ctx = StepContext(64, 0, long_B.bool(), long_B, torch.arange(batch), 98, batch)
    for spec, is_tree in ((f"chain:levels={levels}", False), (f"eagle3:levels={levels}", True)):
        policy = parse(spec if not is_tree else f"{spec},top_k=4,nodes=8")
        meter = policy_meter(policy, replay_tables(trace))
        position_B = torch.zeros(batch, dtype=torch.int64)
        meter.drafter.seek(position_B)
        decision = meter.session.decide(ctx, policy.scheduler.start())
        ops = meter.ops(decision, ctx, policy.scheduler.start(), position_B)
        assert ops == eagle_ops(levels, is_tree=is_tree)
    assert eagle_ops(0, is_tree=True) == 0
