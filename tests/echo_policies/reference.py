"""One step of every policy in plain Python: lists, dicts and rank paths, no tensors.

Written from the rules, not from the code under test: `policies.md` (chains, fixed trees,
EAGLE-2/3) and the recording format (who reveals what); ECHO has a file of its own.
Scores are float32 sums of the float16 conditionals that the recording holds.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

import numpy as np

from traces.schema import Trace

Path = tuple[int, ...]


@dataclass(frozen=True)
class Request:
    """A slot of the batch at one position of the recording."""

    position: int
    live: bool = True
    remaining: int = 100
    arrival: int = 0

    @property
    def cap(self) -> int:
        """r tokens left leave room for r - 1 drafts."""
        return self.remaining - 1 if self.live else 0


@dataclass
class Node:
    """A candidate: its ranks, its path score, its number in the recording, its place in a view."""

    path: Path
    score: np.float32
    candidate: int
    place: int


@dataclass
class Outcome:
    """What one step did, per request where it is a list."""

    plan: set[tuple[int, Path]] = field(default_factory=set)
    accepted: list[int] = field(default_factory=list)
    unrevealed: list[int] = field(default_factory=list)
    drafted: list[int] = field(default_factory=list)
    expanded: list[int] = field(default_factory=list)
    levels: int = 0
    checks: int = 0


class Recording:
    """Which children a recorded node has, and which token the target took."""

    def __init__(self, trace: Trace) -> None:
        self.arrays = trace.arrays
        self.width = trace.header.top_k

    def children(
        self, position: int, parent: Node | None, top_k: int, place: int = 0
    ) -> list[Node]:
        """The first `top_k` children of a node (None: of the root); `place` numbers the first."""
        if parent is None:
            row, first, path, score = self.arrays.root_logp[position], 0, (), np.float32(0)
        else:
            depth, slot = len(parent.path), self.slot(position, parent)
            assert slot is not None, "ask only for what was recorded"
            row = self.arrays.child_logp[position, depth - 1, slot]
            first, path, score = slot * self.width, parent.path, parent.score
        return [
            Node((*path, rank), np.float32(score + np.float32(logp)), first + rank, place + rank)
            for rank, logp in enumerate(row[:top_k])
            if logp > -np.inf
        ]

    def slot(self, position: int, node: Node) -> int | None:
        """The beam slot that holds a node, if the recording expanded it."""
        row = self.arrays.slot_child[position, len(node.path) - 1].tolist()
        return row.index(node.candidate) if node.candidate in row else None

    def accepted(self, position: int, plan: set[Path]) -> int:
        """Length of the longest start of the target's path that lies in the plan."""
        path = tuple(self.arrays.path_rank[position].tolist())
        length = 0
        while length < len(path) and path[: length + 1] in plan:
            length += 1
        return length


class Draft:
    """Layers as they were revealed; counts what the engine must charge."""

    def __init__(self, trace: Trace, requests: list[Request], top_k: int) -> None:
        self.recording = Recording(trace)
        self.requests = requests
        self.top_k = top_k
        self.layers: list[dict[int, list[Node]]] = []
        self.unrevealed = [0] * len(requests)
        self.expanded = [0] * len(requests)

    def first(self) -> dict[int, list[Node]]:
        """Depth 1 of every request that has room for a draft."""
        layer = {}
        for i, request in enumerate(self.requests):
            if request.cap > 0:
                layer[i] = self.recording.children(request.position, None, self.top_k)
                self.expanded[i] += 1
        self.layers.append(layer)
        return layer

    def next(self, frontier: dict[int, list[Node]]) -> dict[int, list[Node]]:
        """Children of the frontier's nodes, in its order; none where they are not recorded."""
        layer: dict[int, list[Node]] = {}
        for i, nodes in frontier.items():
            position = self.requests[i].position
            layer[i] = []
            for number, node in enumerate(nodes):
                self.expanded[i] += 1
                if self.recording.slot(position, node) is None:
                    self.unrevealed[i] += 1
                else:
                    place = number * self.top_k
                    layer[i] += self.recording.children(position, node, self.top_k, place)
        self.layers.append(layer)
        return layer

    def may_extend(self, frontier: dict[int, list[Node]], depth: int) -> dict[int, list[Node]]:
        """The frontier without requests that have no room below `depth`."""
        return {i: nodes for i, nodes in frontier.items() if nodes and self.requests[i].cap > depth}

    def outcome(self, plan: Iterable[tuple[int, Path]], levels: int, checks: int) -> Outcome:
        """Accept the plan and collect the counts."""
        kept = set(plan)
        return Outcome(
            plan=kept,
            accepted=_accept(self.recording, self.requests, kept),
            unrevealed=self.unrevealed,
            drafted=[
                sum(len(layer.get(i, ())) for layer in self.layers)
                for i in range(len(self.requests))
            ],
            expanded=self.expanded,
            levels=levels,
            checks=checks,
        )


