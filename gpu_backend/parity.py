"""Parity: a live run, played again by the recorded drafter, takes the same decisions.

Serves with real models, writes down what the policy saw, and drives the same policy, with the same
batch in every step, over the recording as the simulator does. Plans and accepted lengths must be
equal; any difference is a fault of one of the engines, never of rounding.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from echo_policies.api import Policy, StepContext
from echo_policies.session import Decision, Session, open_session
from gpu_backend.capture import Capture, CapturedStep, beams
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest
from gpu_backend.serving_drafter import NoDrafter
from traces.records import RunRecords
from traces.replay import RecordedDrafter, RecordedVerifier, beam_tables


@dataclass(frozen=True, slots=True)
class ParityReport:
    """The outcome of one comparison."""

    policy: str
    steps: int
    request_steps: int
    drafts: int
    """Request-steps that drafted: those in which something could differ."""
    accepted: int
    """Draft tokens that the target accepted, in all."""
    differences: int
    """Steps in which anything differs."""
    first: str | None
    """The first difference, in words; None where there is none."""


def check_parity(
    pair: ModelPair, policy: Policy, settings: ServeSettings, requests: Sequence[ServeRequest]
) -> ParityReport:
    """Serve, replay and compare.

    Args:
        pair: the models, with a draft model or prompt lookup.
        policy: calibrated.
        settings: batch, budget, sampling.
        requests: to serve.

    Raises:
        InputError: a request cannot be served.
    """
    engine = build_engine(pair, policy, settings)
    if isinstance(engine.drafter, NoDrafter):
        return ParityReport(policy.name, 0, 0, 0, 0, 0, None)  # plain decoding decides nothing
    engine.observer = capture = Capture(engine.drafter)
    serve_all(engine, requests)
    outputs = {done.request.number: done.output for done in engine.finished}
    records = engine.log.freeze()
    found = list(differences(policy, settings, capture.steps, outputs, records))
    return ParityReport(
        policy=policy.name,
        steps=len(capture.steps),
        request_steps=int(records.live_SB.sum()),
        drafts=int((records.depth_SB > 0).sum()),
        accepted=int(records.accepted_SB.sum()),
        differences=len(found),
        first=found[0] if found else None,
    )


def differences(
    policy: Policy,
    settings: ServeSettings,
    steps: Sequence[CapturedStep],
    outputs: Mapping[int, Sequence[int]],
    records: RunRecords,
) -> Iterator[str]:
    """Play captured steps again and say in words where the replay departs, a step at a time.

    Args:
        policy: as it ran.
        settings: as it ran.
        steps: of the live run.
        outputs: of the live run, by request number.
        records: of the live run, step by step.
    """
    if not any(step.expansions for step in steps):
        return
    drafter = RecordedDrafter(
        beam_tables(beams(steps, outputs)), gives_entropy="entropy" in policy.needs
    )
    session = open_session(
        policy, drafter, is_staged=settings.is_staged, caps_all=settings.caps_all
    )
    num_B = settings.num_slots
    for number, step in enumerate(steps):
        drafter.seek(number * num_B + torch.arange(num_B))
        decision, accepted_B = _replay(session, drafter, step)
        live = step.decided.decision
        found = _plan_difference(live, decision)
        if found is None:
            # The target's own walk may go past the end of the output; what counts was emitted.
            emitted_B = torch.from_numpy(records.emitted_SB[number].copy())
            live_B = torch.from_numpy(records.accepted_SB[number].copy())
            found = _difference("accepted tokens", live_B, torch.minimum(accepted_B, emitted_B))
        if found is not None:
            yield f"step {number}, {found}{_who(step, found)}"


def _replay(
    session: Session, drafter: RecordedDrafter, step: CapturedStep
) -> tuple[Decision, Tensor]:
    with torch.inference_mode():
        decision = session.decide(on_cpu(step.decided.ctx), step.decided.memory)
        accepted_B = RecordedVerifier(drafter).verify(decision.forest, decision.keep_BN)
    return decision, accepted_B.int()


def _plan_difference(live: Decision, replayed: Decision) -> str | None:
    if live.levels != replayed.levels or live.checks != replayed.checks:
        return (
            f"levels and checks: live {live.levels} and {live.checks}, "
            f"replayed {replayed.levels} and {replayed.checks}"
        )
    if live.keep_BN.shape != replayed.keep_BN.shape:
        return f"candidates: live {live.keep_BN.shape[1]}, replayed {replayed.keep_BN.shape[1]}"
    for name in ("drafted_B", "expanded_B", "verified_B"):
        found = _difference(name[:-2] + " nodes", getattr(live, name), getattr(replayed, name))
        if found is not None:
            return found
    rows = (live.keep_BN.cpu() != replayed.keep_BN).any(1)
    return _difference("nodes kept, slots that differ", rows.long(), torch.zeros_like(rows).long())


def _difference(what: str, live_B: Tensor, replayed_B: Tensor) -> str | None:
    differs = (live_B.cpu().long() != replayed_B.long()).nonzero()
    if not len(differs):
        return None
    slot = int(differs[0])
    return f"slot {slot}, {what}: live {int(live_B[slot])}, replayed {int(replayed_B[slot])}"


def _who(step: CapturedStep, found: str) -> str:
    """Which request a difference is of, where it is one request's."""
    for slot, (request, length) in step.where.items():
        if found.startswith(f"slot {slot},"):
            return f" (request {request} after {length} output tokens)"
    return ""


def on_cpu(ctx: StepContext) -> StepContext:
    """What a policy knew, for a replay on the host."""
    return replace(
        ctx,
        live_B=ctx.live_B.cpu(),
        remaining_B=ctx.remaining_B.cpu(),
        arrival_B=ctx.arrival_B.cpu(),
    )
