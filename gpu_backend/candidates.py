"""From the children of a layer's expanded nodes to the candidates that a policy sees.

Shape letters: B slots of the batch, F expanded nodes of a layer, k children, W candidates,
R rows, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from echo_policies.template import RankTemplate
from gpu_backend.scoring import Softmax, ranked_top_k


@dataclass(frozen=True, slots=True)
class Children:
    """Children of every expanded node in rank order, in the frontier's places."""

    token_BFk: Tensor
    """int64; 0 where there is none."""
    logp_BFk: Tensor
    """float32 conditional log-probabilities, rounded to float16; -inf where there is none."""
    entropy_BF: Tensor
    """float32 nats, rounded likewise; 0 where nothing was expanded."""

    @classmethod
    def of(
        cls,
        logits_RV: Tensor | None,
        mask_BF: Tensor,
        top_k: int,
        token_ids_V: Tensor | None = None,
    ) -> Children:
        """Score the rows, which are the True entries of ``mask_BF`` in order.

        Args:
            logits_RV: over the tokens that the draft can propose; None for no rows.
            mask_BF: which nodes were expanded.
            top_k: children per node.
            token_ids_V: ids of these tokens, ascending; None if they are numbered by id.
        """
        shape = (*mask_BF.shape, top_k)
        token_BFk = torch.zeros(shape, dtype=torch.int64, device=mask_BF.device)
        logp_BFk = torch.full(shape, -torch.inf, device=mask_BF.device)
        entropy_BF = torch.zeros(mask_BF.shape, device=mask_BF.device)
        if logits_RV is None:
            return cls(token_BFk, logp_BFk, entropy_BF)
        values, tokens = ranked_top_k(logits_RV, top_k)
        if token_ids_V is not None:
            tokens = token_ids_V[tokens]
        softmax = Softmax.of(logits_RV)
        missing = (0, top_k - tokens.shape[1])  # a small vocabulary has fewer children
        pad = torch.nn.functional.pad
        token_BFk[mask_BF] = pad(tokens, missing)
        # Recordings store float16, and a policy must see the same numbers here.
        logp = softmax.logp(values).half().float()
        logp_BFk[mask_BF] = pad(logp, missing, value=-torch.inf)
        entropy_BF[mask_BF] = softmax.entropy.half().float()
        return cls(token_BFk, logp_BFk, entropy_BF)


@dataclass(frozen=True, slots=True)
class Candidates:
    """One depth as the policy sees it, and what only the drafter knows of it."""

    view: LayerView
    token_BW: Tensor
    """int64 token ids."""
    place_BW: Tensor
    """int64: which place of the frontier each candidate is a child of."""


def candidates(
    plan: DraftPlan, children: Children, above: LayerView | None, frontier: Frontier | None
) -> Candidates:
    """Lay out the children of a frontier as the next depth.

    Args:
        plan: decides whether all children are candidates or only a template's.
        children: of the frontier's nodes; at depth 1 of the roots.
        above: the layer the frontier is of; None at depth 1.
        frontier: the expanded nodes; None at depth 1.
    """
    depth = 1 if above is None else above.depth + 1
    num_B, num_F, top_k = children.logp_BFk.shape
    if plan.template is None:
        places_W = torch.arange(num_F).repeat_interleave(top_k)
        place_BW = places_W.to(children.logp_BFk.device).expand(num_B, -1)
        token_BW, logp_BW = children.token_BFk.flatten(1), children.logp_BFk.flatten(1)
    else:
        place_BW, known_BW = _template_places(plan.template, depth, children, frontier)
        ranks_W = torch.tensor(plan.template.ranks[plan.template.layers[depth - 1]])
        flat_BW = place_BW * top_k + ranks_W.to(place_BW.device)
        token_BW = children.token_BFk.flatten(1).gather(1, flat_BW)
        logp_BW = children.logp_BFk.flatten(1).gather(1, flat_BW)
        logp_BW = logp_BW.masked_fill(~known_BW, -torch.inf)
    parent_BW = None
    if frontier is not None:
        parent_BW = _parents(plan.template, depth, frontier, place_BW)
    if above is not None and above.path_logp_BW is not None and parent_BW is not None:
        logp_BW = logp_BW + above.path_logp_BW.gather(1, parent_BW)
    view = LayerView(
        depth,
        logp_BW > -torch.inf,
        parent_BW,
        None if plan.template is not None else logp_BW,
        is_sorted=num_F == 1,
        entropy_BF=children.entropy_BF,
    )
    return Candidates(view, token_BW, place_BW)


def _template_places(
    tree: RankTemplate, depth: int, children: Children, frontier: Frontier | None
) -> tuple[Tensor, Tensor]:
    """Place in the frontier of every template node's parent [B, W], and whether it is there."""
    num_B, device = len(children.logp_BFk), children.logp_BFk.device
    if frontier is None:
        where = tree.layers[0]
        place_BW = torch.zeros((num_B, where.stop - where.start), dtype=torch.int64, device=device)
        return place_BW, torch.ones_like(place_BW, dtype=torch.bool)
    parents_W = tree.parents_in_layer(depth, device)
    is_parent_BWF = (frontier.index_BF[:, None] == parents_W[:, None]) & frontier.mask_BF[:, None]
    return is_parent_BWF.long().argmax(2), is_parent_BWF.any(2)


def _parents(tree: RankTemplate | None, depth: int, frontier: Frontier, place_BW: Tensor) -> Tensor:
    """Index of every candidate's parent in the layer above, int64 [B, W]."""
    if tree is None:
        return frontier.index_BF.gather(1, place_BW)
    return tree.parents_in_layer(depth, place_BW.device).expand(len(place_BW), -1)
