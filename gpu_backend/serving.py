"""Puts a serving engine together: pools, drafter, verifier, session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo_policies.api import DraftPlan, Policy
from echo_policies.session import open_session, widest_plan
from gpu_backend.batch_drafter import BatchDrafter, draft_rows
from gpu_backend.engine import Engine, EngineOptions
from gpu_backend.lookup_drafter import LookupDrafter
from gpu_backend.ragged_model import RaggedModel
from gpu_backend.sampling import TokenRule
from gpu_backend.serving_drafter import NoDrafter, ServingDrafter
from gpu_backend.stopwatch import Clock, Stopwatch, device_clock
from gpu_backend.verifier import TargetVerifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True)
class ModelPair:
    """Loaded models, prepared for tree attention."""

    target: PreTrainedModel
    draft: PreTrainedModel | None
    vocab_size: int
    """Real tokens; logits beyond are padding."""
    stops: frozenset[int]
    """Tokens that end an output."""
    looks_up: bool = False
    """Drafts are looked up in prompt and output; then no draft model is asked."""


@dataclass(frozen=True, slots=True)
class ServeSettings:
    """What an engine is built for, beside models and policy."""

    num_slots: int
    """Most requests served at a time, B."""
    k_max: int
    max_tokens: int
    """Tokens of the longest request, prompt and output together."""
    sampling: TokenRule
    prefill_chunk: int | None = 512
    pool_requests: int | None = None
    """Longest requests that the KV pools hold at a time; ``num_slots`` by default."""
    is_staged: bool = True
    caps_all: bool = False


def build_engine(
    pair: ModelPair, policy: Policy, settings: ServeSettings, clock: Clock | None = None
) -> Engine:
    """Build an engine with empty KV pools; nothing is computed.

    Args:
        pair: the models. A policy that never drafts leaves the draft out.
        policy: calibrated.
        settings: batch, budget, lengths, sampling.
        clock: seconds; the device's by default.

    Raises:
        SignalError: the policy needs what the drafter cannot give, such as a draft model.
        InputError: the policy is not calibrated.
    """
    plan = widest_plan(policy) if policy.is_calibrated else DraftPlan(0)
    drafter = _drafter(pair, plan, settings)
    session = open_session(
        policy, drafter, is_staged=settings.is_staged, caps_all=settings.caps_all
    )
    tree_rows = kept_nodes(policy, plan, settings.k_max, caps_all=settings.caps_all)
    target = RaggedModel(
        pair.target,
        vocab_size=pair.vocab_size,
        num_slots=_pool_slots(settings, tree_rows),
        role="target",
    )
    return Engine(
        session,
        drafter,
        TargetVerifier(target, drafter, settings.sampling),
        EngineOptions(
            num_slots=settings.num_slots,
            k_max=settings.k_max,
            tree_rows=tree_rows,
            stops=pair.stops,
            prefill_chunk=settings.prefill_chunk,
        ),
        Stopwatch(clock or device_clock(target.device)),
    )


def kept_nodes(policy: Policy, plan: DraftPlan, k_max: int, *, caps_all: bool) -> int:
    """Most nodes of one request that a policy can send to verification."""
    if plan.levels == 0:
        return 0
    if plan.template is not None:
        drafted = len(plan.template.paths)
    else:
        drafted = plan.top_k + (plan.levels - 1) * plan.width * plan.top_k
    limits = [drafted, policy.scheduler.max_kept]
    if policy.scheduler.respects_k_max or caps_all:
        limits.append(k_max)
    return min(limit for limit in limits if limit is not None)


def _drafter(pair: ModelPair, plan: DraftPlan, settings: ServeSettings) -> ServingDrafter:
    if plan.levels > 0 and pair.looks_up:
        return LookupDrafter(settings.num_slots, pair.vocab_size)
    if plan.levels == 0 or pair.draft is None:
        return NoDrafter()
    rows = draft_rows(plan)
    draft = RaggedModel(
        pair.draft,
        vocab_size=pair.vocab_size,
        num_slots=_pool_slots(settings, rows),
        role="draft",
    )
    return BatchDrafter(draft, settings.num_slots, tree_rows=rows)


def _pool_slots(settings: ServeSettings, tree_rows: int) -> int:
    held = settings.pool_requests or settings.num_slots
    return held * (settings.max_tokens + tree_rows)