def _accept(
    recording: Recording, requests: list[Request], plan: set[tuple[int, Path]]
) -> list[int]:
    return [
        recording.accepted(request.position, {path for j, path in plan if j == i})
        for i, request in enumerate(requests)
    ]


def best_first(nodes: Iterable[Node]) -> list[Node]:
    """Score descending, depth ascending, recorded order."""
    return sorted(nodes, key=lambda node: (-node.score, len(node.path), node.place))


def plain(requests: list[Request]) -> Outcome:
    """Autoregressive decoding."""
    none = [0] * len(requests)
    return Outcome(set(), none, none, none, none)


def static(
    trace: Trace, requests: list[Request], paths: list[Path], *, k_max: int | None = None
) -> Outcome:
    """A fixed tree: every node whose depth the request has room for.

    `k_max` cuts breadth first, one node per request in turn (`--cap-all`).
    """
    deepest = min(max(map(len, paths)), max(request.cap for request in requests))
    if deepest <= 0 or k_max == 0:
        return plain(requests)
    wanted = {
        i: sorted((p for p in paths if len(p) <= request.cap), key=lambda p: (len(p), p))
        for i, request in enumerate(requests)
    }
    plan = [(i, path) for i, nodes in wanted.items() for path in nodes]
    if k_max is not None:
        turns = sorted((turn, i) for i, nodes in wanted.items() for turn in range(len(nodes)))
        plan = [(i, wanted[i][turn]) for turn, i in turns[:k_max]]
    parents = [
        {p[:-1] for p in nodes if len(p) > 1} | ({()} if nodes else set())
        for nodes in wanted.values()
    ]
    return Outcome(
        plan=set(plan),
        accepted=_accept(Recording(trace), requests, set(plan)),
        unrevealed=[0] * len(requests),
        drafted=[len(nodes) for nodes in wanted.values()],
        expanded=[len(nodes) for nodes in parents],
        levels=deepest,
    )


def chain(
    trace: Trace, requests: list[Request], levels: int, *, k_max: int | None = None
) -> Outcome:
    """The greedy chain."""
    if levels == 0:
        return plain(requests)
    return static(trace, requests, [(0,) * d for d in range(1, levels + 1)], k_max=k_max)


def eagle3(
    trace: Trace,
    requests: list[Request],
    levels: int,
    top_k: int,
    nodes: int,
    *,
    k_max: int | None = None,
) -> Outcome:
    """A beam of `top_k`, then the `nodes` best of each request; `k_max` as `--cap-all`."""
    deepest = min(levels, max(request.cap for request in requests))
    if deepest <= 0 or k_max == 0:
        return plain(requests)
    draft = Draft(trace, requests, top_k)
    layer = draft.first()
    for depth in range(1, deepest):
        frontier = {i: best_first(found)[:top_k] for i, found in layer.items()}
        frontier = draft.may_extend(frontier, depth)
        if not frontier:
            break
        layer = draft.next(frontier)
    kept = []
    for i in range(len(requests)):
        pool = [node for layer in draft.layers for node in layer.get(i, ())]
        kept += [(i, node) for node in best_first(pool)[:nodes]]
    if k_max is not None:
        kept.sort(key=lambda item: (-item[1].score, len(item[1].path), item[1].place, item[0]))
        kept = kept[:k_max]
    return draft.outcome(((i, node.path) for i, node in kept), deepest, 0)
