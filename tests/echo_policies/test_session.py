"""The decision loop: what is charged, what is refused, what a violation says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Policy, Scheduler
from echo_policies.errors import InputError, PolicyViolation, SignalError
from echo_policies.forest import Forest
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.gates.open import OpenGate
from echo_policies.presets import PRESETS
from echo_policies.schedulers.elastic import Elastic
from echo_policies.schedulers.rerank import Rerank
from echo_policies.schedulers.static import Chain
from echo_policies.session import open_session, widest_plan
from echo_policies.testing.play import LinearCosts
from tests.echo_policies.situation import Tree, WrittenDrafter, context, one_step

# The best path has probability .9, .81, .081 at depths 1 to 3.
FADING: Tree = {
    (): [0.9, 0.1],
    (0,): [0.9, 0.1],
    (0, 0): [0.1, 0.1],
    **{(0,) * depth: [0.9] for depth in range(3, 8)},
}


def echo(*taus: tuple[int, float], levels: int = 6, **fields: Any) -> Policy:
    return Policy(
        name="echo",
        gate=ConfidenceGate(taus=taus),
        scheduler=Elastic(levels=levels, w_topk=1, top_k=2, **fields),
    )


@pytest.mark.parametrize(
    ("taus", "staged", "levels", "checks", "why"),
    [
        ([(1, 0.95)], True, 1, 1, "closed at the first checkpoint"),
        ([(1, 0.5), (3, 0.5)], True, 3, 2, "closed at depth 3"),
        ([(1, 0.5), (3, 0.5), (5, 0.5)], True, 3, 2, "later checkpoints are not reached"),
        ([(1, 0.5)], True, 6, 1, "open to the end"),
        ([], True, 6, 0, "no checkpoint, no check"),
        ([(1, 0.95), (4, 0.5)], False, 6, 0, "a masked engine sees nothing on the way"),
    ],
)
def test_levels_and_checks(
    taus: list[tuple[int, float]], staged: bool, levels: int, checks: int, why: str
) -> None:
    _, decision = one_step(echo(*taus), [FADING], is_staged=staged)
    assert (decision.levels, decision.checks) == (levels, checks), why


def test_the_host_learns_of_an_end_only_at_the_next_checkpoint() -> None:
    """The budget is gone after depth 2; the next look is at depth 4."""
    policy = echo((1, 0.0), (4, 0.0))
    _, decision = one_step(policy, [FADING], context(1, 2))
    assert (decision.levels, decision.checks) == (4, 2)
    _, decision = one_step(echo((1, 0.0)), [FADING], context(1, 2))
    assert (decision.levels, decision.checks) == (6, 1)


def test_one_request_that_deepens_keeps_the_batch_drafting() -> None:
    surer: Tree = {(0,) * depth: [0.99] for depth in range(7)}
    _, decision = one_step(echo((1, 0.95), (2, 0.9)), [FADING, surer])
    assert decision.levels == 6
    assert decision.depth_B.tolist() == [1, 6]
    assert decision.expanded_B.tolist() == [1, 6]
    assert decision.drafted_B.tolist() == [2, 6]


def test_levels_end_with_the_longest_remaining_length() -> None:
    ctx = context(2, remaining=[3, 1], level_limit=2)
    _, decision = one_step(echo(levels=6), [FADING, FADING], ctx)
    assert decision.levels == 2
    assert decision.depth_B.tolist() == [2, 0]
    _, decision = one_step(echo(), [FADING], context(1, remaining=[1], level_limit=0))
    assert (decision.levels, decision.checks, decision.plan) == (0, 0, DraftPlan(0))


@pytest.mark.parametrize("name", sorted(PRESETS))
def test_a_batch_without_room_is_plain_decoding(name: str) -> None:
    policy = PRESETS[name]()
    if not policy.is_calibrated:
        policy = policy.model_copy(
            update={"gate": ConfidenceGate(taus=((1, 0.5),)), "scheduler": Elastic(w_topk=1)}
        )
    ctx = context(2, live=[False, False], remaining=[1, 1], level_limit=0)
    ctx = replace(ctx, costs=LinearCosts())
    drafter = WrittenDrafter([{}, {}])
    decision = open_session(policy, drafter).decide(ctx, policy.scheduler.start())
    assert decision.verified_B.tolist() == [0, 0]
    assert decision.keep_BN.shape == (2, 0)
    assert drafter.calls == []


def test_cap_all_cuts_and_says_so() -> None:
    policy = Policy(gate=OpenGate(), scheduler=Rerank(levels=2, top_k=2, nodes=4))
    kept, decision = one_step(policy, [FADING], context(1, 2), caps_all=True)
    assert (kept, decision.was_clamped) == ([{"0", "00"}], True)
    kept, decision = one_step(policy, [FADING], context(1, 4), caps_all=True)
    assert (kept, decision.was_clamped) == ([{"0", "00", "1", "01"}], False)
    _, decision = one_step(policy, [FADING], context(1, 0), caps_all=True)
    assert (decision.levels, decision.was_clamped) == (0, False)


class Faulty(Rerank):
    respects_k_max: ClassVar[bool] = True
    levels: int = 2
    top_k: int = 2
    fault: str = ""

    def select(self, state: Any, forest: Forest) -> Tensor:
        keep_BN = forest.exists_BN.clone()
        if self.fault == "orphan":
            keep_BN[:, 0] = False
        if self.fault == "ghost":
            keep_BN[:, -1] = True
        if self.fault == "shape":
            keep_BN = keep_BN[:, 1:]
        if self.fault == "dtype":
            return keep_BN.long()
        return keep_BN


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("orphan", "broke the rule 'closed under ancestors' at step 7: it keeps a node without"),
        ("ghost", "broke the rule 'existing nodes only' at step 7: it keeps a node that does not"),
        ("shape", r"broke the rule 'the plan is a bool \[B, N\]' at step 7: torch.bool \(1, 5\)"),
        ("dtype", r"broke the rule 'the plan is a bool \[B, N\]' at step 7: torch.int64 \(1, 6\)"),
        ("", "broke the rule 'total within k_max' at step 7: kept 4, k_max 2"),
    ],
)
def test_a_violation_names_policy_rule_and_step(fault: str, message: str) -> None:
    tree: Tree = {(): [0.5, 0.4], (0,): [0.5, 0.4]}  # node 1 has no children
    policy = Policy(name="mine", gate=OpenGate(), scheduler=Faulty(fault=fault))
    ctx = context(1, 2, step=7)
    with pytest.raises(PolicyViolation, match=f"^mine {message}") as caught:
        one_step(policy, [tree], ctx)
    assert (caught.value.policy, caught.value.step) == ("mine", 7)
    assert f"'{caught.value.rule}'" in str(caught.value)


def test_guards_may_be_off() -> None:
    policy = Policy(gate=OpenGate(), scheduler=Faulty())
    _, decision = one_step(policy, [FADING], context(1, 1), guards=False)
    assert decision.verified_B.tolist() == [4]


def test_a_missing_signal_is_refused_by_name() -> None:
    class NeedsEntropy(Rerank):
        needs: ClassVar[frozenset[str]] = frozenset({"path_logp", "entropy"})

    policy = Policy(name="mine", gate=OpenGate(), scheduler=NeedsEntropy())
    with pytest.raises(
        SignalError, match=r"'mine' needs the signal 'entropy', .* it gives path_logp, ranks\."
    ):
        open_session(policy, WrittenDrafter([]))


def test_the_gates_signals_count_only_where_it_is_used() -> None:
    blind = WrittenDrafter([], signals=frozenset({"ranks"}))
    gate = ConfidenceGate(taus=((1, 0.5),))
    assert open_session(Policy(gate=gate, scheduler=Chain()), blind).policy.gate is gate
    with pytest.raises(SignalError, match="path_logp"):
        open_session(Policy(gate=gate, scheduler=Rerank()), blind)


def test_too_deep_a_policy_is_refused() -> None:
    with pytest.raises(SignalError, match=r"Policy 'echo' drafts 6 levels\."):
        open_session(echo(), WrittenDrafter([], deepest=5))
    open_session(echo(levels=5), WrittenDrafter([], deepest=5))


@pytest.mark.parametrize("name", ["echo", "dense", "fixed"])
def test_an_uncalibrated_policy_is_refused(name: str) -> None:
    with pytest.raises(InputError, match=f"'{name}' must be calibrated before it runs"):
        open_session(PRESETS[name](), WrittenDrafter([]))


def test_the_widest_plan_has_neither_budget_nor_length_in_its_way() -> None:
    assert widest_plan(echo(levels=6)) == DraftPlan(6, 2, 1)
    assert widest_plan(PRESETS["autoregressive"]()) == DraftPlan(0)
    assert widest_plan(PRESETS["chain"]()).is_chain


def test_a_gate_is_asked_at_its_checkpoints_alone() -> None:
    asked = []

    class Asked(ConfidenceGate):
        def evaluate(self, layer: LayerView) -> Tensor:
            asked.append(layer.depth)
            return super().evaluate(layer)

    policy = Policy(gate=Asked(taus=((2, 0.0), (4, 0.0))), scheduler=echo().scheduler)
    one_step(policy, [FADING])
    assert asked == [2, 4]


def test_a_scheduler_without_a_gate_pays_no_check() -> None:
    gate = ConfidenceGate(taus=((1, 0.99),))
    policy = Policy(gate=gate, scheduler=Rerank(levels=3, top_k=2, nodes=3))
    _, decision = one_step(policy, [FADING])
    assert (decision.levels, decision.checks) == (3, 0)


def test_nodes_beyond_a_requests_length_are_not_expanded() -> None:
    class Greedy(Scheduler):
        """Asks for everything, whatever the remaining lengths are."""

        def begin(self, ctx: Any, memory: Any) -> Any:
            return DraftPlan(4, 2, 2), None

        def extend(self, state: Any, layer: LayerView, passed_B: Any) -> Any:
            index_BF = torch.arange(2).expand(layer.exists_BW.shape[0], -1)
            return state, Frontier(index_BF, torch.ones_like(index_BF, dtype=torch.bool))

        def select(self, state: Any, forest: Forest) -> Tensor:
            return forest.exists_BN

    policy = Policy(gate=OpenGate(), scheduler=Greedy())
    kept, _ = one_step(policy, [FADING, FADING], context(2, remaining=[2, 3]))
    assert kept == [{"0", "1"}, {"0", "1", "00", "01"}]


def test_an_engine_can_measure_drafts_and_checks() -> None:
    """One entry per draft layer and per check, none nested in another."""
    log: list[str] = []

    @contextmanager
    def measure(part: str) -> Iterator[None]:
        log.append(f"<{part}")
        yield
        log.append(f"{part}>")

    session = replace(
        open_session(echo((1, 0.5), (3, 0.5)), WrittenDrafter([FADING])), measure=measure
    )
    session.decide(context(1), None)
    assert log == [
        f"{side}{part}{other}"
        for part in ("draft", "check", "draft", "draft", "check")
        for side, other in (("<", ""), ("", ">"))
    ]
