"""Policies and the decision loop never wait for the device.

Three nets, because each has holes: operations that read values are refused while the code runs;
the same code runs on tensors that have no values at all (fake ones, and those of the device
``meta``, on which ``.cpu()`` fails too); and tests/architecture searches the sources. A policy's
methods within a draft make no tensor of host data either, because that copy waits as well.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from echo_policies.api import Feedback, LayerView, Policy
from echo_policies.errors import PolicyCrash
from echo_policies.gates.open import OpenGate
from echo_policies.presets import PRESETS
from echo_policies.registry import parse
from echo_policies.schedulers.elastic import Elastic
from echo_policies.session import Session
from echo_policies.testing.drafter import SyntheticDrafter
from echo_policies.testing.play import context
from echo_policies.testing.runner import with_stand_ins
from echo_policies.testing.strategies import Situation, Slot
from echo_policies.testing.sync import IN_DRAFT, no_host_copy, no_host_sync

SPECS = [
    *PRESETS,
    "echo:w_topk=2,budget_order=round_robin,widen=truncated_and_complete,levels=4",
    "echo:w_topk=4,budget_order=fcfs,levels=4",
    "echo:w_topk=2,widen_depths=up_to_cut,failing_layer=keep,levels=4",
    "dense:w_topk=2,threshold=normalized,gate_cmp=ge,levels=5",
    "static:tree=0/1/00/01/000",
]
SITUATION = Situation(
    (Slot(1), Slot(2, remaining=3), Slot(3, live=False), Slot(4, arrival=2)), k_max=9
)
"""Short, idle and ordinary requests under a budget that binds."""


def calibrated(spec: str) -> Policy:
    policy = parse(spec)
    return policy if policy.is_calibrated else with_stand_ins(policy)


@contextmanager
def on_meta() -> Iterator[None]:
    with torch.device("meta"):
        yield


NETS: dict[str, Callable[[], AbstractContextManager[object]]] = {
    "operations": no_host_sync,
    "fake tensors": FakeTensorMode,
    "meta": on_meta,
}


def refusing_copies(method: str, function: Callable[..., Any], given: tuple[Any, ...]) -> Any:
    with no_host_copy() if method in IN_DRAFT else nullcontext():
        return function(*given)


def decide(policy: Policy, net: str, **options: Any) -> None:
    """Two steps of the whole loop, drafter included, as on a device that must not be waited for."""
    with NETS[net]():
        seeds = torch.tensor([slot.seed for slot in SITUATION.slots])
        memory = policy.scheduler.start()
        for number in range(2):
            drafter = SyntheticDrafter(seeds + 0)
            session = Session(
                policy, drafter, guards=False, skips_empty=False, call=refusing_copies, **options
            )
            ctx = context(SITUATION, number)
            decision = session.decide(ctx, memory)
            accepted_B = torch.zeros_like(ctx.remaining_B)
            feedback = Feedback(accepted_B, decision.keep_BN, ctx.live_B, 1e-3, 1e-2, 1.1e-2)
            memory = policy.scheduler.observe(memory, feedback)


@pytest.mark.parametrize("spec", SPECS)
def test_a_step_needs_no_value(spec: str) -> None:
    """Kind: a look at the device, also by `--cap-all`; a small tensor built at every level."""
    policy = calibrated(spec)
    nets = list(NETS) if spec in {"static", "eagle3_small", "echo"} else ["operations", "meta"]
    for net in nets:
        for staged, caps in ((True, False), (False, True)):
            decide(policy, net, is_staged=staged, caps_all=caps)


class Looks(OpenGate):
    """Opens everything, after a look that makes the host wait."""

    look: str

    def checkpoints(self, levels: int) -> tuple[int, ...]:
        return (1,) if levels else ()

    def evaluate(self, layer: LayerView) -> Tensor:
        best_B = layer.best_B
        looks: dict[str, Callable[[], object]] = {
            "item": lambda: best_B.max().item(),
            "branch": lambda: bool((best_B > 0).any()),
            "tolist": best_B.tolist,
            "numpy": best_B.numpy,
            "nonzero": best_B.nonzero,
            "one-argument where": lambda: torch.where(best_B > -1),
            "read by mask": lambda: best_B[best_B > -1],
            "write by mask": lambda: best_B.clone().__setitem__(best_B > -1, 0.0),
            "masked_select": lambda: best_B.masked_select(best_B > -1),
            "unique": best_B.unique,
            "bincount": layer.num_candidates_B.bincount,
            "equal": lambda: torch.equal(best_B, best_B + 1),
            "allclose": lambda: torch.allclose(best_B, best_B),
            "one_hot": lambda: torch.nn.functional.one_hot(layer.num_candidates_B),
            "repeat_interleave": lambda: best_B.repeat_interleave(layer.num_candidates_B),
            "range": lambda: torch.arange(layer.num_candidates_B.max()),
            "cpu": best_B.cpu,
            "tensor of a list": lambda: torch.tensor([1, 2]),
            "tensor of a number": lambda: torch.tensor(1.0),
            "new_tensor": lambda: best_B.new_tensor([1.0]),
            "as_tensor": lambda: torch.as_tensor([1, 2]),
            "from_numpy": lambda: torch.from_numpy(np.arange(2)),
            "index by list": lambda: best_B[[0, 1]],
            "write by list": lambda: best_B.clone().__setitem__([0, 1], 0.0),
        }
        looks[self.look]()
        return super().evaluate(layer)


LOOKS = (
    *("item", "branch", "tolist", "numpy", "nonzero", "one-argument where", "read by mask"),
    *("write by mask", "masked_select", "unique", "bincount", "equal", "allclose", "one_hot"),
    *("repeat_interleave", "range", "cpu", "tensor of a list", "tensor of a number", "new_tensor"),
    *("as_tensor", "from_numpy", "index by list", "write by list"),
)


@pytest.mark.parametrize("look", LOOKS)
def test_every_way_to_look_is_noticed(look: str) -> None:
    """Kind: a sync that one of the nets lets through; the first net has to catch them all."""
    policy = Policy(gate=Looks(look=look), scheduler=Elastic(w_topk=1, levels=2, top_k=2))
    with pytest.raises(PolicyCrash, match=r"HostSyncError in evaluate .* makes the host wait"):
        decide(policy, "operations")


@pytest.mark.parametrize("look", ["item", "tolist", "numpy", "nonzero", "read by mask", "unique"])
def test_tensors_without_values_notice_it_too(look: str) -> None:
    policy = Policy(gate=Looks(look=look), scheduler=Elastic(w_topk=1, levels=2, top_k=2))
    for net in ("fake tensors", "meta"):
        with pytest.raises(PolicyCrash, match="in evaluate at step 0"):
            decide(policy, net)


class Fills(OpenGate):
    """Makes tensors of numbers, which takes no copy."""

    def checkpoints(self, levels: int) -> tuple[int, ...]:
        return (1,) if levels else ()

    def evaluate(self, layer: LayerView) -> Tensor:
        copy_B = layer.best_B.clone()
        copy_B[0] = 1.0
        copy_B[torch.arange(2)] = torch.full((), 0.5)
        return torch.where(copy_B > 1, False, super().evaluate(layer))


def test_numbers_may_be_filled_in() -> None:
    decide(Policy(gate=Fills(), scheduler=Elastic(w_topk=1, levels=2, top_k=2)), "operations")
