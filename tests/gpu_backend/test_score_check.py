"""Scores of a live draft against recorded ones: ranks that rounding exchanges, and faults."""

from types import SimpleNamespace

import numpy as np
import pytest

from gpu_backend import score_check
from gpu_backend.score_check import ROOT, check_scores

BELOW_FIRST, BELOW_SECOND = [-0.5, -2.0], [-0.1, -4.0]


@pytest.fixture
def compare(monkeypatch):
    """Compare a root and its two expanded children with a recording of the same."""
    monkeypatch.setattr(
        score_check, "expanded", lambda *_: {ROOT: (0, 0), (0,): (1, 0), (1,): (1, 1)}
    )

    def run(live_root, live_below, recorded_root, recorded_below):
        step = SimpleNamespace(
            expansions=[
                SimpleNamespace(logp_BFk=np.array([[live_root]], np.float16)),
                SimpleNamespace(logp_BFk=np.array([live_below], np.float16)),
            ]
        )
        arrays = SimpleNamespace(
            root_logp=np.array([recorded_root], np.float16),
            slot_child=np.array([[[0, 1]]], np.int16),
            child_logp=np.array([[recorded_below]], np.float16),
        )
        return check_scores(step, 0, arrays, 0, "request 3")

    return run


def test_equal_scores_are_no_difference(compare):
    below = [BELOW_FIRST, BELOW_SECOND]
    check = compare([-1.0, -1.5], below, [-1.0, -1.5], below)
    assert (check.compared, check.unequal, check.swapped, check.beyond) == (6, 0, 0, [])
    assert not check.differs


def test_below_children_that_exchanged_their_ranks_stand_the_others_scores(compare):
    """Two children a step of float16 apart: what lies below them is another node's, no fault."""
    check = compare(
        [-1.0, -1.001], [BELOW_FIRST, BELOW_SECOND], [-1.0, -1.0], [BELOW_SECOND, BELOW_FIRST]
    )
    assert check.swapped == 2
    assert check.beyond == []
    assert check.differs


def test_other_scores_below_children_that_are_far_apart_are_a_fault(compare):
    check = compare(
        [-1.0, -1.5], [BELOW_FIRST, BELOW_SECOND], [-1.0, -1.5], [BELOW_SECOND, BELOW_FIRST]
    )
    assert check.swapped == 0
    assert check.beyond == [
        "request 3, below node 0, rank 0: score -0.5 live, -0.099976 recorded",
        "request 3, below node 1, rank 0: score -0.099976 live, -0.5 recorded",
    ]
