"""Rows over windows of a pool: groups, holes, gathered slots, and what they attend to."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.kv_pool import KvPool
from gpu_backend.sight import Sight
from gpu_backend.window_rows import WindowRows
from gpu_backend.windows import Window, grouped

HEADS, QUERIES, DIM = 2, 3, 8


def make_pool(num_slots, seed, dtype=torch.float32):
    """A pool with something in every slot."""
    pool = KvPool(1, HEADS, DIM, num_slots=num_slots, dtype=dtype, device=torch.device("cpu"))
    torch.manual_seed(seed)
    pool.write(
        0, torch.arange(num_slots), *torch.randn(2, HEADS, num_slots, DIM).to(dtype).unbind()
    )
    return pool


def visible(sight):
    """Slots that each row sees, one after the other."""
    if sight.branch_nA is not None:
        sequence = sight.slots[: sight.num_committed].tolist()
        return [sequence + [s for s in branch if s >= 0] for branch in sight.branch_nA.tolist()]
    last = len(sight.slots) - sight.num_rows + 1
    return [sight.slots[: last + row].tolist() for row in range(sight.num_rows)]


def attend_slowly(pool, sights, query_hgRd):
    """A softmax per row and head over exactly the slots that the row sees."""
    out, row = torch.zeros_like(query_hgRd), 0
    for sight in sights:
        for slots in visible(sight):
            keys, values = pool.gather(0, torch.tensor(slots))
            scores = torch.einsum("hgd,shd->hgs", query_hgRd[:, :, row], keys)
            out[:, :, row] = torch.einsum("hgs,shd->hgd", scores.softmax(-1), values)
            row += 1
    return out


@st.composite
def sights(draw):
    """Requests in blocks of 40 slots, with holes, trees, chains and scattered slots."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    found = []
    for block in range(rng.integers(1, 6)):
        slots = block * 40 + np.arange(40)
        if rng.random() < 0.4:
            slots = slots[np.sort(rng.permutation(40)[: rng.integers(20, 40)])]
        if rng.random() < 0.2:
            slots = np.sort(rng.permutation(200)[:20])
        rows, committed = int(rng.integers(1, 4)), int(rng.integers(0, 12))
        used = slots[: committed + rows]
        if rng.random() < 0.5:
            found.append(Sight(rows, committed, used))
            continue
        branch = np.full((rows, 3), -1)
        branch[:, 0] = used[committed:]
        if rows > 1:
            branch[1:, 1] = used[committed]
        found.append(Sight(rows, committed, used, branch))
    return found


@settings(max_examples=60, deadline=None)
@given(sights())
def test_rows_attend_to_exactly_what_they_see(found):
    pool, rows = make_pool(200, 1), sum(sight.num_rows for sight in found)
    query = torch.randn(HEADS, QUERIES, rows, DIM)
    write = torch.from_numpy(np.concatenate([s.slots[s.num_committed :] for s in found]))
    keys, values = pool.gather(0, write)
    layout = WindowRows.of(pool, write, found, QUERIES)
    given_out = layout.attend(0, query, keys.transpose(0, 1), values.transpose(0, 1))
    expected = attend_slowly(pool, found, query)
    torch.testing.assert_close(given_out, expected, atol=1e-5, rtol=1e-5)


def roots(*lengths, spacing=100, rows=1):
    return [
        Window.of(Sight(rows, length - rows, block * spacing + np.arange(length)))
        for block, length in enumerate(lengths)
    ]


def sizes(windows, num_slots):
    return [len(view.windows) for view in grouped(windows, num_slots)]


@pytest.mark.parametrize(
    ("lengths", "num_slots", "groups"),
    [
        ((50, 50, 50), 300, [3]),
        ((10, 50, 90), 300, [3]),
        ((60, 50), 155, [1, 1]),  # the longer window would leave the pool
        ((60, 50), 160, [2]),
    ],
)
def test_requests_share_a_view_that_stays_in_the_pool(lengths, num_slots, groups):
    assert sizes(roots(*lengths), num_slots) == groups


def test_a_view_is_shared_only_where_its_padding_costs_less_than_a_product():
    assert sizes(roots(10, 90, spacing=2000), 4000) == [2]
    assert sizes(roots(10, 1900, spacing=2000), 4000) == [1, 1]
    prompt = roots(500, spacing=2000, rows=500)
    assert sizes([*prompt, *roots(40, 40, spacing=2000)[1:]], 4000) == [1, 1]
    chains = roots(50, 50, rows=3)
    assert sizes([*chains, *roots(50, 50, 50)[2:]], 300) == [3]


def test_a_view_reaches_over_a_block_that_is_nobodys_unless_too_many_are():
    (view,) = grouped([roots(*[50] * 4)[block] for block in (0, 1, 3)], 400)
    assert (view.extent.spacing, view.places, view.extent.num_windows) == (100, [0, 1, 3], 4)
    (view,) = grouped([roots(*[50] * 4)[block] for block in (0, 2, 3)], 400)
    assert (view.extent.spacing, view.places, view.extent.num_windows) == (100, [0, 2, 3], 4)
    far = roots(*[50] * 60)
    assert sizes([far[0], far[1], far[59]], 6000) == [2, 1]


def test_windows_that_go_back_or_are_spaced_without_a_common_step_part():
    even = roots(50, 50)
    assert sizes([even[1], even[0]], 200) == [1, 1]
    odd = Window.of(Sight(1, 49, 163 + np.arange(50)))
    assert sizes([*even, odd], 300) == [2, 1]


def test_scattered_slots_are_gathered_by_themselves():
    scattered = Window.of(Sight(1, 2, np.array([200, 5, 90])))
    assert scattered.gathered.tolist() == [5, 90, 200]
    assert sizes([*roots(50, 50), scattered], 300) == [2, 1]


def test_windows_of_nobody_may_hold_anything():
    """Guards padding that leaks: a view's spare windows and rows are read, and must not count."""
    pool = make_pool(300, 1)
    garbage = torch.full((HEADS, 100, DIM), torch.nan)
    pool.write(0, torch.arange(100, 200), garbage, garbage)
    found = [Sight(3, 20, np.arange(23)), Sight(1, 30, 200 + np.arange(31))]
    write = torch.tensor([20, 21, 22, 230])
    layout = WindowRows.of(pool, write, found, QUERIES)
    assert [group.shape for group in layout.groups] == [(2, 31)]
    near = [
        Sight(1, 9, np.arange(10)),
        Sight(1, 9, 200 + np.arange(10)),
        Sight(2, 8, 250 + np.arange(10)),
    ]
    layout = WindowRows.of(pool, torch.tensor([9, 209, 258, 259]), near, QUERIES)
    assert [group.shape for group in layout.groups] == [(6, 10)]
    query = torch.randn(HEADS, QUERIES, 4, DIM)
    keys, values = pool.gather(0, torch.tensor([9, 209, 258, 259]))
    out = layout.attend(0, query, keys.transpose(0, 1), values.transpose(0, 1))
    torch.testing.assert_close(out, attend_slowly(pool, near, query), atol=1e-5, rtol=1e-5)


def test_a_root_that_sees_everything_needs_no_mask():
    pool = make_pool(100, 1)
    sight = Sight(1, 9, np.arange(10))
    (group,) = WindowRows.of(pool, torch.tensor([9]), [sight], QUERIES).groups
    assert group.bias_BnW is None
    with_a_hole = Sight(1, 9, np.delete(np.arange(11), 4))
    (group,) = WindowRows.of(pool, torch.tensor([10]), [with_a_hole], QUERIES).groups
    assert group.bias_BnW is not None
