"""The rules of the contract, one function each: an AssertionError says how a rule is broken."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from echo_policies.api import Gate, LayerView, Policy, Scheduler
from echo_policies.forest import close_under_ancestors
from echo_policies.testing.play import Played, play, same_tensors
from echo_policies.testing.strategies import Situation, Slot
from echo_policies.testing.sync import IN_DRAFT, no_host_copy, no_host_sync

Check = Callable[[Policy, Situation], None]


def check_plan_shape(policy: Policy, situation: Situation) -> None:
    """The plan is a bool [B, N]."""
    for step, played in enumerate(play(policy, situation)):
        forest, keep_BN = played.decision.forest, played.decision.keep_BN
        expected = (forest.num_requests, forest.num_candidates)
        given = (keep_BN.dtype, tuple(keep_BN.shape))
        assert given == (torch.bool, expected), (
            f"step {step}: the plan must be torch.bool {expected}; got {given[0]} {given[1]}"
        )


def check_existing_nodes(policy: Policy, situation: Situation) -> None:
    """Only candidates that exist are kept."""
    for step, played in enumerate(play(policy, situation)):
        ghosts = played.decision.keep_BN & ~played.decision.forest.exists_BN
        assert not ghosts.any(), f"step {step}: keeps {_where(ghosts)}, which does not exist"


def check_closed_under_ancestors(policy: Policy, situation: Situation) -> None:
    """A kept node's parent is kept."""
    for step, played in enumerate(play(policy, situation)):
        forest, keep_BN = played.decision.forest, played.decision.keep_BN
        lost = keep_BN & forest.exists_BN & ~close_under_ancestors(forest, keep_BN)
        assert not lost.any(), f"step {step}: keeps {_where(lost)} without its parent"


def check_within_k_max(policy: Policy, situation: Situation) -> None:
    """The total stays within k_max: by itself where the policy says so, else under --cap-all."""
    runs = {"": False} if policy.scheduler.respects_k_max else {}
    for how, caps_all in {**runs, " under --cap-all": True}.items():
        for step, played in enumerate(play(policy, situation, caps_all=caps_all)):
            kept = int(played.decision.keep_BN.sum())
            assert kept <= situation.k_max, (
                f"step {step}: keeps {kept} nodes{how}, k_max is {situation.k_max}"
            )


def check_idle_slots(policy: Policy, situation: Situation) -> None:
    """A slot without a request, or without room for a draft, gets nothing."""
    for step, played in enumerate(play(policy, situation)):
        given_B = played.decision.keep_BN.any(1) & (played.ctx.level_cap_B <= 0)
        assert not given_B.any(), (
            f"step {step}: gives nodes to slot {given_B.tolist().index(True)}, which drafts nothing"
        )


def check_deterministic(policy: Policy, situation: Situation) -> None:
    """The same run twice has the same plans."""
    _assert_same(play(policy, situation), play(policy, situation), "the second run of the same")


def check_no_state_survives(policy: Policy, situation: Situation) -> None:
    """A run's plans do not depend on what the policy did before it."""
    first = play(policy, situation)
    other = replace(situation, slots=(*situation.slots, Slot(seed=5)), k_max=situation.k_max + 3)
    play(policy, replace(other, step=situation.step + 1))
    _assert_same(first, play(policy, situation), "the run after another one")


def check_permutation(policy: Policy, situation: Situation) -> None:
    """Requests in other slots get what they got; not asked where slots or arrival matter."""
    if policy.scheduler.depends_on_slots:
        return
    situation = situation.without_ties()
    order = [*range(1, len(situation.slots)), 0]
    moved = play(policy, situation.permuted(order))
    for step, (here, there) in enumerate(zip(play(policy, situation), moved, strict=True)):
        expected = [here.plan[n] for n in order]
        assert expected == there.plan, (
            f"step {step}: moving the first request to the last slot changes "
            f"nodes per request from {_sizes(expected)} to {_sizes(there.plan)}"
        )


def check_views_unchanged(policy: Policy, situation: Situation) -> None:
    """Views and context are read, never written."""
    for step, played in enumerate(play(policy, situation)):
        for view, before in played.drafter.shown:
            for name in _view_fields(view):
                assert same_tensors(getattr(view, name), getattr(before, name)), (
                    f"step {step}: writes into {name} of the depth-{view.depth} view"
                )
        for name in ("live_B", "remaining_B", "arrival_B"):
            assert same_tensors(getattr(played.ctx, name), getattr(played.ctx_copy, name)), (
                f"step {step}: writes into {name} of the step's context"
            )


