"""The walk down the verified trees: sample at a node, descend to the child that matches.

Shape letters: R rows of all requests, B requests, V vocabulary, L levels walked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch
from torch import Tensor

from echo_policies.errors import InputError
from gpu_backend.sampling import TokenRule
from gpu_backend.tree_layout import NO_PARENT, TreeRows


@dataclass(frozen=True, slots=True)
class Accepted:
    """What the target makes of one request's tree."""

    tokens: list[int]
    """Accepted draft tokens, then the token that follows them; at least one."""
    rows: list[int]
    """Rows whose keys and values become the sequence's: the root's, then the accepted nodes'."""

    @property
    def num_drafts(self) -> int:
        """Accepted draft tokens."""
        return len(self.rows) - 1


def accept(
    logits_RV: Tensor,
    trees: Sequence[TreeRows],
    seeds: Sequence[int],
    positions: Sequence[int],
    rule: TokenRule,
) -> list[Accepted]:
    """Walk every request's tree from its root; one copy to the host at the end.

    Args:
        logits_RV: target logits of all rows, request after request.
        trees: rows of every request.
        seeds: seed of every request.
        positions: absolute position of every root.
        rule: how tokens are drawn.

    Raises:
        InputError: logits at a visited row are no numbers.
    """
    device = logits_RV.device
    starts = list(accumulate((tree.num_rows for tree in trees[:-1]), initial=0))
    parent_R = torch.from_numpy(
        np.concatenate([_shifted(t.parent_n, s) for t, s in zip(trees, starts, strict=True)])
    ).to(device)
    token_R = torch.from_numpy(np.concatenate([tree.tokens_n for tree in trees])).to(device)
    owner_R = torch.from_numpy(
        np.repeat(np.arange(len(trees)), [tree.num_rows for tree in trees])
    ).to(device)
    deepest = max(int(tree.depth_n[-1]) for tree in trees)
    tokens_LB, rows_LB, has_nan = _walk(
        logits_RV,
        parent_R,
        token_R,
        owner_R,
        row_B=torch.tensor(starts, device=device),
        seed_B=torch.tensor(seeds, device=device),
        position_B=torch.tensor(positions, device=device),
        levels=deepest + 1,
        rule=rule,
    )
    if has_nan:
        raise not_numbers(logits_RV.dtype)
    outcome = []
    for column, start in enumerate(starts):
        rows = [row - start for row in rows_LB[:, column].tolist() if row != NO_PARENT]
        outcome.append(Accepted(tokens_LB[: len(rows), column].tolist(), rows))
    return outcome


def not_numbers(dtype: torch.dtype) -> InputError:
    """What is said of logits that are NaN, from which any token could be read."""
    return InputError(
        f"target: logits must be numbers; some are NaN in {str(dtype).removeprefix('torch.')}. Use "
        "--dtype float32 or bfloat16, or fetch the model again."
    )


def _walk(
    logits_RV: Tensor,
    parent_R: Tensor,
    token_R: Tensor,
    owner_R: Tensor,
    *,
    row_B: Tensor,
    seed_B: Tensor,
    position_B: Tensor,
    levels: int,
    rule: TokenRule,
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Chosen tokens and visited rows ``[L, B]``, NO_PARENT where the walk had ended before.

    And whether a chosen logit is NaN: a row with a NaN in it chooses that.
    """
    number_R = torch.arange(len(parent_R), device=parent_R.device)
    nowhere_B = torch.full_like(row_B, NO_PARENT)
    is_walking_B = torch.ones_like(row_B, dtype=torch.bool)
    has_nan = torch.zeros((), dtype=torch.bool, device=parent_R.device)
    tokens, rows = [], []
    for level in range(levels):
        rows.append(torch.where(is_walking_B, row_B, nowhere_B))
        chosen_B = rule.choose(logits_RV[row_B], seed_B, position_B + level + 1)
        tokens.append(chosen_B)
        has_nan = has_nan | logits_RV[row_B, chosen_B].isnan().any()
        matches_R = (parent_R == row_B[owner_R]) & (token_R == chosen_B[owner_R])
        found_R = torch.where(matches_R, number_R, NO_PARENT)
        next_B = nowhere_B.scatter_reduce(0, owner_R, found_R, "amax")
        is_walking_B = is_walking_B & (next_B != NO_PARENT)
        row_B = torch.where(is_walking_B, next_B, row_B)
        # On a GPU the look would cost more than the levels it saves.
        if row_B.device.type == "cpu" and not is_walking_B.any():
            break
    return torch.stack(tokens).cpu().numpy(), torch.stack(rows).cpu().numpy(), bool(has_nan)


def _shifted(parent_n: np.ndarray, start: int) -> np.ndarray:
    return np.where(parent_n == NO_PARENT, NO_PARENT, parent_n + start)
