"""The budget by timed forwards: known answers, and a tiny model under a clock of its own."""

import pytest

from gpu_backend.knee import NODES_PER_REQUEST, Knee, measure_knee
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


def test_larger_trees_are_timed_until_one_is_beyond_the_knee():
    """The clock says that a forward takes as long as the number of forwards of its size so far."""
    model = tiny_model()
    prepare_model(model, VOCAB)
    rows = []
    forward = model.forward

    def counting(input_ids, **options):
        rows.append(input_ids.shape[1])
        return forward(input_ids=input_ids, **options)

    model.forward = counting
    spent = {3: 8, 6: 7, 9: 9, 12: 11}  # seconds by rows; 11 > 1.25 * 8
    seconds = [0.0]

    def clock():
        seconds[0] += spent[rows[-1]] if rows and len(rows) > clock.seen else 0
        clock.seen = len(rows)
        return seconds[0]

    clock.seen = 0
    knee = measure_knee(model, batch_size=3, context=5, factor=1.25, clock=clock, vocab_size=VOCAB)
    assert NODES_PER_REQUEST[:4] == (0, 1, 2, 3)
    assert knee.rows == (3, 6, 9, 12)
    assert knee.seconds == (8, 8, 9, 11)  # more rows are never cheaper
    assert knee.k_max == 7  # at 10 seconds, halfway between 9 and 12 rows: 10.5 - 3
    assert rows == [size for size in (3, 6, 9, 12) for _ in range(4)]
