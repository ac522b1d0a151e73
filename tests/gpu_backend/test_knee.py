"""The budget by timed forwards: known answers, and a tiny model under a clock of its own."""

import pytest

from gpu_backend.bush_timer import MOST_ROUNDS, NODES_PER_REQUEST, Bush, model_timer
from gpu_backend.curve import Curve
from gpu_backend.knee import Knee, measure_knee
from gpu_backend.model_preparation import prepare_model
from tests.gpu_backend.tiny import VOCAB, tiny_model


@pytest.mark.parametrize(
    ("rows", "seconds", "k_max"),
    [
        ((4, 8, 12), (1.0, 1.0, 1.5), 6),  # halfway between 8 and 12 rows lies 1.25
        ((4, 8, 12), (1.0, 1.25, 1.5), 4),
        ((4, 8, 12), (1.0, 1.0, 1.0), 8),  # no knee in sight: the largest size that was timed
        ((4, 8), (1.0, 5.0), 0),  # a quarter of a row
        ((1, 2, 3), (1.0, 1.2, 1.2), 2),
    ],
)
def test_known_answers(rows, seconds, k_max):
    assert Knee(rows, seconds, 1.25).k_max == k_max


def timer_of(model, batch_size, clock):
    return model_timer(model, batch_size, 5, vocab_size=VOCAB, clock=clock)


def watched(seconds_of):
    """A tiny model, the rows of its forwards, and a clock that goes by a price list."""
    model = tiny_model()
    prepare_model(model, VOCAB)
    rows, spent = [], [0.0]
    forward = model.forward

    def counting(input_ids, **options):
        rows.append(input_ids.shape[1])
        spent[0] += seconds_of(rows)
        return forward(input_ids=input_ids, **options)

    model.forward = counting
    return model, rows, lambda: spent[0]


def test_larger_trees_are_timed_until_one_is_beyond_the_knee():
    """Each size first once for nothing; then they take turns."""
    price = {3: 8, 6: 7, 9: 9, 12: 11}  # 11 > 1.25 * 8
    model, rows, clock = watched(lambda rows: price[rows[-1]])
    knee = measure_knee(timer_of(model, 3, clock), 1.25)
    assert NODES_PER_REQUEST[:4] == (0, 1, 2, 3)
    assert knee.rows == (3, 6, 9, 12)
    assert knee.seconds == (8, 8, 9, 11)  # more rows are never cheaper
    assert knee.k_max == 7  # at 10 seconds, halfway between 9 and 12 rows: 10.5 - 3
    assert rows == [3, 3, 6, 6, 9, 9, 12, 12, 3, 6, 9, 12]


@pytest.mark.parametrize(
    ("slow", "rounds"),
    [((), 2), (range(4), 3), (range(4, 8), 3), (range(6, 12), 4), ({7}, 3), ({5, 9}, 3)],
)
def test_a_slow_spell_of_the_machine_changes_no_curve(slow, rounds):
    """Kind of fault: sizes timed one after the other, so that a spell makes some of them dear.

    Some forwards take three times their price; rounds go on until each price was paid twice.
    """
    price = {2: 4, 4: 6, 6: 9}
    model, rows, clock = watched(lambda rows: price[rows[-1]] * (3 if len(rows) - 1 in slow else 1))
    curve = timer_of(model, 2, clock).curve([Bush(2, nodes) for nodes in (0, 1, 2)], 100.0)
    assert (curve.rows, curve.seconds) == ((2, 4, 6), (4, 6, 9))
    assert len(rows) == 3 + 3 * rounds


def test_a_machine_that_never_does_the_same_twice_is_given_up():
    model, rows, clock = watched(lambda rows: 100.0 / len(rows))
    timer_of(model, 2, clock).curve([Bush(2, 0)], 100.0)
    assert len(rows) == 1 + MOST_ROUNDS


def test_the_knee_of_a_curve_begins_where_all_requests_have_a_row():
    curve = Curve((1, 2, 4, 8, 12, 16), (1.0, 1.0, 2.0, 2.25, 2.75, 4.0))
    knee = Knee.of(curve, 4, 1.25)
    assert (knee.rows, knee.seconds) == ((4, 8, 12), (2.0, 2.25, 2.75))
    assert knee.k_max == 6  # 2.5 s at 10 rows
