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
        chain_P: which candidate the greedy chain's node is.
        beam_width: slots of the beam.
        num_eligible: candidates from the front that the beam may hold; those behind are the
            chain slot's children, which stay out of the beam.

    Returns:
        Candidate of each slot ``[P, W]``, NO_SLOT where a slot is empty. The beam is ordered by
        (path log-probability descending, candidate ascending); the last slot holds the chain's
        node where the beam does not.
    """
    eligible = score_PN[:, :num_eligible]
    best = np.argsort(-eligible, axis=1, kind="stable")[:, :beam_width]
    exists = np.take_along_axis(eligible, best, axis=1) > -np.inf
    slots = np.full((len(score_PN), beam_width + 1), NO_SLOT, dtype=np.int64)
    slots[:, : best.shape[1]] = np.where(exists, best, NO_SLOT)
    in_beam = (slots == chain_P[:, None]).any(axis=1)
    slots[:, beam_width] = np.where(in_beam, NO_SLOT, chain_P)
    return slots


def chain_slot(
    slots_PW: npt.NDArray[np.int64], chain_P: npt.NDArray[np.int64]
) -> npt.NDArray[np.int64]:
    """Slot of each position that holds the greedy chain's node, ``[P]``."""
    held: npt.NDArray[np.int64] = (slots_PW == chain_P[:, None]).argmax(axis=1)
    return held
