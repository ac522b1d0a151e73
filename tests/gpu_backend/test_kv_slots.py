"""Every slot has one owner, and a sequence's slots keep what was committed to them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError
from gpu_backend.kv_slots import SlotTable


def test_commit_keeps_the_accepted_rows_in_order():
    table = SlotTable(10)
    assert table.reserve(7, 8)
    table.commit(7, [0, 1])
    spare = table.spare(7, 5).copy()
    table.commit(7, [0, 2, 4])
    assert table.seen(7)[2:].tolist() == spare[[0, 2, 4]].tolist()
    assert table.length(7) == 5
    # The rejected rows are the next to be used again.
    assert table.spare(7, 2).tolist() == spare[[1, 3]].tolist()
    table.check_integrity([7])


def test_admission_waits_for_room():
    table = SlotTable(10)
    assert table.reserve(1, 6)
    assert not table.reserve(2, 5)
    assert table.num_free == 4
    table.release(1)
    assert table.reserve(2, 5)


def test_rows_beyond_the_reservation_are_refused():
    table = SlotTable(10)
    table.reserve(1, 4)
    table.commit(1, [0, 1])
    assert len(table.spare(1, 2)) == 2
    with pytest.raises(InputError, match="3 rows behind 2 tokens exceed 4 slots"):
        table.spare(1, 3)


def test_a_request_can_grow_beside_others():
    """Kind: growth that moves committed slots, or lends new ones to a request that has left."""
    table = SlotTable(10, block=5)
    table.reserve(0, 5)
    table.reserve(1, 5)
    table.commit(0, [0, 1, 2])
    before = table.seen(0, 2).tolist()
    table.grow(0, 4)
    assert (table.num_slots, table.num_free, table.capacity(0)) == (14, 0, 9)
    assert table.seen(0, 2).tolist() == before
    assert len(table.spare(0, 6)) == 6
    table.check_integrity([0, 1])
    table.release(0)
    assert table.num_free == 9


@given(st.lists(st.integers(0, 2**32), max_size=60))
def test_no_slot_leaks_or_is_shared(draws):
    """Kind: a slot lost or owned twice after any order of admissions, commits and releases."""
    table = SlotTable(40)
    content = np.full(40, -1)
    told = {}
    for number, draw in enumerate(draws):
        rng = np.random.default_rng(draw)
        action = rng.integers(3)
        if action == 0 and table.reserve(number, int(rng.integers(1, 15))):
            told[number] = []
        elif told:
            key = list(told)[rng.integers(len(told))]
            if action == 1:
                del told[key]
                table.release(key)
            else:
                room = len(table.seen(key, 10**6)) - table.length(key)
                rows = int(rng.integers(0, room + 1))
                values = rng.integers(0, 10**9, rows)
                content[table.spare(key, rows)] = values
                kept = np.flatnonzero(rng.random(rows) < 0.5)
                table.commit(key, kept)
                told[key] += values[kept].tolist()
        table.check_integrity(list(told))
        for key, values in told.items():
            assert content[table.seen(key)].tolist() == values
    for key in list(told):
        table.release(key)
    assert table.num_free == 40


def test_requests_get_neighbours_at_even_spacing():
    """So that their keys and values are one view: each in the block of its key, where it can be."""
    table = SlotTable(30, block=10)
    for key, capacity in ((2, 7), (0, 10), (1, 4)):
        assert table.reserve(key, capacity)
        assert table.seen(key, capacity).tolist() == list(range(10 * key, 10 * key + capacity))
    assert table.reserve(3, 9)  # no block is free: what is left of the others
    assert table.num_free == 0
    table.release(1)
    assert table.reserve(7, 4)
    assert table.seen(7, 4).tolist() == [10, 11, 12, 13]
