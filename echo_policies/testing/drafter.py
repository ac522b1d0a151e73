"""A draft model that does not exist: random forests out of hashes, whatever shape is asked for.

Every number follows from the request's seed and the node's rank path, so the same request
drafts the same tree in any slot and in any order. Shape letters as in :mod:`echo_policies.api`;
k children per node.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from echo_policies.forest import Forest

SIGNALS = frozenset({"ranks", "path_logp", "entropy"})
"""All signals that a policy may need."""

_TAIL = 2.0
_KINDS = 16
_CERTAIN, _BARREN, _ONLY_LAST, _HALF = range(4)


@dataclass(frozen=True, slots=True)
class Ground:
    """What kind of forest grows."""

    grain: float = 0.0
    """Conditional log-probabilities are rounded down to multiples of this; 0 leaves them alone."""
    is_ragged: bool = False
    """Some nodes have fewer children than asked for, none, a certain one, or only the last."""


EVEN_GROUND = Ground()
"""Scores that hardly ever tie, and every child that is asked for."""


@dataclass(slots=True, eq=False)
class SyntheticDrafter:
    """Drafts for requests that are given by a seed each, and hides a target path.

    - :meth:`begin` and :meth:`expand` show views; ``shown`` keeps copies of them.
    - ``outcome`` chooses the hidden path, which no view depends on.
    """

    seed_B: Tensor
    """int64 [B]: what the request drafts."""
    ground: Ground = EVEN_GROUND
    outcome: int = 0
    keys: list[Tensor] = field(default_factory=list)
    """int64 [B, W] per depth: a node's identity, wherever it lies in a view."""
    shown: list[tuple[LayerView, LayerView]] = field(default_factory=list)
    """Views handed out, each with a copy from before anybody saw it."""
    _plan: DraftPlan = field(default_factory=lambda: DraftPlan(0))
    _on_path: list[Tensor] = field(default_factory=list)

    @property
    def signals(self) -> frozenset[str]:
        """Everything."""
        return SIGNALS

    def objection(self, plan: DraftPlan) -> str | None:
        """Nothing is too deep or too wide for a drafter that computes."""
        del plan
        return None

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Return the root's children."""
        self._plan = plan
        root_B1 = _mix(self.seed_B + 1)[:, None]
        here_B1 = drafting_B[:, None]
        if plan.template is not None:
            return self._template_layer(1, root_B1, here_B1)
        return self._children(1, root_B1, here_B1, torch.zeros(root_B1.shape), None)

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Return the children of the frontier's nodes."""
        index_BF, mask_BF, depth = frontier.index_BF, frontier.mask_BF, layer.depth + 1
        if self._plan.template is not None:
            opened_BW = torch.zeros_like(layer.exists_BW).scatter(1, index_BF, mask_BF)
            parents_W = self._plan.template.parents_in_layer(depth, opened_BW.device)
            return self._template_layer(depth, self.keys[-1][:, parents_W], opened_BW[:, parents_W])
        key_BF = self.keys[-1].gather(1, index_BF)
        mask_BF = mask_BF & layer.exists_BW.gather(1, index_BF)
        score_BF = self.shown[-1][1].scores_BW.gather(1, index_BF)
        return self._children(depth, key_BF, mask_BF, score_BF, index_BF)

    def verify(self, forest: Forest, keep_BN: Tensor) -> Tensor:
        """int64 [B]: length of the kept part of the hidden path."""
        if not forest.layers:
            return torch.zeros(keep_BN.shape[0], dtype=torch.int64)
        return (keep_BN & torch.cat(self._on_path, dim=1)).sum(1)

    def kept(self, keep_BN: Tensor) -> list[set[int]]:
        """Identities of every request's kept nodes."""
        if not self.keys:
            return [set() for _ in range(keep_BN.shape[0])]
        rows = zip(torch.cat(self.keys, dim=1).tolist(), keep_BN.tolist(), strict=True)
        return [{key for key, kept in zip(*row, strict=True) if kept} for row in rows]

    def _children(
        self, depth: int, key_BF: Tensor, mask_BF: Tensor, score_BF: Tensor, index_BF: Tensor | None
    ) -> LayerView:
        top_k = self._plan.top_k
        key_BFk = _mix(key_BF[..., None] * 1021 + torch.arange(1, top_k + 1))
        cond_BFk = self._conditionals(key_BF, key_BFk)
        cond_BFk = cond_BFk.masked_fill(~mask_BF[..., None], -torch.inf)
        logp_BW = (cond_BFk + score_BF[..., None]).flatten(1)
        exists_BW = logp_BW > -torch.inf
        rank_W = torch.arange(top_k).repeat(key_BF.shape[1])
        parent_BW = None if index_BF is None else index_BF.repeat_interleave(top_k, dim=1)
        is_sorted = key_BF.shape[1] == 1 and not self.ground.is_ragged
        entropy_BF = (_uniform(_mix(key_BF + 7)) * 4).masked_fill(~mask_BF, 0.0)
        view = LayerView(depth, exists_BW, parent_BW, logp_BW, is_sorted, entropy_BF)
        return self._show(view, key_BFk.flatten(1), rank_W)

    def _conditionals(self, key_BF: Tensor, key_BFk: Tensor) -> Tensor:
        """float32 [B, F, k]: descending log-probabilities, as float16 would hold them."""
        top_k = key_BFk.shape[-1]
        sharp_BF1 = 0.5 + 4 * _uniform(_mix(key_BF + 3))[..., None]
        logit_BFk = -torch.log(1e-6 + _uniform(key_BFk)) * sharp_BF1
        tail_BF1 = torch.full_like(sharp_BF1, _TAIL)
        logp_BFk = torch.log_softmax(torch.cat([logit_BFk, tail_BF1], dim=-1), dim=-1)[..., :-1]
        cond_BFk = logp_BFk.sort(dim=-1, descending=True).values
        if self.ground.grain:
            cond_BFk = (cond_BFk / self.ground.grain).floor() * self.ground.grain
        if self.ground.is_ragged:
            kind_BF1 = (_mix(key_BF + 5).remainder(_KINDS))[..., None]
            rank_k = torch.arange(top_k)
            certain = (kind_BF1 == _CERTAIN) & (rank_k == 0)
            cond_BFk = cond_BFk.masked_fill(certain, 0.0)
            gone = (
                ((kind_BF1 == _CERTAIN) & (rank_k > 0))
                | (kind_BF1 == _BARREN)
                | ((kind_BF1 == _ONLY_LAST) & (rank_k < top_k - 1))
                | ((kind_BF1 == _HALF) & (rank_k >= math.ceil(top_k / 2)))
            )
            cond_BFk = cond_BFk.masked_fill(gone, -torch.inf)
        return cond_BFk.half().float()

    def _template_layer(self, depth: int, parent_BW: Tensor, exists_BW: Tensor) -> LayerView:
        tree = self._plan.template
        assert tree is not None, "only called for templates"
        rank_W = torch.tensor(tree.ranks[tree.layers[depth - 1]])
        key_BW = _mix(parent_BW * 1021 + rank_W + 1)
        exists_BW = exists_BW.expand(key_BW.shape).clone()
        index_BW = None
        if depth > 1:
            parents_W = tree.parents_in_layer(depth, exists_BW.device)
            index_BW = parents_W.expand(key_BW.shape).clone()
        return self._show(LayerView(depth, exists_BW, index_BW, None), key_BW, rank_W)

    def _show(self, view: LayerView, key_BW: Tensor, rank_W: Tensor) -> LayerView:
        hidden_B = _mix(self.seed_B * 31 + self.outcome * 7 + view.depth).remainder(3)
        on_BW = (rank_W == hidden_B[:, None]) & view.exists_BW
        if view.parent_BW is not None:
            on_BW = on_BW & self._on_path[-1].gather(1, view.parent_BW)
        self._on_path.append(on_BW)
        self.keys.append(key_BW)
        self.shown.append((view, copy_of(view)))
        return view


def copy_of(view: LayerView) -> LayerView:
    """Return a view with tensors of its own, and nothing cached."""
    tensors = (view.exists_BW, view.parent_BW, view.path_logp_BW, view.entropy_BF)
    exists, parent, logp, entropy = (None if t is None else t.clone() for t in tensors)
    assert exists is not None, "every view says what exists"
    return LayerView(view.depth, exists, parent, logp, view.is_sorted, entropy)


def _mix(x: Tensor) -> Tensor:
    """Scramble non-negative int64, into non-negative int64."""
    x = (x ^ (x >> 30)) * -4658895280553007687
    x = (x ^ (x >> 27)) * -7723592293110705685
    return (x ^ (x >> 31)) & ((1 << 62) - 1)


def _uniform(x: Tensor) -> Tensor:
    """float32 in (0, 1) from scrambled int64."""
    return ((x >> 20) & ((1 << 24) - 1)).float().add(0.5) / (1 << 24)
