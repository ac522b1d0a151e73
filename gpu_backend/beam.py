"""Which candidates of one depth are expanded: the beam and the greedy-chain slot.

Shape letters: P positions, N candidates, W slots (beam_width + 1).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from traces.schema import NO_SLOT


def choose_slots(
    score_PN: npt.NDArray[np.float32],
    chain_P: npt.NDArray[np.int64],
    *,
    beam_width: int,
    num_eligible: int,
) -> npt.NDArray[np.int64]:
    """Pick the slots of one depth at every position.

    Args:
        score_PN: path log-probabilities of the candidates; -inf where there is none.
        chain_P: which candidate the greedy chain's node is; NO_SLOT where the chain has ended.
        beam_width: slots of the beam.
        num_eligible: candidates from the front that the beam may hold; those behind are the
            chain slot's children, which stay out of the beam.

    Returns:
        Candidate of each slot ``[P, W]``, NO_SLOT where a slot is empty. The beam is ordered by
        (path log-probability descending, candidate ascending); the last slot holds the chain's
        node where it exists and the beam lacks it.
    """
    eligible = score_PN[:, :num_eligible]
    best = np.argsort(-eligible, axis=1, kind="stable")[:, :beam_width]
    exists = np.take_along_axis(eligible, best, axis=1) > -np.inf
    slots = np.full((len(score_PN), beam_width + 1), NO_SLOT, dtype=np.int64)
    slots[:, : best.shape[1]] = np.where(exists, best, NO_SLOT)
    in_beam = (slots == chain_P[:, None]).any(axis=1)
    goes_on = (chain_P != NO_SLOT) & (score_PN[np.arange(len(slots)), chain_P] > -np.inf)
    slots[:, beam_width] = np.where(goes_on & ~in_beam, chain_P, NO_SLOT)
    return slots


def chain_slot(
    slots_PW: npt.NDArray[np.int64], chain_P: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Slot of each position that holds the greedy chain's node, ``[P]``; NO_SLOT if none does."""
    held_PW = (slots_PW == chain_P[:, None]) & (slots_PW != NO_SLOT)
    return np.where(held_PW.any(axis=1), held_PW.argmax(axis=1), NO_SLOT)
