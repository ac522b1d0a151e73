"""A pool keeps what was written to it, however it grows."""

import torch

from gpu_backend.kv_pool import KvPool
from gpu_backend.ragged_pool import RaggedPool

HEADS, DIM = 2, 3


def make_pool(num_slots):
    return KvPool(
        2, HEADS, DIM, num_slots=num_slots, dtype=torch.float32, device=torch.device("cpu")
    )


def test_slots_keep_their_content():
    pool = make_pool(7)
    written = torch.randn(2, 2, HEADS, 7, DIM, generator=torch.Generator().manual_seed(0))
    for layer in range(2):
        pool.write(layer, torch.arange(7), *written[layer])
    pool.grow(20)
    assert pool.num_slots == 20
    for layer in range(2):
        for held, part in zip(pool.gather(layer, torch.arange(7)), written[layer], strict=True):
            assert torch.equal(held, part.transpose(0, 1))
        # What was never written may be multiplied by a weight of zero.
        assert all(held.isfinite().all() for held in pool.gather(layer, torch.arange(20)))


def test_room_doubles_and_only_where_it_is_missing():
    """Kind: a copy of the whole pool at every forward."""
    pool = make_pool(10)
    places = RaggedPool(pool, query_heads=HEADS, role="draft", block=None, pads=True)
    places.table.reserve(0, 10)
    places.table.commit(0, range(4))
    sizes = []
    for tree_rows in (6, 7, 16, 17, 100, 90):
        places.make_room(0, tree_rows)
        places.table.check_integrity([0])
        assert places.table.num_slots == pool.num_slots
        assert len(places.table.spare(0, tree_rows)) == tree_rows
        sizes.append(pool.num_slots)
    assert sizes == [10, 20, 20, 40, 104, 104]
