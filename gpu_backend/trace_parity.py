"""Parity with a recording: does a live run decide as the replay of a trace does?

The engine serves the requests of a trace and commits the recorded tokens, whatever the target
says; what it would have said is compared. So every step stands at a recorded position, and the same
policy, with the same batch and memory, is played there on the recording. Differences are sorted:

- into steps in which the replay met nodes that the recording did not expand;
- into *score ties*: the live run decides as it must on the scores that it saw (its own capture,
  replayed, agrees), and these are the recorded ones but for rounding;
- into faults, which are all others.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from echo_policies.api import Policy
from echo_policies.session import Decision, open_session
from gpu_backend.audit import MARGINS
from gpu_backend.capture import Capture, CapturedStep
from gpu_backend.parity import differences, on_cpu
from gpu_backend.recorded_tokens import Recorded, RecordedTokens
from gpu_backend.score_check import ScoreCheck, check_scores, node_paths, path_may_swap
from gpu_backend.serve_loop import serve_all
from gpu_backend.serving import ModelPair, ServeSettings, build_engine
from gpu_backend.serving_batch import ServeRequest
from gpu_backend.serving_drafter import NoDrafter
from traces.positions import Agreement, Outcome, agreement
from traces.records import RunRecords
from traces.replay import RecordedDrafter, RecordedVerifier, ReplayTables
from traces.request_key import key_label, request_key
from traces.schema import Trace


@dataclass(frozen=True, slots=True, eq=False)
class Recording:
    """A trace, laid out for replay once."""

    trace: Trace
    tables: ReplayTables


@dataclass(frozen=True, slots=True, eq=False)
class _Compared:
    """One step, live and on the recording."""

    number: int
    step: CapturedStep
    played: Decision
    found: Agreement
    accepted_B: Tensor
    """Of the replay, as far as tokens were emitted."""
    checks: Mapping[int, ScoreCheck]


@dataclass(slots=True)
class TraceParityReport:
    """One policy, live and on the recording. Counts are of request-steps that drafted."""

    policy: str
    steps: int = 0
    drafts: int = 0
    unrevealed: int = 0
    """In which the replay met nodes whose children it does not know."""
    unrevealed_differences: int = 0
    """That differ in a step in which some request met such a node."""
    score_ties: int = 0
    """That differ because of rounding."""
    faults: list[str] = field(default_factory=list)
    """All others, in words."""
    scores: ScoreCheck = field(default_factory=ScoreCheck)
    tokens: int = 0
    """Committed, each asked of the target too."""
    target_ties: int = 0
    """At which the target's own best token is another one."""
    target_gap: float = 0.0
    """Largest distance of such a token from the recorded one, in logits."""


def check_trace_parity(
    pair: ModelPair,
    policy: Policy,
    settings: ServeSettings,
    recording: Recording,
    requests: Sequence[ServeRequest],
) -> TraceParityReport:
    """Serve a trace's requests with its tokens forced, replay them, and compare.

    Args:
        pair: the models that the trace was made of.
        policy: calibrated; one that drafts.
        settings: batch and budget; how tokens are drawn is not asked.
        recording: what the models said before.
        requests: their numbers are those of the trace, and so are their seeds.

    Raises:
        SignalError: the recording cannot serve the policy.
    """
    trace = recording.trace
    rule = RecordedTokens(
        {r.number: Recorded(len(r.prompt), trace.all_tokens(r.number).tolist()) for r in requests}
    )
    drafter = RecordedDrafter(recording.tables, gives_entropy="entropy" in policy.needs)
    open_session(policy, drafter)  # refuse before serving
    engine = build_engine(pair, policy, replace(settings, sampling=rule))
    if isinstance(engine.drafter, NoDrafter):
        return TraceParityReport(policy.name)  # plain decoding decides nothing
    engine.observer = capture = Capture(engine.drafter)
    serve_all(engine, requests)
    outputs = {done.request.number: done.output for done in engine.finished}
    records = engine.log.freeze()
    report = TraceParityReport(policy.name, steps=len(capture.steps))
    for said in differences(policy, settings, capture.steps, outputs, records):
        report.faults.append(f"{said} (replay of the live run itself)")
    comparison = _Comparison(policy, settings, trace, drafter, report)
    for number, step in enumerate(capture.steps):
        comparison.take(number, step, records)
    gaps, report.tokens, beyond = rule.near_ties(
        {number: len(output) for number, output in outputs.items()}, MARGINS[pair.target.dtype]
    )
    report.target_ties, report.target_gap = len(gaps), float(gaps.max(initial=0.0))
    if beyond:
        report.faults.append(
            f"the target's best token lies {report.target_gap:.4g} logits above the recorded one, "
            f"and beyond the margin at {beyond} of {report.tokens} tokens"
        )
    return report


