"""Puts a serving engine together: pools, drafter, verifier, session."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from echo_policies.api import CostView, DraftPlan, Policy
from echo_policies.session import open_session, widest_plan
from gpu_backend.batch_drafter import BatchDrafter
from gpu_backend.combined_drafter import CombinedDrafter
from gpu_backend.eagle3.drafter import EagleDrafter
from gpu_backend.eagle3.ragged_head import RaggedHead
from gpu_backend.engine import Engine, EngineOptions
from gpu_backend.lookup_drafter import LookupDrafter
from gpu_backend.prefix_backends.choice import AttentionName
from gpu_backend.prompt_lookup import CONFIDENCE, MODEL_LEVELS
from gpu_backend.ragged_model import RaggedModel
from gpu_backend.sampling import TokenRule
from gpu_backend.serving_drafter import NoDrafter, ServingDrafter
from gpu_backend.stopwatch import Clock, Stopwatch, device_clock
from gpu_backend.tree_drafter import TreeDrafter, draft_rows
from gpu_backend.verifier import TargetVerifier

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from gpu_backend.eagle3.head import Eagle3Head


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
    """Drafts are looked up in prompt and output, and of a draft model asked only elsewhere."""
    head: Eagle3Head | None = None
    """An EAGLE-3 head of the target, in the place of a draft model."""
    head_summary: str = ""
    """One line that says how the head's files were understood."""
    confidence: float = CONFIDENCE
    """Probability of what a lookup finds for which the draft model is not asked."""
    model_levels: int = MODEL_LEVELS
    """Depths that the draft model proposes beside lookup."""


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
    costs: CostView | None = None
    """What policies may know of costs; None where nothing was timed."""
    attention: AttentionName = "torch"
    """What reads the sequences, of target and draft each."""


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
        InputError: the policy is not calibrated, or the attention cannot be used.
    """
    plan = widest_plan(policy) if policy.is_calibrated else DraftPlan(0)
    watch = Stopwatch(clock or device_clock(pair.target.device))
    drafter = _drafter(pair, plan, settings, watch)
    session = open_session(
        policy, drafter, is_staged=settings.is_staged, caps_all=settings.caps_all
    )
    tree_rows = kept_nodes(policy, plan, settings.k_max, caps_all=settings.caps_all)
    target = RaggedModel(
        pair.target,
        vocab_size=pair.vocab_size,
        num_slots=_pool_slots(settings, tree_rows),
        block=settings.max_tokens + tree_rows,
        role="target",
        attention=settings.attention,
        taps=drafter.taps,
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
            costs=settings.costs,
        ),
        watch,
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


def _drafter(
    pair: ModelPair, plan: DraftPlan, settings: ServeSettings, watch: Stopwatch
) -> ServingDrafter:
    if plan.levels == 0:
        return NoDrafter()
    model = _model_drafter(pair, draft_rows(plan), settings, watch)
    if not pair.looks_up:
        return model or NoDrafter()
    lookup = LookupDrafter(settings.num_slots, pair.vocab_size)
    if model is None:
        return lookup
    return CombinedDrafter(
        lookup, model, confidence=pair.confidence, model_levels=pair.model_levels
    )


def _model_drafter(
    pair: ModelPair, rows: int, settings: ServeSettings, watch: Stopwatch
) -> TreeDrafter | None:
    """Drafter of the pair's head or draft model; None without one."""
    slots, block = _pool_slots(settings, rows), settings.max_tokens + rows
    if pair.head is not None:
        head = RaggedHead(pair.head, num_slots=slots, block=block, attention=settings.attention)
        return EagleDrafter(head, settings.num_slots, tree_rows=rows)
    if pair.draft is None:
        return None
    draft = RaggedModel(
        pair.draft,
        vocab_size=pair.vocab_size,
        num_slots=slots,
        block=block,
        role="draft",
        attention=settings.attention,
    )
    return BatchDrafter(draft, settings.num_slots, tree_rows=rows, measure=watch.part)


def _pool_slots(settings: ServeSettings, tree_rows: int) -> int:
    held = settings.pool_requests or settings.num_slots
    return held * (settings.max_tokens + tree_rows)
