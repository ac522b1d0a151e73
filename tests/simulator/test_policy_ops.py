"""What a policy's own code is charged: counted operations, the same everywhere."""

from __future__ import annotations

import tomllib

import pytest
import torch

import simulator
from echo_policies.errors import InputError
from echo_policies.registry import parse
from simulator.policy_ops import OpCounter
from simulator.policy_tape import moved
from simulator.policy_times import measure_policies, render

OPTIONS = {"target": "llama-3.1-8b", "batch_sizes": (2,)}


def share(result, policy, part="select"):
    return result.row(policy, 2).summary.time_split[part]


def test_views_and_allocations_launch_nothing():
    with OpCounter() as counter:
        x = torch.empty(4, 4)
        y = x.view(16)[:4].expand(2, 4).T.unsqueeze(0).detach()
    assert counter.ops == 0
    with OpCounter() as counter:
        z = y + 1
        z.add_(2)
        torch.topk(z, 1)
        z.sum()
    assert counter.ops == 4


def test_plain_decoding_is_charged_nothing_and_others_are(trace_file):
    result = simulator.simulate(
        ["chain:levels=3", "eagle3:levels=3,top_k=4,nodes=8"], trace=str(trace_file), **OPTIONS
    )
    plain = result.row("autoregressive", 2).summary.time_split
    assert {part: plain[part] for part in ("draft", "check", "select", "pack", "compact")} == {
        "draft": 0.0, "check": 0.0, "select": 0.0, "pack": 0.0, "compact": 0.0,
    }  # fmt: skip
    chain, tree = (row.policy for row in result.batches[0].rows[1:])
    assert 0.0 < share(result, chain) < share(result, tree)
    assert 0.0 < share(result, chain, "pack") < 0.01
    assert share(result, chain, "compact") == 0.0  # its accepted rows lie in place
    assert 0.0 < share(result, tree, "compact") < 0.01


def test_the_charge_is_operations_times_their_price(trace_file):
    """One level always runs: 3 operations of EAGLE-3's selection at 2.2 us."""
    spec = "eagle3:levels=1,top_k=4,nodes=8"
    result = simulator.simulate([spec], trace=str(trace_file), **OPTIONS)
    summary = result.row(spec, 2).summary
    drafting = summary.levels_per_step  # steps at the end of an output draft nothing
    select_ms = summary.time_split["select"] * summary.step_ms
    assert select_ms == pytest.approx(drafting * 3 * 2.2e-3, rel=0.02)


POLICY = '''
from echo_policies.api import Gate, Policy, Scheduler
from echo_policies.schedulers.elastic import Elastic


class Busy(Gate):
    """Does {extra} operations that nobody needs."""

    def checkpoints(self, levels):
        return (1,)

    def evaluate(self, layer):
        waste = layer.scores_BW
        for _ in range({extra}):
            waste = waste * 0.5
        return layer.best_B > -9.0


class BusyPolicy(Policy):
    """ECHO's scheduler behind the gate."""

    gate: Gate = Busy()
    scheduler: Scheduler = Elastic(levels=3, top_k=4, w_topk=1)
'''


def test_policies_of_users_are_charged_by_themselves(trace_file, tmp_path):
    shares = []
    for extra in (0, 200):
        path = tmp_path / f"busy{extra}.py"
        path.write_text(POLICY.format(extra=extra))
        result = simulator.simulate([f"{path}:BusyPolicy"], trace=str(trace_file), **OPTIONS)
        summary = result.batches[0].rows[1].summary
        shares.append(summary.time_split["select"] * summary.step_ms)
    # the gate is asked in (nearly) every step: 200 operations at 2.2 us
    assert shares[1] - shares[0] == pytest.approx(0.44, rel=0.1)


def test_equal_seeds_give_equal_bytes(trace_file):
    spec = "echo:levels=4,top_k=4,w_topk=2"
    one, two = (
        simulator.simulate([spec], trace=str(trace_file), **OPTIONS).to_json() for _ in range(2)
    )
    assert one == two


def test_times_of_policies_are_measured(trace_file):
    found = measure_policies(
        ["autoregressive", "eagle3:levels=3,top_k=4,nodes=8"],
        batch_sizes=(1, 2),
        steps=2,
        repeats=2,
        device="cpu",
        trace=str(trace_file),
        target="llama-3.1-8b",
    )
    plain, tree = found.rows[0], found.rows[-1]
    assert (plain.ops, plain.step_us, plain.op_us) == (0, 0.0, 0.0)
    assert (tree.batch_size, tree.levels, tree.ops) == (2, 3, 12)
    assert tree.step_us > 0.0
    assert tree.op_us == tree.step_us / 12
    content = tomllib.loads(found.to_toml())
    assert [row["policy"] for row in content["policy"]] == [row.policy for row in found.rows]
    assert content["measured"]["steps"] == 2
    assert len(list(render(found))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [({"steps": 0}, "steps and repeats must be at least 1"), ({"device": "tpu"}, "device must be")],
)
def test_measurements_that_cannot_be_are_refused(options, message):
    with pytest.raises(InputError, match=message):
        measure_policies(["chain"], batch_sizes=(1,), **options)


def test_moved_values_are_fresh_and_still_shared():
    policy = parse("chain")
    shared = torch.ones(2)
    value = {"a": (shared, [shared]), "policy": policy, "none": None}
    copy = moved(value, "cpu", {})
    assert copy["a"][0] is copy["a"][1][0]
    assert copy["policy"] is policy