class _Comparison:
    """Plays captured steps on the recording and sorts what differs into a report."""

    def __init__(
        self,
        policy: Policy,
        settings: ServeSettings,
        trace: Trace,
        drafter: RecordedDrafter,
        report: TraceParityReport,
    ) -> None:
        self._session = open_session(
            policy, drafter, is_staged=settings.is_staged, caps_all=settings.caps_all
        )
        self._num_slots = settings.num_slots
        self._trace = trace
        self._drafter = drafter
        self._report = report

    def take(self, number: int, step: CapturedStep, records: RunRecords) -> None:
        """Compare one step."""
        live = step.decided.decision
        position_B = torch.zeros(self._num_slots, dtype=torch.int64)
        for slot, (request, length) in step.where.items():
            position_B[slot] = self._trace.positions(request).start + length - 1
        self._drafter.seek(position_B)
        with torch.inference_mode():
            played = self._session.decide(on_cpu(step.decided.ctx), step.decided.memory)
            accepted_B = RecordedVerifier(self._drafter).verify(played.forest, played.keep_BN)
        if not live.forest.layers and not played.forest.layers:
            return
        emitted_B = torch.from_numpy(records.emitted_SB[number].copy()).long()
        live_B = torch.from_numpy(records.accepted_SB[number].copy()).long()
        accepted_B = torch.minimum(accepted_B, emitted_B)
        all_B = torch.ones_like(step.decided.ctx.live_B.cpu())
        found = agreement(
            Outcome(_on_host(live), live_B), Outcome(played, accepted_B), revealed_B=all_B
        )
        checks = self._scores(number, step, position_B)
        revealed_B = self._drafter.unrevealed_B == 0
        self._report.drafts += int((live.depth_B > 0).sum())
        self._report.unrevealed += int((~revealed_B).sum())
        for check in checks.values():
            self._report.scores.add(check)
        compared = _Compared(number, step, played, found, accepted_B, checks)
        if revealed_B.all():
            self._sort(compared)
        else:
            differs_B = found.plan_differs_B | found.accepted_differs_B
            self._report.unrevealed_differences += int(differs_B.sum())

    def _scores(
        self, number: int, step: CapturedStep, position_B: Tensor
    ) -> Mapping[int, ScoreCheck]:
        """Scores of every request's draft against the recorded ones."""
        if not step.expansions:
            return {}
        drafted = [slot for slot in step.where if step.decided.decision.depth_B[slot] > 0]
        return {
            slot: check_scores(
                step,
                slot,
                self._trace.arrays,
                int(position_B[slot]),
                self._where(number, step, slot),
            )
            for slot in drafted
        }

    def _sort(self, compared: _Compared) -> None:
        """Put each difference of a step down to rounding, or to a fault."""
        live, played, checks = compared.step.decided.decision, compared.played, compared.checks
        plan_differs_B = compared.found.plan_differs_B
        if (live.levels, live.checks) != (played.levels, played.checks):
            plan_differs_B = compared.step.decided.ctx.live_B.cpu()
        beyond = [said for check in checks.values() for said in check.beyond]
        # Requests share a budget, so a score of one may decide the plan of another.
        is_rounding = not beyond and any(check.differs for check in checks.values())
        for slot in torch.nonzero(plan_differs_B | compared.found.accepted_differs_B)[
            :, 0
        ].tolist():
            if plan_differs_B[slot]:
                is_tie, said = is_rounding, plan_difference(live, played, slot)
            else:
                is_tie = self._path_may_swap(compared.step, slot)
                said = f"the same plan, replayed {int(compared.accepted_B[slot])} tokens accepted"
            if is_tie:
                self._report.score_ties += 1
            else:
                where = self._where(compared.number, compared.step, slot)
                why = beyond[0] if beyond else "no score differs enough to explain it"
                self._report.faults.append(f"{where}: {said}; {why}")

    def _path_may_swap(self, step: CapturedStep, slot: int) -> bool:
        """Whether a near-tie of the draft explains why another child is on the recorded path."""
        request, length = step.where[slot]
        position = self._trace.positions(request).start + length - 1
        ahead = self._trace.all_tokens(request)[length:].tolist()
        return path_may_swap(step, slot, self._trace.arrays, position, ahead)

    def _where(self, number: int, step: CapturedStep, slot: int) -> str:
        request, length = step.where[slot]
        name = key_label(request_key(self._trace.header.requests[request]))
        return f"step {number}, {name} after {length} output tokens"


def plan_difference(live: Decision, played: Decision, slot: int) -> str:
    """Say which nodes of one request only one of two decisions verifies, at the first depth."""
    ours, theirs = _kept(live, slot), _kept(played, slot)
    for depth in range(1, 1 + max(live.levels, played.levels)):
        only = [
            _nodes({path: score for path, score in one.items() if len(path) == depth}, other)
            for one, other in ((ours, theirs), (theirs, ours))
        ]
        if any(only):
            return f"depth {depth}: only live {only[0] or '-'}, only replayed {only[1] or '-'}"
    return (
        f"the same nodes; levels and checks live {live.levels} and {live.checks}, replayed "
        f"{played.levels} and {played.checks}"
    )


def _nodes(one: Mapping[tuple[int, ...], float], other: Mapping[tuple[int, ...], float]) -> str:
    """Nodes of one plan that the other lacks, with their path log-probabilities."""
    return ", ".join(
        "/".join(map(str, path)) + f" ({score:.5g})"
        for path, score in one.items()
        if path not in other
    )


def _kept(decision: Decision, slot: int) -> dict[tuple[int, ...], float]:
    """Path log-probability of every verified node of one request; 0 in a fixed tree."""
    kept: dict[tuple[int, ...], float] = {}
    parts = decision.forest.split(decision.keep_BN)
    paths = node_paths(decision, slot)
    for layer, keep_BW, names in zip(decision.forest.layers, parts, paths, strict=True):
        for place in torch.nonzero(keep_BW[slot])[:, 0].tolist():
            scores = layer.path_logp_BW
            kept[names[place]] = 0.0 if scores is None else float(scores[slot, place])
    return kept


def _on_host(decision: Decision) -> Decision:
    """The live decision where the replay's is."""
    forest = decision.forest
    layers = tuple(
        replace(
            layer,
            exists_BW=layer.exists_BW.cpu(),
            parent_BW=None if layer.parent_BW is None else layer.parent_BW.cpu(),
        )
        for layer in forest.layers
    )
    return replace(
        decision,
        forest=replace(forest, layers=layers, device=torch.device("cpu")),
        keep_BN=decision.keep_BN.cpu(),
    )
