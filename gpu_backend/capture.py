"""Writes a live run down as a recording of exactly what its policy saw.

Every draft of every request becomes a recorded position: the root's children, the expanded nodes
as slots with their children, and where the output's own tokens stand among them. So the recorded
drafter of :mod:`traces.replay` can play the run again, in any dtype, without a model.

Shape letters: P drafts, D levels, S slots, k children, B slots of the batch, F frontier nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from gpu_backend.serving_drafter import ServingDrafter
from gpu_backend.step_observer import DecidedStep
from traces.replay import BeamArrays
from traces.schema import NO_SLOT, OUTSIDE_VOCAB

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Expansion:
    """One depth's expansion of the whole batch, on the host."""

    token_BFk: IntArray
    logp_BFk: npt.NDArray[np.float16]
    entropy_BF: npt.NDArray[np.float16]
    index_BF: IntArray | None
    """Candidates of the depth above that were expanded; None for the roots."""
    mask_BF: npt.NDArray[np.bool_] | None


@dataclass(frozen=True, slots=True)
class CapturedStep:
    """One step of the run."""

    decided: DecidedStep
    where: Mapping[int, tuple[int, int]]
    """Request number and output tokens so far, by slot."""
    expansions: tuple[_Expansion, ...]
    tokens: tuple[IntArray, ...]
    """Token ids [B, W] of the candidates of every depth."""


class Capture:
    """An engine's observer that keeps every step."""

    def __init__(self, drafter: ServingDrafter) -> None:
        """Start empty."""
        self._drafter = drafter
        self.steps: list[CapturedStep] = []

    def decided(self, step: DecidedStep) -> None:
        """Keep a step."""
        has_drafted = bool(step.decision.forest.layers)
        where = {
            slot: (held.request.number, len(held.output)) for slot, held in step.served.items()
        }
        expansions = self._expansions() if has_drafted else ()
        tokens = tuple(self._drafter.token_layers) if has_drafted else ()
        self.steps.append(CapturedStep(step, where, expansions, tokens))

    def _expansions(self) -> tuple[_Expansion, ...]:
        return tuple(
            _Expansion(
                children.token_BFk.cpu().numpy(),
                children.logp_BFk.half().cpu().numpy(),
                children.entropy_BF.half().cpu().numpy(),
                None if frontier is None else frontier.index_BF.cpu().numpy(),
                None if frontier is None else frontier.mask_BF.cpu().numpy(),
            )
            for children, frontier in self._drafter.revealed
        )


def beams(steps: Sequence[CapturedStep], outputs: Mapping[int, Sequence[int]]) -> BeamArrays:
    """Turn captured steps into a recording; position ``step * B + slot`` is a slot's draft.

    Args:
        steps: of a whole run, at least one of which drafted.
        outputs: what the target said, by request number.
    """
    num_B = len(steps[0].decided.ctx.live_B)
    plans = [step.decided.decision.plan for step in steps]
    levels = max(plan.levels for plan in plans)
    slots, top_k = max(plan.width for plan in plans), max(plan.top_k for plan in plans)
    rows = len(steps) * num_B
    expanded = (rows, max(levels - 1, 0), slots)
    has_trees = any(plan.template is not None and not plan.is_chain for plan in plans)
    found = BeamArrays(
        root_logp=np.full((rows, top_k), -np.inf, np.float16),
        slot_child=np.full(expanded, NO_SLOT, np.int16),
        child_logp=np.full((*expanded, top_k), -np.inf, np.float16),
        path_rank=np.full((rows, levels), OUTSIDE_VOCAB, np.int32),
        path_logp=np.full((rows, levels), -np.inf, np.float16),
        root_entropy=np.zeros(rows, np.float16),
        slot_entropy=np.zeros(expanded, np.float16),
        # Where a chain ends is written down of any drafter; those that serve trees never end.
        chain_logp=None if has_trees else np.full((rows, levels), -np.inf, np.float16),
    )
    for number, step in enumerate(steps):
        for slot, (request, length) in step.where.items():
            if step.expansions:
                row = number * num_B + slot
                _write_beam(found, row, step, slot)
                _write_path(found, row, step, slot, outputs[request][length:])
    return found


def _write_beam(found: BeamArrays, row: int, step: CapturedStep, slot: int) -> None:
    """Write down what was expanded for one request in one step."""
    assert found.root_entropy is not None
    assert found.slot_entropy is not None
    top_k = step.decided.decision.plan.top_k
    stored_k = found.root_logp.shape[1]
    root = step.expansions[0]
    found.root_logp[row, :top_k] = root.logp_BFk[slot, 0]
    found.root_entropy[row] = root.entropy_BF[slot, 0]
    if step.decided.decision.plan.template is not None:
        if found.chain_logp is not None:
            for depth, expansion in enumerate(step.expansions):
                found.chain_logp[row, depth] = expansion.logp_BFk[slot, 0, 0]
        return  # a template is matched by ranks; its nodes' scores are in no view
    for depth, expansion in enumerate(step.expansions[1:], start=1):
        assert expansion.index_BF is not None
        assert expansion.mask_BF is not None
        places = np.flatnonzero(expansion.mask_BF[slot])
        index = expansion.index_BF[slot, places]
        if depth > 1:  # from this plan's numbering of candidates to the recording's
            index = index // top_k * stored_k + index % top_k
        found.slot_child[row, depth - 1, places] = index
        found.child_logp[row, depth - 1, places, :top_k] = expansion.logp_BFk[slot, places]
        found.slot_entropy[row, depth - 1, places] = expansion.entropy_BF[slot, places]


def _write_path(
    found: BeamArrays, row: int, step: CapturedStep, slot: int, ahead: Sequence[int]
) -> None:
    """Write down the rank of each next output token, as far as the draft went along with it."""
    candidate = None
    for depth, expansion in enumerate(step.expansions, start=1):
        place = _place_of(expansion, slot, candidate)
        if place is None or depth > len(ahead):
            return
        logp_k = expansion.logp_BFk[slot, place]
        matches = (expansion.token_BFk[slot, place] == ahead[depth - 1]) & (logp_k > -np.inf)
        if not matches.any():
            return
        found.path_rank[row, depth - 1] = int(matches.argmax())
        layer = step.decided.decision.forest.layers[depth - 1]
        here = layer.exists_BW[slot].cpu().numpy() & (
            step.tokens[depth - 1][slot] == ahead[depth - 1]
        )
        if layer.parent_BW is not None:
            here &= layer.parent_BW[slot].cpu().numpy() == candidate
        if not here.any():
            return  # revealed, but no node of the policy's template
        candidate = int(here.argmax())


def _place_of(expansion: _Expansion, slot: int, candidate: int | None) -> int | None:
    """Which place of the frontier a candidate has; None where it was not expanded."""
    if expansion.index_BF is None or expansion.mask_BF is None:
        return 0
    is_here = expansion.mask_BF[slot] & (expansion.index_BF[slot] == candidate)
    return int(is_here.argmax()) if is_here.any() else None
