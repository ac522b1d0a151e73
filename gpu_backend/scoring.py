"""From logits to what a recording keeps: ranked children, entropy, rank of a given token.

Shape letters: K rows, V vocabulary, k children.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from traces.schema import OUTSIDE_VOCAB

NO_TOKEN: Final = -1
"""Token id of a child that does not exist, where the vocabulary is smaller than the width."""

# Rows per softmax step: the temporaries of a large vocabulary then stay in the CPU's caches,
# which made the step five times faster than one pass over 512 rows (2 cores, V = 151,665).
_CACHED_ROWS = 4


@dataclass(frozen=True, slots=True)
class RowScores:
    """What is kept of K rows of logits; children are in rank order."""

    child_token: npt.NDArray[np.int32]
    """[K, k]; NO_TOKEN where the vocabulary has no more tokens."""
    child_logp: npt.NDArray[np.float16]
    """[K, k] log-probabilities, rounded; -inf where there is no token."""
    entropy: npt.NDArray[np.float16]
    """[K] nats."""

    @staticmethod
    def joined(parts: Sequence[RowScores]) -> RowScores:
        """Rows behind one another."""
        return RowScores(
            np.concatenate([part.child_token for part in parts]),
            np.concatenate([part.child_logp for part in parts]),
            np.concatenate([part.entropy for part in parts]),
        )


@dataclass(frozen=True, slots=True)
class Softmax:
    """What turns K rows of logits into log-probabilities: ``(logit - top) - log_total``."""

    top: Tensor
    """[K] largest logit."""
    log_total: Tensor
    """[K] log of the sum of ``exp(logit - top)``."""
    entropy: Tensor
    """[K] nats."""

    @classmethod
    def of(cls, logits_KV: Tensor) -> Softmax:
        """Compute it once for rows of logits over the real vocabulary."""
        block_rows = _CACHED_ROWS if logits_KV.device.type == "cpu" else max(len(logits_KV), 1)
        parts = [_softmax_block(block) for block in torch.split(logits_KV, block_rows)]
        return cls(*(torch.cat(column) for column in zip(*parts, strict=True)))

    def logp(self, logits_Kn: Tensor) -> Tensor:
        """Log-probabilities ``[K, n]`` of n logits of every row."""
        return (logits_Kn.float() - self.top[:, None]) - self.log_total[:, None]


def score_rows(logits_KV: Tensor, softmax: Softmax, width: int) -> RowScores:
    """Rank the children of every row; ``logits_KV`` holds the real vocabulary only."""
    values, tokens = ranked_top_k(logits_KV, width)
    logp = softmax.logp(values)
    missing = width - tokens.shape[1]
    pad = torch.nn.functional.pad
    return RowScores(
        pad(tokens, (0, missing), value=NO_TOKEN).cpu().numpy().astype(np.int32),
        pad(logp, (0, missing), value=float("-inf")).half().cpu().numpy(),
        softmax.entropy.half().cpu().numpy(),
    )


def score_tokens(
    logits_KV: Tensor, softmax: Softmax, tokens_K: Tensor
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """Rank and log-probability of one given token per row.

    Returns:
        Ranks ``[K]`` by (logit descending, token id ascending) and rounded log-probabilities
        ``[K]``; OUTSIDE_VOCAB and -inf for a token beyond the vocabulary.
    """
    size = logits_KV.shape[1]
    inside = tokens_K < size
    safe = tokens_K.clamp_max(size - 1)
    own = logits_KV.gather(1, safe[:, None])
    tied_before = (logits_KV == own) & (torch.arange(size, device=safe.device) < safe[:, None])
    rank = ((logits_KV > own) | tied_before).sum(dim=1)
    rank = rank.masked_fill(~inside, OUTSIDE_VOCAB)
    logp = softmax.logp(own)[:, 0].masked_fill(~inside, float("-inf"))
    return rank.cpu().numpy().astype(np.int32), logp.half().cpu().numpy()


def ranked_top_k(logits_KV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Largest logits of each row by (logit descending, token id ascending), exactly.

    ``torch.topk`` promises neither an order among equal values nor which of them it takes, so
    the order is mended in what it took, and a row with a tie across the edge is ranked anew.

    Returns:
        Values and token ids, ``[K, min(width, V)]``.
    """
    size = logits_KV.shape[1]
    width = min(width, size)
    values, tokens = logits_KV.topk(min(width + 1, size), dim=1)
    by_token = tokens.argsort(dim=1)
    values, tokens = values.gather(1, by_token), tokens.gather(1, by_token)
    by_value = values.argsort(dim=1, descending=True, stable=True)
    values, tokens = values.gather(1, by_value), tokens.gather(1, by_value)
    if values.shape[1] > width:
        for row in (values[:, width - 1] == values[:, width]).nonzero()[:, 0].tolist():
            ids = (logits_KV[row] >= values[row, width - 1]).nonzero()[:, 0]
            order = logits_KV[row, ids].argsort(descending=True, stable=True)[:width]
            tokens[row, :width] = ids[order]
            values[row, :width] = logits_KV[row, ids[order]]
    return values[:, :width], tokens[:, :width]


def _softmax_block(logits_KV: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = logits_KV.float()
    top = logits.amax(dim=1)
    shifted = logits - top[:, None]
    weights = shifted.exp()
    total = weights.sum(dim=1)
    # A logit of -inf has no weight; its product with the weight would be NaN.
    mean = (weights * shifted.clamp_min(-1e4)).sum(dim=1) / total
    return top, total.log(), (total.log() - mean).clamp_min(0)
