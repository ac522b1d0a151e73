"""Every named policy, and ECHO under every switch, keeps the contract."""

from __future__ import annotations

import sys

import pytest
from hypothesis import HealthCheck, Phase, given, settings

from echo_policies.errors import MissingExtraError
from echo_policies.presets import PRESETS
from echo_policies.registry import parse
from echo_policies.testing import CHECKS, run_checks
from echo_policies.testing.runner import STAND_IN, with_stand_ins
from echo_policies.testing.strategies import Situation, situations

SWITCHES = (
    "echo:levels=1,top_k=1,w_topk=1",
    "echo:w_topk=1,failing_layer=keep",
    "echo:w_topk=3,levels=3,top_k=3",
    "echo:w_topk=4,budget_order=fcfs,levels=4",
    "echo:w_topk=2,budget_order=round_robin,widen=truncated_and_complete,levels=4",
    "echo:w_topk=3,budget_order=round_robin,widen_depths=up_to_cut,levels=4",
    "echo:w_topk=2,widen=off,levels=4",
    "echo:w_topk=2,widen=truncated_and_complete,w_max=1,levels=3",
    "echo:w_topk=2,widen_depths=up_to_cut,failing_layer=keep,levels=4",
    "echo:w_topk=2,budget_counts_roots=true,levels=4",
    "echo:w_topk=1,gate_set=off,levels=4",
    "dense:w_topk=2,threshold=normalized,gate_cmp=ge,levels=5",
    "static:tree=0/1/00/01/000",
    "static:tree=eagle25",
    "chain:levels=0",
    "eagle3:levels=3,top_k=2,nodes=4+fallback:probe=1",
    "echo:w_topk=2,levels=4+fallback:best_case=1",
    "static:tree=0/1/00+fallback:best_case=0.1",
    "eagle3:levels=3,top_k=2,nodes=100",
)
EXAMPLES = min(settings().max_examples // 5, 10)


@pytest.mark.parametrize("spec", [*sorted(PRESETS), *SWITCHES])
def test_keeps_every_rule(spec: str) -> None:
    policy = parse(spec)
    if not policy.is_calibrated:
        policy = with_stand_ins(policy)

    @settings(
        max_examples=EXAMPLES,
        phases=[Phase.explicit, Phase.reuse, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(situation=situations())
    def keeps(situation: Situation) -> None:
        for check in CHECKS.values():
            check(policy, situation)

    keeps()


def test_an_uncalibrated_policy_is_said_to_have_stand_ins() -> None:
    results = run_checks(parse("echo"), max_examples=2)
    assert [(r.check, r.status, r.note) for r in results] == [
        (name, "passed", STAND_IN) for name in CHECKS
    ]


def test_a_calibrated_policy_needs_no_stand_ins() -> None:
    (result,) = run_checks(parse("chain:levels=2"), max_examples=5, checks=("plan_shape",))
    assert (result.status, result.error, result.note) == ("passed", "", "")


def test_the_kit_says_what_it_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = sys.modules["importlib.util"].find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec",
        lambda name, *a: None if name == "hypothesis" else real(name, *a),
    )
    for name in [name for name in sys.modules if name.startswith("echo_policies.testing")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(MissingExtraError, match=r"conformance kit needs the extra \[dev\]"):
        __import__("echo_policies.testing")