def check_no_peeking(policy: Policy, situation: Situation) -> None:
    """A plan does not change with the target's tokens that it will be verified against."""
    situation = replace(situation, steps=2)
    start, later, other = (play(policy, situation, outcomes=o) for o in ((0, 0), (0, 1), (1, 0)))
    _assert_same(start, later, "another target path at step 1")
    _assert_same(start[:1], other[:1], "another target path at step 0")


def check_json_round_trip(policy: Policy, situation: Situation) -> None:
    """Gate and scheduler survive JSON, and plan as before."""
    parts: dict[str, Gate | Scheduler] = {"gate": policy.gate, "scheduler": policy.scheduler}
    read = {}
    for name, part in parts.items():
        read[name] = type(part).model_validate_json(part.model_dump_json())
        assert read[name] == part, f"the {name} comes back from JSON as {read[name]!r}"
    _assert_same(
        play(policy, situation),
        play(policy.model_copy(update=read), situation),
        "the policy that came back from JSON",
    )


def check_no_host_sync(policy: Policy, situation: Situation) -> None:
    """The policy's own code never looks at a tensor's value on the host.

    And within a draft it makes no tensor of host data: that is for the step's beginning.
    """

    @contextmanager
    def around(method: str) -> Iterator[None]:
        with no_host_sync(), no_host_copy() if method in IN_DRAFT else nullcontext():
            yield

    play(policy, situation, around=around)


def check_gate_answers(policy: Policy, situation: Situation) -> None:
    """The gate is called at its checkpoints alone, and answers bool [B]."""
    if not policy.scheduler.uses_gate:
        return
    for levels in range(13):
        depths = policy.gate.checkpoints(levels)
        assert tuple(depths) == tuple(sorted({d for d in depths if 1 <= d <= levels})), (
            f"checkpoints({levels}) must ascend within 1 .. {levels}; got {depths}"
        )

    def note(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "evaluate":
            given = (getattr(result, "dtype", type(result)), tuple(getattr(result, "shape", ())))
            assert given == (torch.bool, (len(situation.slots),)), (
                f"at depth {args[0].depth} the gate must answer torch.bool "
                f"({len(situation.slots)},); got {given[0]} {given[1]}"
            )

    play(policy, situation, note=note)


def check_gate_closes(policy: Policy, situation: Situation) -> None:
    """A request whose gate closed is not deepened any more in the step."""
    if not policy.scheduler.uses_gate:
        return
    closed_B = torch.zeros(len(situation.slots), dtype=torch.bool)

    def note(name: str, args: tuple[Any, ...], result: Any) -> None:
        if name == "begin":
            closed_B.zero_()
        if name == "extend":
            _, layer, passed_B = args
            if passed_B is not None:
                closed_B.logical_or_(~passed_B)
            frontier = result[1]
            exists_BF = layer.exists_BW.gather(1, frontier.index_BF)
            deepened_B = (frontier.mask_BF & exists_BF).any(1) & closed_B
            assert not deepened_B.any(), (
                f"at depth {layer.depth} it deepens slot {deepened_B.tolist().index(True)}, "
                "whose gate has closed"
            )

    play(policy, situation, note=note)


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        check.__name__.removeprefix("check_"): check
        for check in (
            check_plan_shape,
            check_existing_nodes,
            check_closed_under_ancestors,
            check_within_k_max,
            check_idle_slots,
            check_deterministic,
            check_no_state_survives,
            check_permutation,
            check_views_unchanged,
            check_no_peeking,
            check_json_round_trip,
            check_no_host_sync,
            check_gate_answers,
            check_gate_closes,
        )
    }
)
"""Every rule by name."""


def _assert_same(left: list[Played], right: list[Played], what: str) -> None:
    for step, (one, two) in enumerate(zip(left, right, strict=True)):
        assert one.plan == two.plan, (
            f"step {step}: {what} changes nodes per request "
            f"from {_sizes(one.plan)} to {_sizes(two.plan)}"
            + (" (other nodes)" if _sizes(one.plan) == _sizes(two.plan) else "")
        )


def _sizes(plan: list[set[int]]) -> list[int]:
    return [len(nodes) for nodes in plan]


def _where(mask_BN: torch.Tensor) -> str:
    request, node = mask_BN.nonzero()[0].tolist()
    return f"candidate {node} of slot {request}"


def _view_fields(view: LayerView) -> list[str]:
    """A view's tensors, and what has been computed from them and cached so far."""
    cached = set(vars(view)) & {"best_B", "mass_B", "num_candidates_B", "order_BW", "place_BW"}
    return ["exists_BW", "parent_BW", "path_logp_BW", "entropy_BF", *sorted(cached)]
