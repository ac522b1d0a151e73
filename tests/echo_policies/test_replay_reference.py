"""Replay of every policy equals the plain-Python reference, node by node, on random traces."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from echo_policies.api import Policy, StepContext
from echo_policies.gates.confidence import ConfidenceGate
from echo_policies.gates.open import OpenGate
from echo_policies.schedulers.elastic import Elastic
from echo_policies.schedulers.none import NoDraft
from echo_policies.schedulers.rerank import Rerank
from echo_policies.schedulers.static import Chain, StaticTree
from echo_policies.session import Decision, open_session
from tests.echo_policies import reference
from tests.echo_policies.reference import Outcome, Path, Request
from tests.echo_policies.reference_echo import Echo, echo
from tests.traces.build import Sizes, random_trace
from traces.replay import RecordedDrafter, RecordedVerifier, ReplayTables, replay_tables
from traces.schema import Trace

TRACES = 1000
CHUNKS = 10
Rng = np.random.Generator


def a_trace(rng: Rng) -> Trace:
    levels = int(rng.integers(1, 6))
    sizes = Sizes(
        levels=levels,
        beam_width=int(rng.integers(1, 5)),
        root_width=int(rng.integers(1, 9)),
        top_k=int(rng.integers(1, 7)),
        chain_levels=levels + int(rng.integers(0, 3)),
        max_tokens=6,
    )
    trace = random_trace(rng, 3, sizes)
    if rng.random() < 0.5:
        return trace
    # Whole numbers make ties between nodes and between requests common.
    arrays = trace.arrays
    coarse = {name: np.round(getattr(arrays, name)) for name in ("root_logp", "child_logp")}
    return replace(trace, arrays=replace(arrays, **coarse))


def a_batch(rng: Rng, trace: Trace) -> list[Request]:
    size = int(rng.integers(1, 7))
    arrivals = rng.permutation(size)
    return [
        Request(
            position=int(rng.integers(trace.num_positions)),
            live=bool(rng.random() < 0.85),
            remaining=int(rng.choice([1, 2, 3, 4, 40], p=[0.05, 0.1, 0.1, 0.1, 0.65])),
            arrival=int(arrivals[i]),
        )
        for i in range(size)
    ]


def a_budget(rng: Rng) -> int:
    """From nothing over less than one layer to more than there is."""
    return int(rng.choice([0, 1, 2, 3, *rng.integers(4, 16, 3), 10_000]))


def a_tau(rng: Rng) -> float:
    # exp of whole numbers meets coarse scores exactly, so that > and >= differ.
    return float(rng.choice([0.0, 1.0, math.exp(-1), math.exp(-2), rng.random() ** 2]))


def an_echo(rng: Rng, trace: Trace) -> tuple[Policy, Echo]:
    gate_set, threshold = (
        rng.choice(["sparse", "dense", "off"]),
        rng.choice(["per_depth", "fixed", "normalized"]),
    )
    levels = int(rng.integers(1, trace.header.levels + 1))
    share = 1.0 if gate_set == "dense" else 0.5
    tau = a_tau(rng)
    taus = tuple(
        (depth, a_tau(rng) if threshold == "per_depth" else tau)
        for depth in range(1, levels + 2)
        if gate_set != "off" and rng.random() < share
    )
    shape: dict[str, Any] = {
        "levels": levels,
        "top_k": int(rng.choice([rng.integers(1, trace.header.top_k + 1), trace.header.top_k])),
        "w_topk": int(rng.integers(1, 5)),
        "w_max": int(rng.integers(1, 4)),
        "failing_layer": str(rng.choice(["drop", "keep"])),
        "budget_order": str(rng.choice(["confidence", "fcfs", "round_robin"])),
        "widen": str(rng.choice(["off", "truncated", "truncated_and_complete"])),
        "widen_depths": str(rng.choice(["cut_only", "up_to_cut"])),
        "budget_counts_roots": bool(rng.random() < 0.2),
    }
    if rng.random() < 0.4:
        # Cut nearly everybody at once, so that a budget is shared out by width.
        taus = ((1, float(rng.choice([0.7, 0.9, 1.0]))),)
        shape |= {"top_k": trace.header.top_k, "w_max": 1 + shape["w_max"] % 2}
        shape["widen"] = "truncated" if shape["widen"] == "off" else shape["widen"]
        gate_set = "sparse"
    gate_cmp = str(rng.choice(["gt", "ge"]))
    gate = ConfidenceGate(
        gate_set=str(gate_set), threshold=str(threshold), gate_cmp=gate_cmp, taus=taus
    )
    policy = Policy(name="echo", gate=gate, scheduler=Elastic(**shape))
    switches = Echo(
        **{**shape, "w_topk": min(shape["w_topk"], shape["top_k"])},
        taus=taus,
        normalized=threshold == "normalized",
        gate_cmp=gate_cmp,
    )
    return policy, switches


def a_tree(rng: Rng, deepest: int) -> list[Path]:
    paths: list[Path] = [()]
    for _ in range(int(rng.integers(1, 12))):
        parent = paths[int(rng.integers(len(paths)))]
        path = (*parent, int(rng.integers(0, 5)))
        if len(path) <= deepest and path not in paths:
            paths.append(path)
    return paths[1:] or [(0,)]


def replay(
    tables: ReplayTables,
    policy: Policy,
    requests: list[Request],
    k_max: int,
    step: int = 0,
    **options: Any,
) -> tuple[Outcome, Decision]:
    """One step through the package."""
    drafter = RecordedDrafter(tables)
    session = open_session(policy, drafter, **options)
    ctx = StepContext(
        k_max=k_max,
        step=step,
        live_B=torch.tensor([r.live for r in requests]),
        remaining_B=torch.tensor([r.remaining for r in requests]),
        arrival_B=torch.tensor([r.arrival for r in requests]),
        level_limit=max(r.cap for r in requests),
    )
    drafter.seek(torch.tensor([r.position for r in requests]))
    decision = session.decide(ctx, policy.scheduler.start())
    accepted_B = RecordedVerifier(drafter).verify(decision.forest, decision.keep_BN)
    outcome = Outcome(
        plan=plan_of(decision),
        accepted=accepted_B.tolist(),
        unrevealed=drafter.unrevealed_B.tolist(),
        drafted=decision.drafted_B.tolist(),
        expanded=decision.expanded_B.tolist(),
        levels=decision.levels,
        checks=decision.checks,
    )
    return outcome, decision


def plan_of(decision: Decision) -> set[tuple[int, Path]]:
    """Kept nodes as (request, path of ranks), read from the views alone."""
    found: set[tuple[int, Path]] = set()
    above: list[list[Path]] = []
    template = decision.plan.template
    for layer, keep in zip(
        decision.forest.layers, decision.forest.split(decision.keep_BN), strict=True
    ):
        here = []
        for i in range(layer.exists_BW.shape[0]):
            if template is not None:
                paths = list(template.paths[template.layers[layer.depth - 1]])
            elif layer.parent_BW is None:
                paths = [(rank,) for rank in range(layer.width)]
            else:
                parents = layer.parent_BW[i].tolist()
                # Children lie by parent, in rank order, each parent with equally many places.
                ranks = [n % decision.plan.top_k for n in range(layer.width)]
                paths = [(*above[i][p], rank) for p, rank in zip(parents, ranks, strict=True)]
            found |= {(i, path) for path, kept in zip(paths, keep[i].tolist(), strict=True) if kept}
            here.append(paths)
        above = here
    return found


def test_an_empty_plan_has_no_nodes() -> None:
    trace = a_trace(np.random.default_rng(1))
    policy = Policy(gate=OpenGate(), scheduler=NoDraft())
    outcome, _ = replay(replay_tables(trace), policy, [Request(0), Request(1, live=False)], 10)
    assert outcome == reference.plain([Request(0), Request(1)])


@pytest.mark.parametrize("chunk", range(CHUNKS))
def test_replay_equals_the_reference(chunk: int) -> None:
    seen: Counter[str] = Counter()
    for seed in range(chunk * TRACES // CHUNKS, (chunk + 1) * TRACES // CHUNKS):
        rng = np.random.default_rng([2024, seed])
        trace = a_trace(rng)
        tables = replay_tables(trace)
        requests, k_max, step = a_batch(rng, trace), a_budget(rng), int(rng.integers(7))
        caps_all = bool(rng.random() < 0.3)
        cap = k_max if caps_all else None
        staged = bool(rng.random() < 0.8)
        cases: list[tuple[Policy, Outcome]] = []
        for _ in range(2):
            policy, switches = an_echo(rng, trace)
            cases.append((policy, echo(trace, requests, switches, k_max, step=step, staged=staged)))
        levels = int(rng.integers(1, trace.header.levels + 1))
        top_k = int(rng.integers(1, trace.header.top_k + 1))
        nodes = int(rng.integers(1, 30))
        cases.append(
            (
                Policy(gate=OpenGate(), scheduler=Rerank(levels=levels, top_k=top_k, nodes=nodes)),
                reference.eagle3(trace, requests, levels, top_k, nodes, k_max=cap),
            )
        )
        length = int(rng.integers(0, trace.header.chain_levels + 1))
        cases.append(
            (
                Policy(gate=OpenGate(), scheduler=Chain(levels=length)),
                reference.chain(trace, requests, length, k_max=cap),
            )
        )
        paths = a_tree(rng, trace.header.chain_levels)
        spec = "/".join("".join(map(str, path)) for path in paths)
        cases.append(
            (
                Policy(gate=OpenGate(), scheduler=StaticTree(tree=spec)),
                reference.static(trace, requests, paths, k_max=cap),
            )
        )
        cases.append((Policy(gate=OpenGate(), scheduler=NoDraft()), reference.plain(requests)))
        for policy, expected in cases:
            actual, _ = replay(
                tables, policy, requests, k_max, step, caps_all=caps_all, is_staged=staged
            )
            assert actual == expected, (
                f"seed {seed}: {policy.scheduler!r} {policy.gate!r} k_max {k_max} step {step} "
                f"caps_all {caps_all} {requests}"
            )
            seen["accepted"] += sum(actual.accepted)
            seen["unrevealed"] += sum(actual.unrevealed)
            seen["checks"] += actual.checks
            seen["nodes"] += len(actual.plan)
    # The comparison means something only where these things happen.
    assert min(seen.values()) > 4
    assert len(seen) == 4
