"""An independent draft model behind the decision loop's protocols, at positions of known text.

The same policy objects that replay a recording draft here from the model itself: what a policy
expands is computed by a forward of the draft, and acceptance compares token ids with the text.

Shape letters: B positions (the batch), F frontier nodes, W candidates of a layer, N of all layers.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from echo_policies.forest import Forest
from echo_policies.template import RankTemplate
from gpu_backend.node_trie import NodeTrie


class DraftModelDrafter:
    """Drafts from the model at output positions of one request.

    - :meth:`seek` says after which output token each batch entry drafts.
    - Log-probabilities are rounded to float16 before they are added, as a recording stores them.
    """

    def __init__(self, trie: NodeTrie, output: list[int]) -> None:
        """Bind a trie of the request's text.

        Args:
            trie: over prompt and output; grows by the nodes that policies expand. Make it with
                ``shares_path=False``, so that no node is taken from the teacher-forced forward.
            output: the target's tokens, look-ahead included, for acceptance.
        """
        self._trie = trie
        self._output = np.asarray(output)
        self._plan = DraftPlan(levels=0)
        self._position_B = np.zeros(0, dtype=np.int64)
        self._node_BW = np.zeros((0, 0), dtype=np.int64)
        """Parent node of every candidate of the newest layer."""
        self._token_BW = np.zeros((0, 0), dtype=np.int64)
        self._matches: list[Tensor] = []

    @property
    def signals(self) -> frozenset[str]:
        """Ranks and path log-probabilities."""
        return frozenset({"ranks", "path_logp"})

    def objection(self, plan: DraftPlan) -> str | None:
        """Say why this model cannot serve a plan: only the kept children limit it."""
        kept = self._trie.child_token.shape[1]
        if plan.top_k > kept:
            return f"reveals {plan.top_k} children per node, but {kept} are kept; lower its top_k"
        return None

    def seek(self, position_B: Tensor) -> None:
        """Place every batch entry after an output token (int64 [B])."""
        self._position_B = position_B.numpy()
        self._matches = []

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Return the root's children."""
        self._plan = plan
        children = _children(plan, 1, None)
        logp_BW = self._reveal(self._position_B[:, None], children)
        logp_BW = logp_BW.masked_fill(~drafting_B[:, None], -torch.inf)
        return self._layer(1, logp_BW, None, torch.ones_like(logp_BW, dtype=torch.bool))

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Compute the frontier's nodes and return their children."""
        index_BF, mask = frontier.index_BF.numpy(), frontier.mask_BF.numpy()
        parent = np.take_along_axis(self._node_BW, index_BF, axis=1)
        token = np.take_along_axis(self._token_BW, index_BF, axis=1)
        node_BF = np.zeros_like(parent)
        node_BF[mask] = self._trie.reach(parent[mask], token[mask])
        children = _children(self._plan, layer.depth + 1, frontier)
        logp_BW = self._reveal(node_BF, children)
        place_W = torch.tensor([place for place, _ in children])
        parent_BW = frontier.index_BF[:, place_W]
        if layer.path_logp_BW is not None:
            base_BF = layer.path_logp_BW.gather(1, frontier.index_BF)
            logp_BW = logp_BW + base_BF[:, place_W]
        logp_BW = logp_BW.masked_fill(~frontier.mask_BF[:, place_W], -torch.inf)
        return self._layer(
            layer.depth + 1, logp_BW, parent_BW, self._matches[-1].gather(1, parent_BW)
        )

    def matches(self) -> Tensor:
        """bool [B, N]: candidates whose whole path agrees with the text."""
        return torch.cat(self._matches, dim=1)

    def _reveal(self, node_BF: np.ndarray, children: list[tuple[int, int]]) -> Tensor:
        """Conditional log-probabilities float32 [B, W] of children given as (place, rank)."""
        places = np.array([place for place, _ in children])
        ranks = np.array([rank for _, rank in children])
        self._node_BW = node_BF[:, places]
        self._token_BW = self._trie.child_token[self._node_BW, ranks].astype(np.int64)
        return torch.from_numpy(self._trie.child_logp[self._node_BW, ranks].astype(np.float32))

    def _layer(
        self, depth: int, logp_BW: Tensor, parent_BW: Tensor | None, above_BW: Tensor
    ) -> LayerView:
        """Wrap up a layer and note which candidates agree with the text."""
        exists_BW = logp_BW > -torch.inf
        wanted = self._position_B + depth
        inside = wanted < len(self._output)
        truth_B = np.where(inside, self._output[np.minimum(wanted, len(self._output) - 1)], -1)
        agrees_BW = torch.from_numpy(self._token_BW == truth_B[:, None])
        self._matches.append(agrees_BW & above_BW & exists_BW)
        scores = None if self._plan.template is not None else logp_BW
        return LayerView(depth, exists_BW, parent_BW, scores)


def _children(plan: DraftPlan, depth: int, frontier: Frontier | None) -> list[tuple[int, int]]:
    """Candidates of a depth as (place in the frontier, rank), parent-major and in rank order."""
    tree = plan.template
    if tree is None:
        width = 1 if frontier is None else frontier.index_BF.shape[1]
        return [(place, rank) for place in range(width) for rank in range(plan.top_k)]
    return _template_children(tree, depth)


def _template_children(tree: RankTemplate, depth: int) -> list[tuple[int, int]]:
    layer = tree.layers[depth - 1]
    parents = tree.parents[layer]
    places = {parent: place for place, parent in enumerate(sorted(set(parents)))}
    return [(places[parent], rank) for parent, rank in zip(parents, tree.ranks[layer], strict=True)]


class TextVerifier:
    """Accepts exactly the kept nodes whose path agrees with the text."""

    def __init__(self, drafter: DraftModelDrafter) -> None:
        """Bind the drafter that knows the tokens of its candidates."""
        self._drafter = drafter

    def verify(self, forest: Forest, keep_BN: Tensor) -> Tensor:
        """int64 [B]: accepted draft tokens."""
        if not forest.layers:
            return torch.zeros(keep_BN.shape[0], dtype=torch.int64)
        return (keep_BN & self._drafter.matches()).sum(1)
