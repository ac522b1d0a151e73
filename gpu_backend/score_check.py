"""Scores of a live draft against those of a recording of the same draft at the same place.

Both round to float16, but the recorder's forwards hold other rows than the engine's, so sums differ
in their last bits: a score may land on the next step of float16, and two children whose scores are
nearly equal may exchange their ranks. What lies below such a pair is then another node's.

Shape letters: k children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, TypeAlias

import numpy as np
import numpy.typing as npt

from echo_policies.session import Decision
from echo_policies.template import RankPath
from gpu_backend.capture import CapturedStep
from traces.schema import TraceArrays

Scores: TypeAlias = npt.NDArray[np.float16]

NOISE: Final = 1e-4
"""Nats that two orders of summation may differ by, beside one step of float16."""

ROOT: Final[RankPath] = ()


@dataclass(slots=True)
class ScoreCheck:
    """Conditional log-probabilities of the children of expanded nodes, compared."""

    compared: int = 0
    unequal: int = 0
    """Not the same float16."""
    largest: float = 0.0
    """Largest difference within the tolerance, in nats."""
    swapped: int = 0
    """Expanded nodes below children of nearly equal score that hold other scores."""
    beyond: list[str] = field(default_factory=list)
    """Differences beyond the tolerance, in words."""

    @property
    def differs(self) -> bool:
        """Whether a policy saw anything else than the recording holds."""
        return bool(self.unequal or self.swapped or self.beyond)

    def add(self, other: ScoreCheck) -> None:
        """Count another check in."""
        self.compared += other.compared
        self.unequal += other.unequal
        self.largest = max(self.largest, other.largest)
        self.swapped += other.swapped
        self.beyond += other.beyond


def node_paths(decision: Decision, slot: int) -> list[list[RankPath]]:
    """Ranks from the root down to every candidate of one request, by depth."""
    tree, top_k = decision.plan.template, decision.plan.top_k
    layers = decision.forest.layers
    if tree is not None:
        return [list(tree.paths[tree.layers[layer.depth - 1]]) for layer in layers]
    paths: list[list[RankPath]] = []
    for layer in layers:
        if layer.parent_BW is None:
            paths.append([(rank,) for rank in range(layer.width)])
        else:
            above = paths[-1]
            parents = layer.parent_BW[slot].tolist()
            paths.append([(*above[p], place % top_k) for place, p in enumerate(parents)])
    return paths


def expanded(step: CapturedStep, slot: int) -> dict[RankPath, tuple[int, int]]:
    """Depth and place in the frontier of every node that was expanded for one request."""
    found: dict[RankPath, tuple[int, int]] = {ROOT: (0, 0)}
    paths = node_paths(step.decided.decision, slot)
    for depth, expansion in enumerate(step.expansions[1:], start=1):
        assert expansion.index_BF is not None
        assert expansion.mask_BF is not None
        for place in np.flatnonzero(expansion.mask_BF[slot]).tolist():
            found[paths[depth - 1][expansion.index_BF[slot, place]]] = (depth, place)
    return found


def recorded_children(arrays: TraceArrays, position: int, path: RankPath) -> Scores | None:
    """Scores [k] of the recorded children of a node; None where it was not expanded."""
    if path == ROOT:
        root_k: Scores = arrays.root_logp[position]
        return root_k
    top_k, slot = arrays.child_logp.shape[-1], 0
    if len(path) > arrays.slot_child.shape[1]:
        return None
    for depth, rank in enumerate(path):
        candidate = rank if depth == 0 else slot * top_k + rank
        where = np.flatnonzero(arrays.slot_child[position, depth] == candidate)
        if not len(where) or rank >= (arrays.root_logp.shape[1] if depth == 0 else top_k):
            return None
        slot = int(where[0])
    child_k: Scores = arrays.child_logp[position, len(path) - 1, slot]
    return child_k


def is_near(one: np.float16, other: np.float16) -> bool:
    """Whether two scores differ by no more than rounding explains."""
    if np.isinf(one) or np.isinf(other):
        return bool(one == other)
    step = float(np.spacing(max(abs(one), abs(other))))
    return abs(float(one) - float(other)) <= step + NOISE


def check_scores(
    step: CapturedStep, slot: int, arrays: TraceArrays, position: int, label: str
) -> ScoreCheck:
    """Compare what one request's live draft revealed with what was recorded there.

    Args:
        step: of the live run.
        slot: of the request.
        arrays: of the recording.
        position: where the request stands in it.
        label: names request and place in messages.
    """
    check = ScoreCheck()
    seen: dict[RankPath, tuple[Scores, Scores]] = {}
    doubtful: set[RankPath] = set()
    for path, (depth, place) in expanded(step, slot).items():
        recorded_k = recorded_children(arrays, position, path)
        if recorded_k is None:
            continue
        live_k = step.expansions[depth].logp_BFk[slot, place]
        seen[path] = live_k, recorded_k
        above = path[:-1]
        if path != ROOT and (above in doubtful or _may_swap(path[-1], *seen[above])):
            doubtful.add(path)
        _compare(check, live_k, recorded_k, path in doubtful, f"{label}, below {_name(path)}")
    return check


def _compare(
    check: ScoreCheck, live_k: Scores, recorded_k: Scores, is_doubtful: bool, where: str
) -> None:
    shared = min(len(live_k), len(recorded_k))
    live_k, recorded_k = live_k[:shared], recorded_k[:shared]
    check.compared += shared
    differs = np.flatnonzero(live_k != recorded_k).tolist()
    check.unequal += len(differs)
    far = [rank for rank in differs if not is_near(live_k[rank], recorded_k[rank])]
    if not far:
        gaps = [abs(float(live_k[rank]) - float(recorded_k[rank])) for rank in differs]
        check.largest = max([check.largest, *gaps])
    elif is_doubtful:
        check.swapped += 1
    else:
        rank = far[0]
        check.beyond.append(
            f"{where}, rank {rank}: score {live_k[rank]:.5g} live, {recorded_k[rank]:.5g} recorded"
        )


def _may_swap(rank: int, live_k: Scores, recorded_k: Scores) -> bool:
    """Whether a neighbour of a child has nearly its score, so that the two may change places."""
    return any(
        is_near(scores[rank], scores[other])
        for scores in (live_k, recorded_k)
        for other in (rank - 1, rank + 1)
        if rank < len(scores) and 0 <= other < len(scores)
    )


def path_may_swap(
    step: CapturedStep, slot: int, arrays: TraceArrays, position: int, ahead: Sequence[int]
) -> bool:
    """Whether the first recorded token that has another rank live is a near-tie in the draft.

    Args:
        step: of the live run.
        slot: of the request.
        arrays: of the recording.
        position: where the request stands in it.
        ahead: recorded tokens behind the root.
    """
    nodes, path = expanded(step, slot), ROOT
    for depth, token in enumerate(ahead):
        if path not in nodes or depth >= arrays.path_rank.shape[1]:
            return False
        expansion, place = step.expansions[nodes[path][0]], nodes[path][1]
        logp_k = expansion.logp_BFk[slot, place]
        is_token_k = (expansion.token_BFk[slot, place] == token) & np.isfinite(logp_k)
        live = int(is_token_k.argmax()) if is_token_k.any() else None
        rank = int(arrays.path_rank[position, depth])
        if rank < 0 or (live is None and rank >= len(logp_k)):
            return False
        if live != rank:
            there = logp_k[min(rank, len(logp_k) - 1)]
            return is_near(there, arrays.path_logp[position, depth])
        path = (*path, rank)
    return False


def _name(path: RankPath) -> str:
    return "the root" if path == ROOT else "node " + "/".join(map(str, path))
