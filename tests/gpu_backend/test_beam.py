"""The choice of slots at one depth."""

import numpy as np

from gpu_backend.beam import chain_slot, choose_slots

NEG = -np.inf


def slots(scores, chain, beam_width=2, num_eligible=None):
    score = np.array([scores], dtype=np.float32)
    eligible = len(scores) if num_eligible is None else num_eligible
    chosen = choose_slots(score, np.array([chain]), beam_width=beam_width, num_eligible=eligible)
    return chosen[0].tolist()


def test_best_first_and_ties_by_candidate():
    assert slots([-2, -1, -1, -3], chain=1) == [1, 2, -1]


def test_chain_outside_the_beam_takes_the_last_slot():
    assert slots([-2, -1, -1, -3], chain=3) == [1, 2, 3]


def test_children_of_the_chain_slot_stay_out_of_the_beam():
    assert slots([-2, -3, -0.5, -0.6], chain=2, num_eligible=2) == [0, 1, 2]


def test_missing_candidates_leave_slots_empty():
    assert slots([-2, NEG, NEG], chain=0) == [0, -1, -1]
    assert slots([-2], chain=0, beam_width=3) == [0, -1, -1, -1]


def test_chain_slot():
    held = chain_slot(np.array([[4, 7, -1], [4, 7, 9]]), np.array([7, 9]))
    assert held.tolist() == [1, 2]
