"""What a step of the serving engine showed its policy."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.api import Feedback, ModelDepth, StepContext
from echo_policies.forest import model_record
from echo_policies.session import Decision
from gpu_backend.serving_drafter import ServingDrafter
from traces.records import StepTimes


def step_feedback(
    ctx: StepContext,
    decision: Decision,
    drafter: ServingDrafter,
    times: StepTimes,
    *,
    accepted_B: Tensor,
    emitted_drafts_B: npt.NDArray[np.int64],
) -> Feedback:
    """Sum a committed step up.

    Args:
        ctx: what the policy knew.
        decision: what it came to.
        drafter: still as the step left it.
        times: of the step.
        accepted_B: int64 [B], accepted draft tokens.
        emitted_drafts_B: those of them that were emitted, for an output may end before.
    """
    has_drafted = bool(decision.forest.layers)
    model: tuple[ModelDepth, ...] = ()
    if ctx.costs is not None and has_drafted:
        model = model_record(decision.forest, decision.keep_BN, accepted_B, drafter.model_layers)
    return Feedback(
        torch.from_numpy(emitted_drafts_B).to(ctx.live_B.device),
        decision.keep_BN,
        ctx.live_B,
        times.draft_s,
        times.verify_s,
        times.total_s,
        prefill_s=times.prefill_s,
        costs=ctx.costs,
        plan=decision.plan,
        num_live=ctx.num_live or 0,
        num_accepted=int(emitted_drafts_B.sum()),
        num_verified=int(decision.verified_B.sum()),
        has_drafted=has_drafted,
        draft_layers=drafter.num_forwards if has_drafted else 0,
        model=model,
    )
