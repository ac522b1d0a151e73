"""What a committed step shows its policy, summed up alike by every engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.api import Feedback, StepContext
from echo_policies.forest import model_record, promised_nodes
from echo_policies.session import Decision


class StepSeconds(Protocol):
    """How long a step and its parts took."""

    @property
    def draft_s(self) -> float: ...  # noqa: D102
    @property
    def verify_s(self) -> float: ...  # noqa: D102
    @property
    def prefill_s(self) -> float: ...  # noqa: D102
    @property
    def total_s(self) -> float: ...  # noqa: D102


def step_feedback(
    ctx: StepContext,
    decision: Decision,
    times: StepSeconds,
    *,
    accepted_B: Tensor,
    emitted_B: npt.NDArray[np.int64],
    by_model: Sequence[Tensor],
    draft_layers: int,
    counts: bool,
) -> Feedback:
    """Sum a committed step up.

    Args:
        ctx: what the policy knew.
        decision: what it came to.
        times: of the step.
        accepted_B: int64 [B], accepted draft tokens.
        emitted_B: int64 [B], those of them that were emitted, for an output may end before.
        by_model: bool [B, W] of every depth, which candidates a draft model proposed.
        draft_layers: that ran.
        counts: whether the policy wants to know what scores promised and a model was good for.
    """
    forest, keep_BN = decision.forest, decision.keep_BN
    counts = counts and bool(forest.layers)
    return Feedback(
        torch.from_numpy(emitted_B).to(ctx.live_B.device),
        keep_BN,
        ctx.live_B,
        times.draft_s,
        times.verify_s,
        times.total_s,
        prefill_s=times.prefill_s,
        costs=ctx.costs,
        plan=decision.plan,
        num_live=ctx.num_live or 0,
        num_accepted=int(emitted_B.sum()),
        num_verified=int(decision.verified_B.sum()),
        promised=promised_nodes(forest, keep_BN) if counts else 0.0,
        has_drafted=bool(forest.layers),
        draft_layers=draft_layers,
        model=model_record(forest, keep_BN, accepted_B, by_model) if counts else (),
    )
