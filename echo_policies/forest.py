"""All candidates of a step, every depth and every request, and the rules a plan obeys.

Shape letters: B requests, W candidates of one layer, N candidates of a request over all layers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from echo_policies.api import LayerView
from echo_policies.views import ModelDepth


def count_true(mask_BX: Tensor) -> Tensor:
    """int64 [B]: true entries of a bool [B, X]."""
    return mask_BX[:, 0].long() if mask_BX.shape[1] == 1 else mask_BX.sum(1)


@dataclass(frozen=True, eq=False)
class Forest:
    """The layers of a step, depth 1 first; flat index n runs depth-major over all of them."""

    layers: tuple[LayerView, ...]
    num_requests: int
    device: torch.device

    @cached_property
    def widths(self) -> tuple[int, ...]:
        """Candidates per request of every layer."""
        return tuple(layer.width for layer in self.layers)

    @property
    def num_candidates(self) -> int:
        """Candidates of a request over all layers, N."""
        return sum(self.widths)

    @cached_property
    def exists_BN(self) -> Tensor:
        """bool [B, N]: the candidate is there."""
        return self._cat([layer.exists_BW for layer in self.layers], torch.bool)

    @cached_property
    def path_logp_BN(self) -> Tensor:
        """float32 [B, N]: path log-probability, -inf where absent."""
        return self._cat([layer.scores_BW for layer in self.layers], torch.float32)

    @property
    def has_scores(self) -> bool:
        """Whether the layers carry scores."""
        return all(layer.path_logp_BW is not None for layer in self.layers)

    def split(self, values_BN: Tensor) -> tuple[Tensor, ...]:
        """Cut a flat [B, N] tensor into its layers."""
        return torch.split(values_BN, list(self.widths), dim=1)

    def _cat(self, parts: list[Tensor], dtype: torch.dtype) -> Tensor:
        if not parts:
            return torch.zeros((self.num_requests, 0), dtype=dtype, device=self.device)
        return torch.cat(parts, dim=1)


def close_under_ancestors(forest: Forest, keep_BN: Tensor) -> Tensor:
    """bool [B, N]: ``keep_BN`` without nodes that do not exist or whose ancestors are not kept."""
    parts = list(forest.split(keep_BN & forest.exists_BN))
    for depth, layer in enumerate(forest.layers):
        if layer.parent_BW is not None:
            parts[depth] = parts[depth] & parts[depth - 1].gather(1, layer.parent_BW)
    return torch.cat(parts, dim=1) if parts else keep_BN


def promised_nodes(forest: Forest, keep_BN: Tensor) -> float:
    """How many of the kept nodes are accepted if their scores are right; 0 without scores.

    A host number, so a step must be over.
    """
    if not forest.layers or not forest.has_scores:
        return 0.0
    promised: float = torch.where(keep_BN, forest.path_logp_BN.exp(), 0.0).sum().item()
    return promised


def model_record(
    forest: Forest, keep_BN: Tensor, accepted_B: Tensor, by_model: Sequence[Tensor]
) -> tuple[ModelDepth, ...]:
    """What became of a draft model's proposals; on the host, so a step must be over.

    Args:
        forest: of the step.
        keep_BN: bool [B, N], verified.
        accepted_B: int64 [B], accepted draft tokens.
        by_model: bool [B, W] of every depth, which candidates the model proposed.
    """
    if not forest.layers:
        return ()
    counts = []
    for depth, (kept_BW, model_BW) in enumerate(zip(forest.split(keep_BN), by_model, strict=True)):
        verified_BW = model_BW & kept_BW
        is_accepted_B = verified_BW.any(1) & (accepted_B > depth)
        counts += [model_BW.any(1).sum(), verified_BW.sum(), is_accepted_B.sum()]
    # One copy to the host for all depths.
    depths: list[list[int]] = torch.stack(counts).reshape(-1, 3).tolist()
    return tuple(ModelDepth(*of_depth) for of_depth in depths)


def clamp_to_k_max(forest: Forest, keep_BN: Tensor, k_max: int) -> Tensor:
    """bool [B, N]: at most ``k_max`` of the kept nodes, still closed under ancestors.

    Scored forests keep the best path log-probabilities (ties: depth, recorded order, slot);
    forests without scores keep breadth first, one node per request in turn.
    """
    num_requests, num_nodes = keep_BN.shape
    if forest.has_scores:
        key_NB = forest.path_logp_BN.masked_fill(~keep_BN, -torch.inf).T
        order = torch.sort(key_NB.reshape(-1), descending=True, stable=True).indices
    else:
        turn_BN = torch.where(keep_BN, keep_BN.cumsum(1), num_nodes + 1)
        order = torch.sort(turn_BN.T.reshape(-1), stable=True).indices
    allowed = torch.zeros(num_nodes * num_requests, dtype=torch.bool, device=keep_BN.device)
    allowed[order[:k_max]] = True
    return keep_BN & allowed.reshape(num_nodes, num_requests).T
