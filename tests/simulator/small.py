"""Traces made by hand, and a plain loop over one request, for tests with known answers."""

from __future__ import annotations

import numpy as np
import torch

from echo_policies.api import Policy, StepContext
from echo_policies.session import open_session
from traces.replay import RecordedDrafter, RecordedVerifier, replay_tables
from traces.schema import (
    NO_SLOT,
    PAST_END,
    Costing,
    ModelInfo,
    Provenance,
    RequestInfo,
    Trace,
    TraceArrays,
    TraceHeader,
)
from traces.store import make_trace
from traces.validate import validate

ROOT = [[0.6, 0.25], [0.7, 0.2], [0.8, 0.1]]
CHILDREN = [
    [[0.5, 0.4], [0.9, 0.05]],
    [[0.6, 0.3], [0.5, 0.4]],
    [[0.7, 0.2], [0.5, 0.4]],
]
PATH_RANKS = [[0, 1], [1, 0], [0, PAST_END]]


def header(infos: tuple[RequestInfo, ...], levels: int, width: int, chain: int) -> TraceHeader:
    return TraceHeader(
        name="by-hand",
        target=ModelInfo(name="target"),
        draft=ModelInfo(name="draft"),
        drafter="draft_model",
        costing=Costing(target="llama-3.1-8b"),
        vocab_size=50,
        levels=levels,
        beam_width=width,
        root_width=width,
        top_k=width,
        chain_levels=chain,
        provenance=Provenance(kind="synthetic", generator="tests", date="2026-01-01", seed=0),
        requests=infos,
    )


def three_positions() -> Trace:
    """One request of four tokens: the three positions written out above."""
    info = RequestInfo(
        task="hand",
        question_id="0",
        prompt_tokens=5,
        max_new_tokens=10,
        finish_reason="stop",
        split="evaluation",
    )
    root = np.log(np.array(ROOT)).astype(np.float16)
    child = np.full((3, 1, 3, 2), -np.inf, np.float16)
    child[:, 0, :2] = np.log(np.array(CHILDREN)).astype(np.float16)
    slot = np.tile(np.array([0, 1, NO_SLOT], np.int16), (3, 1, 1))
    ranks = np.array(PATH_RANKS, np.int32)
    path_logp = np.full((3, 2), -np.inf, np.float16)
    for p in range(3):
        path_logp[p, 0] = root[p, ranks[p, 0]]
        if ranks[p, 1] != PAST_END:
            path_logp[p, 1] = child[p, 0, ranks[p, 0], ranks[p, 1]]
    trace = make_trace(
        header((info,), levels=2, width=2, chain=2),
        TraceArrays(
            position_offset=np.array([0, 3]),
            token_offset=np.array([0, 4]),
            tokens=np.array([7, 8, 9, 1], np.int32),
            root_logp=root,
            slot_child=slot,
            child_logp=child,
            chain_logp=np.stack([root[:, 0], child[:, 0, 0, 0]], axis=1),
            path_rank=ranks,
            path_logp=path_logp,
        ),
    )
    validate(trace)
    return trace


def constant_acceptance(rng: np.random.Generator, rate: float, positions: int, chain: int) -> Trace:
    """One long request whose greedy chain agrees at every level with probability ``rate``."""
    info = RequestInfo(
        task="constant",
        question_id="0",
        prompt_tokens=5,
        max_new_tokens=positions + 1,
        finish_reason="length",
        split="evaluation",
    )
    logp = np.float16(-0.5)
    root = np.tile(np.array([-0.5, -1.5], np.float16), (positions, 1))
    child = np.full((positions, 1, 3, 2), -np.inf, np.float16)
    child[:, 0, :2] = root[0]
    ranks = (rng.random((positions, chain)) >= rate).astype(np.int32)
    path_logp = np.where(ranks == 0, logp, np.float16(-1.5)).astype(np.float16)
    trace = make_trace(
        header((info,), levels=2, width=2, chain=chain),
        TraceArrays(
            position_offset=np.array([0, positions]),
            token_offset=np.array([0, positions + 1 + chain]),
            tokens=np.ones(positions + 1 + chain, np.int32),
            root_logp=root,
            slot_child=np.tile(np.array([0, 1, NO_SLOT], np.int16), (positions, 1, 1)),
            child_logp=child,
            chain_logp=np.full((positions, chain), logp),
            path_rank=ranks,
            path_logp=path_logp,
        ),
    )
    validate(trace)
    return trace


def walk(trace: Trace, policy: Policy, k_max: int, request: int = 0) -> list[tuple[int, int, int]]:
    """(accepted, emitted, verified) of every step of one request, alone in the batch."""
    drafter = RecordedDrafter(replay_tables(trace))
    session = open_session(policy, drafter)
    verifier = RecordedVerifier(drafter)
    where = trace.positions(request)
    allowed = trace.header.requests[request].max_new_tokens - 1
    position, steps = where.start, []
    while position < where.stop:
        remaining = allowed - (position - where.start)
        drafter.seek(torch.tensor([position]))
        one = torch.ones(1, dtype=torch.int64)
        ctx = StepContext(k_max, len(steps), one.bool(), one * remaining, one * 0, remaining - 1)
        decision = session.decide(ctx, None)
        accepted = int(verifier.verify(decision.forest, decision.keep_BN))
        emitted = min(accepted + 1, where.stop - position)
        steps.append((min(accepted, emitted), emitted, int(decision.verified_B)))
        position += emitted
    return steps
