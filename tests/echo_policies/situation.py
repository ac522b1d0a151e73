"""A few requests whose candidates are written down by hand, and one step over them."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView, Policy, StepContext
from echo_policies.forest import Forest
from echo_policies.session import Decision, Session, open_session

Path = tuple[int, ...]
Tree = dict[Path, list[float]]
"""Conditional probabilities of the children of a node, by its rank path."""


@dataclass
class WrittenDrafter:
    """Shows the children that a dictionary gives."""

    trees: list[Tree]
    signals: frozenset[str] = frozenset({"ranks", "path_logp"})
    deepest: int = 64
    paths: list[list[list[Path | None]]] = field(default_factory=list)
    calls: list[int] = field(default_factory=list)

    def objection(self, plan: DraftPlan) -> str | None:
        return f"drafts {plan.levels} levels" if plan.levels > self.deepest else None

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        self.paths, self.calls = [], [1]
        self._top_k = plan.top_k
        self._logp: list[dict[Path, float]] = [{(): 0.0} for _ in self.trees]
        roots: list[list[Path | None]] = [[()] if on else [None] for on in drafting_B.tolist()]
        return self._layer(1, roots, None)

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        self.calls.append(layer.depth + 1)
        rows = zip(frontier.index_BF.tolist(), frontier.mask_BF.tolist(), strict=True)
        chosen = [
            [above[n] if on else None for n, on in zip(*row, strict=True)]
            for above, row in zip(self.paths[-1], rows, strict=True)
        ]
        return self._layer(layer.depth + 1, chosen, frontier.index_BF)

    def _layer(
        self, depth: int, parents: list[list[Path | None]], index_BF: Tensor | None
    ) -> LayerView:
        paths: list[list[Path | None]] = []
        scores: list[list[float]] = []
        for i, row in enumerate(parents):
            paths.append([])
            scores.append([])
            for parent in row:
                given = self.trees[i].get(parent, []) if parent is not None else []
                for rank in range(self._top_k):
                    path = (*parent, rank) if parent is not None and rank < len(given) else None
                    score = -torch.inf
                    if path is not None and parent is not None:
                        score = self._logp[i][parent] + float(torch.tensor(given[rank]).log())
                        self._logp[i][path] = score
                    paths[-1].append(path)
                    scores[-1].append(score)
        self.paths.append(paths)
        logp_BW = torch.tensor(scores)
        parent_BW = None if index_BF is None else index_BF.repeat_interleave(self._top_k, dim=1)
        return LayerView(depth, logp_BW > -torch.inf, parent_BW, logp_BW)

    def verify(self, forest: Forest, keep_BN: Tensor) -> Tensor:
        raise NotImplementedError


def context(
    size: int,
    k_max: int = 1000,
    *,
    step: int = 0,
    live: list[bool] | None = None,
    remaining: list[int] | None = None,
    arrival: list[int] | None = None,
    level_limit: int = 1 << 30,
) -> StepContext:
    return StepContext(
        k_max,
        step,
        torch.tensor(live or [True] * size),
        torch.tensor(remaining or [99] * size),
        torch.tensor(arrival or list(range(size))),
        level_limit,
    )


def names(drafter: WrittenDrafter, decision: Decision) -> list[set[str]]:
    """Kept nodes of every request, as digits of ranks."""
    kept: list[set[str]] = [set() for _ in drafter.trees]
    parts = decision.forest.split(decision.keep_BN)
    for paths, keep in zip(drafter.paths, parts, strict=True):
        for i, row in enumerate(keep.tolist()):
            kept[i] |= {"".join(map(str, paths[i][n] or "?")) for n, on in enumerate(row) if on}
    return kept


def one_step(
    policy: Policy, trees: list[Tree], ctx: StepContext | None = None, **options: bool
) -> tuple[list[set[str]], Decision]:
    """Kept nodes by name, and the decision."""
    drafter = WrittenDrafter(trees)
    session: Session = open_session(policy, drafter, **options)
    decision = session.decide(ctx or context(len(trees)), policy.scheduler.start())
    return names(drafter, decision), decision
