"""What a policy's mistakes are called: one sentence with policy, method, step and line."""

from __future__ import annotations

import pytest
import torch

from echo_policies.api import DraftPlan, Frontier, Gate, Policy
from echo_policies.errors import EchoError, PolicyCrash, PolicyViolation
from echo_policies.gates.open import OpenGate
from echo_policies.schedulers.elastic import Elastic
from echo_policies.schedulers.rerank import Rerank
from echo_policies.session import open_session
from tests.simulator.small import three_positions, walk
from traces.replay import RecordedDrafter, replay_tables

SHAPE = {"levels": 2, "top_k": 2, "nodes": 3}


class Repeats(Rerank):
    """Kind: a node expanded twice counts its children twice."""

    def extend(self, state, layer, passed_B):
        index_BF = torch.zeros_like(layer.order_BW[:, :2])
        return state, Frontier(index_BF, torch.ones_like(index_BF, dtype=torch.bool))


class Wide(Rerank):
    """Kind: a plan that declares less than it uses is charged less."""

    def begin(self, ctx, memory):
        return DraftPlan(2, 2, width=1), None


class FarIndex(Rerank):
    def extend(self, state, layer, passed_B):
        index_BF = layer.order_BW[:, :1] + 7
        return state, Frontier(index_BF, torch.ones_like(index_BF, dtype=torch.bool))


class HalfLevels(Rerank):
    def begin(self, ctx, memory):
        return DraftPlan(1.5, 2, 2), None


class NoFrontier(Rerank):
    def extend(self, state, layer, passed_B):
        return None


class KeepsAll(Rerank):
    """Kind: an engine reserves too little because a scheduler says too little."""

    @property
    def max_kept(self):
        return 2

    def select(self, state, forest):
        return forest.exists_BN


class Raises(Rerank):
    def select(self, state, forest):
        raise KeyError("missing")


class Leaves(Rerank):
    def extend(self, state, layer, passed_B):
        raise SystemExit(0)


class BadDepths(Gate):
    def checkpoints(self, levels):
        return (2, 0)

    def evaluate(self, layer):
        return True


class Scalar(BadDepths):
    def checkpoints(self, levels):
        return (1,)


def alone(scheduler) -> Policy:
    return Policy(name="mine", gate=OpenGate(), scheduler=scheduler(**SHAPE))


def gated(gate) -> Policy:
    return Policy(name="mine", gate=gate, scheduler=Elastic(levels=2, top_k=2, w_topk=1))


@pytest.mark.parametrize(
    ("policy", "error", "words"),
    [
        (alone(Repeats), PolicyViolation, "a frontier names each node once"),
        (alone(Wide), PolicyViolation, "no wider than planned' at step 0: 2 > 1"),
        (alone(FarIndex), PolicyViolation, "names candidates of its layer"),
        (alone(HalfLevels), PolicyViolation, "a plan's levels is a whole number >= 0"),
        (alone(NoFrontier), PolicyViolation, "extend returns a state and a frontier"),
        (alone(KeepsAll), PolicyViolation, "no request keeps more than max_kept'"),
        (alone(Raises), PolicyCrash, "mine raised KeyError in select at step 0 (test_guard.py"),
        (alone(Leaves), PolicyCrash, "mine raised SystemExit in extend at step 0"),
        (gated(BadDepths()), PolicyViolation, "checkpoints ascend within 1 .. 2"),
        (gated(Scalar()), PolicyViolation, "a gate answers bool [B]"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_named(policy, error, words):
    with pytest.raises(error) as caught:
        walk(three_positions(), policy, 9)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)
    assert isinstance(caught.value, EchoError)


def test_the_cause_of_a_crash_is_kept():
    with pytest.raises(PolicyCrash) as caught:
        walk(three_positions(), alone(Raises), 9)
    assert isinstance(caught.value.__cause__, KeyError)
    assert caught.value.method == "select"


def test_a_plan_is_checked_before_the_run():
    with pytest.raises(PolicyViolation, match="whole number"):
        open_session(alone(HalfLevels), RecordedDrafter(replay_tables(three_positions())))
