"""The checks themselves: planted faults, each caught by the rule it breaks."""

from __future__ import annotations

import sys
from typing import Any, ClassVar

import pytest
import torch
from pydantic import field_serializer
from torch import Tensor

from echo_policies.api import (
    Feedback,
    Frontier,
    Gate,
    LayerView,
    Policy,
    Scheduler,
    State,
    StepContext,
)
from echo_policies.forest import Forest
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.gates.open import OpenGate
from echo_policies.schedulers.elastic import Elastic
from echo_policies.schedulers.rerank import Rerank, best_nodes
from echo_policies.testing import CHECKS, run_checks
from simulator.check_policy import render


class Small(Rerank):
    """What most of the faults are planted into."""

    levels: int = 2
    top_k: int = 2
    nodes: int = 4


class OverspendsByOne(Small):
    respects_k_max: ClassVar[bool] = True

    def begin(self, ctx: StepContext, memory: State) -> Any:
        plan, _ = super().begin(ctx, memory)
        return plan, ctx.k_max

    def select(self, state: State, forest: Forest) -> Tensor:
        best_BN = best_nodes(forest, self.nodes)
        place_BN = best_BN.flatten().cumsum(0).reshape(best_BN.shape)
        return best_BN & (place_BN <= state + 1)


class DropsTheParent(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        keep_BN = forest.exists_BN.clone()
        keep_BN[:, 0] = False
        return keep_BN


class KeepsGhosts(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        return torch.ones_like(forest.exists_BN)


class FeedsTheIdle(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        alive_B1 = forest.exists_BN.any(1, keepdim=True)
        return forest.exists_BN | ~alive_B1


class AnswersIntegers(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        return super().select(state, forest).long()


class WritesIntoTheView(Small):
    def extend(self, state: State, layer: LayerView, passed_B: Any) -> Any:
        layer.scores_BW.sub_(1.0)
        return super().extend(state, layer, passed_B)


class WritesIntoTheCache(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        keep_BN = super().select(state, forest)
        forest.layers[0].order_BW.zero_()
        return keep_BN


class WritesIntoTheContext(Small):
    def begin(self, ctx: StepContext, memory: State) -> Any:
        ctx.remaining_B.add_(1)
        return super().begin(ctx, memory)


class FavoursLowSlots(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        keep_BN = super().select(state, forest)
        return keep_BN & (torch.arange(keep_BN.shape[0]) < 1)[:, None]


class RemembersAcrossRuns(Small):
    seen: ClassVar[list[int]] = []

    def select(self, state: State, forest: Forest) -> Tensor:
        self.seen.append(forest.num_candidates)
        return best_nodes(forest, 1 + len(self.seen) % 2)


class RemembersOtherBudgets(Small):
    most: ClassVar[list[int]] = [0]

    def begin(self, ctx: StepContext, memory: State) -> Any:
        plan, state = super().begin(ctx, memory)
        self.most[0] = max(self.most[0], ctx.live_B.shape[0])
        return plan, (state, self.most[0] > ctx.live_B.shape[0])

    def extend(self, state: State, layer: LayerView, passed_B: Any) -> Any:
        return state, super().extend(None, layer, passed_B)[1]

    def select(self, state: State, forest: Forest) -> Tensor:
        return best_nodes(forest, 1 if state[1] else 2)


class Dices(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        return best_nodes(forest, 2) & (torch.rand(forest.num_requests, 1) < 0.5)


class LooksWithItem(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        return best_nodes(forest, 1 if forest.path_logp_BN.max().item() > -1 else 2)


class LooksWithList(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        return best_nodes(forest, 1 if sum(forest.exists_BN.flatten().tolist()) > 3 else 2)


class BranchesOnATensor(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        return best_nodes(forest, 1 if forest.exists_BN.all() else 2)


class IndexesWithAMask(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        found = forest.path_logp_BN[forest.exists_BN]
        return best_nodes(forest, 2) & (found.sum() < 0)


class BuildsATensorPerLevel(Small):
    def extend(self, state: State, layer: LayerView, passed_B: Any) -> Any:
        state, frontier = super().extend(state, layer, passed_B)
        return state, Frontier(frontier.index_BF[:, [0]], frontier.mask_BF[:, [0]])


class PeeksAtTheTarget(Small):
    """Finds the drafter, and with it the target's path, in the caller's frame."""

    def select(self, state: State, forest: Forest) -> Tensor:
        frame = sys._getframe()
        while "drafter" not in frame.f_locals:
            assert frame.f_back is not None
            frame = frame.f_back
        on_BN = torch.cat(frame.f_locals["drafter"]._on_path, dim=1)
        return super().select(state, forest) & on_BN


class LearnsFromThePast(Small):
    """No fault: what a step showed may change the next one."""

    def start(self) -> State:
        return torch.zeros((), dtype=torch.int64)

    def begin(self, ctx: StepContext, memory: State) -> Any:
        return super().begin(ctx, None)[0], memory

    def select(self, state: State, forest: Forest) -> Tensor:
        return best_nodes(forest, 2) & (state.remainder(2) == 0)

    def observe(self, memory: State, feedback: Feedback) -> State:
        return memory + feedback.accepted_B.sum()


class ForgetsInJson(Small):
    @field_serializer("nodes")
    def _one_less(self, nodes: int) -> int:
        return nodes - 1


class Raises(Small):
    def select(self, state: State, forest: Forest) -> Tensor:
        raise ZeroDivisionError("an honest mistake")


class GateAnswersFloats(ConfidenceGate):
    taus: tuple[tuple[int, float], ...] | None = ((1, 0.5),)

    def evaluate(self, layer: LayerView) -> Tensor:
        return super().evaluate(layer).float()


class GateChecksDepthZero(OpenGate):
    def checkpoints(self, levels: int) -> tuple[int, ...]:
        return (0, *range(1, levels + 1))


class IgnoresItsGate(Small):
    uses_gate: ClassVar[bool] = True


def with_gate(scheduler: Scheduler) -> Policy:
    gate = ConfidenceGate(taus=((1, 0.9), (2, 0.9)))
    return Policy(gate=gate, scheduler=scheduler)


def alone(scheduler: Scheduler) -> Policy:
    return Policy(name=type(scheduler).__name__, gate=OpenGate(), scheduler=scheduler)


def gated(gate: Gate) -> Policy:
    return Policy(gate=gate, scheduler=Elastic(w_topk=1, levels=2, top_k=2))


PLANTED: dict[str, tuple[Policy, str, str]] = {
    "overspends": (alone(OverspendsByOne()), "within_k_max", "keeps 1 nodes, k_max is 0"),
    "orphan": (alone(DropsTheParent()), "closed_under_ancestors", "without its parent"),
    "ghost": (alone(KeepsGhosts()), "existing_nodes", "does not exist"),
    "idle": (alone(FeedsTheIdle()), "idle_slots", "which drafts nothing"),
    "integers": (alone(AnswersIntegers()), "plan_shape", "the plan is a bool"),
    "view": (alone(WritesIntoTheView()), "views_unchanged", "writes into path_logp_BW"),
    "cache": (alone(WritesIntoTheCache()), "views_unchanged", "writes into order_BW"),
    "context": (alone(WritesIntoTheContext()), "views_unchanged", "writes into remaining_B"),
    "slots": (alone(FavoursLowSlots()), "permutation", "moving the first request"),
    "memory": (alone(RemembersAcrossRuns()), "deterministic", "changes nodes per request"),
    "other runs": (alone(RemembersOtherBudgets()), "no_state_survives", "after another one"),
    "dice": (alone(Dices()), "deterministic", "changes nodes per request"),
    "item": (alone(LooksWithItem()), "no_host_sync", "item"),
    "tolist": (alone(LooksWithList()), "no_host_sync", "tolist"),
    "branch": (alone(BranchesOnATensor()), "no_host_sync", "makes the host wait"),
    "mask index": (alone(IndexesWithAMask()), "no_host_sync", "mask"),
    "host data": (alone(BuildsATensorPerLevel()), "no_host_sync", "a tensor of host data"),
    "peek": (alone(PeeksAtTheTarget()), "no_peeking", "another target path"),
    "json": (alone(ForgetsInJson()), "json_round_trip", "comes back from JSON as"),
    "exception": (alone(Raises()), "plan_shape", "ZeroDivisionError in select at step 0"),
    "float gate": (gated(GateAnswersFloats()), "gate_answers", "must answer torch.bool"),
    "depth 0": (gated(GateChecksDepthZero()), "gate_answers", "must ascend within"),
    "open gate": (with_gate(IgnoresItsGate()), "gate_closes", "whose gate has closed"),
}


@pytest.mark.parametrize("name", sorted(PLANTED))
def test_a_planted_fault_is_caught(name: str) -> None:
    policy, rule, message = PLANTED[name]
    RemembersOtherBudgets.most[0] = 0
    (result,) = run_checks(policy, max_examples=60, checks=(rule,))
    assert result.status == "failed"
    assert message in result.error


def test_a_counterexample_is_small_and_readable() -> None:
    (result,) = run_checks(alone(DropsTheParent()), checks=("closed_under_ancestors",))
    assert result.error == (
        "step 0: keeps candidate 2 of slot 0 without its parent\n"
        "smallest case: k_max 0, step 0, 1 step(s), scores unrounded; "
        "slot 0: request 0, 16 tokens left"
    )


def test_learning_from_the_past_is_no_fault() -> None:
    results = run_checks(alone(LearnsFromThePast()), max_examples=12)
    assert [r for r in results if r.status != "passed"] == []


def test_an_unknown_signal_is_one_failed_result() -> None:
    class Psychic(Small):
        needs: ClassVar[frozenset[str]] = frozenset({"target_logp"})

    (result,) = run_checks(alone(Psychic()))
    assert (result.check, result.status) == ("opens", "failed")
    assert "needs the signal 'target_logp'" in result.error


def test_a_gate_that_never_calibrates_is_one_failed_result() -> None:
    class Unready(OpenGate):
        @property
        def is_calibrated(self) -> bool:
            return False

    (result,) = run_checks(gated(Unready()))
    assert result.check == "opens"
    assert "leaves a parameter" in result.error


def test_results_are_shown_as_a_table() -> None:
    results = run_checks(alone(KeepsGhosts()), max_examples=10, checks=tuple(CHECKS)[:2])
    table = render(results)
    assert table.row_count == 2
