"""ECHO's Algorithm 1 in plain Python, under every switch (`echo.md` 4.2 to 4.3b)."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from tests.echo_policies.reference import Draft, Node, Outcome, Request, best_first, plain
from traces.schema import Trace


@dataclass(frozen=True)
class Echo:
    """Switches of Algorithm 1; `taus` is empty for gate_set = off."""

    levels: int
    top_k: int
    w_topk: int
    w_max: int = 8
    taus: tuple[tuple[int, float], ...] = ()
    normalized: bool = False
    gate_cmp: str = "gt"
    failing_layer: str = "drop"
    budget_order: str = "confidence"
    widen: str = "truncated"
    widen_depths: str = "cut_only"
    budget_counts_roots: bool = False

    def passes(self, depth: int, score: np.float32) -> bool:
        """c against tau in log space, in float32 (Eq. 7)."""
        tau = dict(self.taus)[depth]
        log_tau = np.float32(math.log(tau)) if tau > 0 else np.float32(-np.inf)
        if self.normalized:
            score = score / np.float32(depth)
        return bool(score > log_tau if self.gate_cmp == "gt" else score >= log_tau)


@dataclass
class Budget:
    """What is left of k_max, and who is served first."""

    echo: Echo
    requests: list[Request]
    step: int
    k_left: int

    def serve(
        self, pools: dict[int, list[Node]], key: dict[int, np.float32], per_turn: int, turns: float
    ) -> dict[int, list[Node]]:
        """Serve the requests in order, each at most `turns` times, until budget or pools are empty.

        Every pool is best first. Returns what each request was granted, in that order.
        """
        order = self._order(pools, key)
        granted: dict[int, list[Node]] = {i: [] for i in order}
        while turns > 0 and self.k_left > 0 and any(pools[i] for i in order):
            for i in order:
                w = min(self.k_left, per_turn, len(pools[i]))
                granted[i] += pools[i][:w]
                pools[i] = pools[i][w:]
                self.k_left -= w
            turns -= 1
        return granted

    def _order(self, pools: dict[int, list[Node]], key: dict[int, np.float32]) -> list[int]:
        if self.echo.budget_order == "confidence":
            return sorted(pools, key=lambda i: (-key[i], i))
        if self.echo.budget_order == "fcfs":
            return sorted(pools, key=lambda i: self.requests[i].arrival)
        live = [i for i, request in enumerate(self.requests) if request.live]
        start = self.step % len(live)
        return [i for i in live[start:] + live[:start] if i in pools]


def echo(
    trace: Trace,
    requests: list[Request],
    switches: Echo,
    k_max: int,
    *,
    step: int = 0,
    staged: bool = True,
) -> Outcome:
    """Algorithm 1 with correct accounting (`echo.md` 4.2)."""
    deepest = min(switches.levels, max(request.cap for request in requests))
    if k_max == 0 or deepest <= 0:
        return plain(requests)
    roots = sum(request.live for request in requests) if switches.budget_counts_roots else 0
    budget = Budget(switches, requests, step, max(0, k_max - roots))
    draft = Draft(trace, requests, switches.top_k)
    admitted: list[tuple[int, Node]] = []
    cut: dict[int, int] = {}  # truncated requests (and complete ones where those widen too)
    layer, depth = draft.first(), 1
    while True:  # priority 1
        frontier = _deepen(budget, layer, depth, cut, admitted)
        frontier = draft.may_extend(frontier, depth)
        if depth == deepest or not frontier or budget.k_left == 0:
            break
        layer, depth = draft.next(frontier), depth + 1
    _widen(budget, draft, cut, admitted)  # priority 2
    # Only at a checkpoint can the host see that nobody deepens any more.
    gated = [d for d, _ in switches.taus if d <= deepest]
    stops = [d for d in gated if d >= depth] if staged else []
    levels = deepest if depth == deepest else min(stops, default=deepest)
    return draft.outcome(
        ((i, node.path) for i, node in admitted),
        levels,
        sum(d <= levels for d in gated) if staged else 0,
    )


def _deepen(
    budget: Budget,
    layer: dict[int, list[Node]],
    depth: int,
    cut: dict[int, int],
    admitted: list[tuple[int, Node]],
) -> dict[int, list[Node]]:
    """Admit up to w_topk nodes per request; return the nodes of those that go deeper."""
    switches = budget.echo
    pools, key, passes = {}, {}, {}
    for i, nodes in layer.items():
        if not nodes:
            continue  # neither truncated nor active
        pools[i] = best_first(nodes)
        key[i] = pools[i][0].score
        passes[i] = depth not in dict(switches.taus) or switches.passes(depth, key[i])
        if not passes[i]:
            cut[i] = depth
            if switches.failing_layer == "drop":
                pools[i] = []
        pools[i] = pools[i][: switches.w_topk]
    one_turn = switches.budget_order != "round_robin"
    granted = budget.serve(pools, key, switches.w_topk if one_turn else 1, math.inf)
    frontier = {}
    for i, nodes in granted.items():
        admitted += [(i, node) for node in nodes]
        if passes[i] and nodes:
            frontier[i] = nodes
            last = min(switches.levels, budget.requests[i].cap)
            if depth == last and switches.widen == "truncated_and_complete":
                cut[i] = depth
    return frontier


def _widen(
    budget: Budget,
    draft: Draft,
    cut: dict[int, int],
    admitted: list[tuple[int, Node]],
) -> None:
    """Give truncated requests more of what is revealed: at the cut, or at all depths up to it."""
    switches = budget.echo
    if switches.widen == "off":
        return
    have = {(i, node.path) for i, node in admitted}
    pools, key = {}, {}
    for i, depth in cut.items():
        first = 1 if switches.widen_depths == "up_to_cut" else depth
        found = [node for layer in draft.layers[first - 1 : depth] for node in layer.get(i, ())]
        pools[i] = best_first(node for node in found if (i, node.path) not in have)
        key[i] = max(node.score for node in draft.layers[depth - 1][i])
    per_turn = 1 if switches.budget_order == "round_robin" else switches.w_max
    for i, nodes in budget.serve(pools, key, per_turn, math.inf).items():
        admitted += [(i, node) for node in nodes]
