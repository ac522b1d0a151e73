"""Tree attention equals dense attention over each row's own text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError
from gpu_backend.attention import merge, tree_attention
from gpu_backend.kv_pool import KvPool
from gpu_backend.model_preparation import prepare_model
from gpu_backend.new_nodes import NewNodes
from gpu_backend.ragged_pool import NO_ANCESTOR, RaggedPool
from tests.gpu_backend.tiny import VOCAB, tiny_model

HEADS, GROUPS, DIM, LAYER, KEY = 2, 3, 4, 1, 5


class Layer(torch.nn.Module):
    layer_idx = LAYER


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS * GROUPS, count, DIM, generator=generator)
    key, value = torch.randn(2, 1, HEADS, count, DIM, generator=generator)
    return query, key, value


def new_places(prefix, pads):
    """A pool with just enough room for one request's prefix."""
    pool = KvPool(2, HEADS, DIM, num_slots=prefix, dtype=torch.float32, device=torch.device("cpu"))
    places = RaggedPool(pool, query_heads=HEADS * GROUPS, role="draft", block=None, pads=pads)
    assert places.table.reserve(KEY, prefix)
    return places


def dense(query, keys, values):
    """One row's attention over ``[n, HEADS, DIM]`` keys, every head by itself."""
    out = []
    for head in range(HEADS * GROUPS):
        key, value = keys[:, head // GROUPS], values[:, head // GROUPS]
        weights = torch.softmax(key @ query[head] * 0.5, dim=0)
        out.append(weights @ value)
    return torch.stack(out)


@pytest.mark.parametrize("pads", [True, False], ids=["gathered", "in place"])
@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 5), st.data())
def test_rows_at_many_positions_equal_dense_attention(pads, prefix, first, second, data):
    """A prefix, tree rows that see some of it, and rows below those; the pool grows on the way."""
    places = new_places(prefix, pads)
    q0, k0, v0 = rows(prefix, 0)
    placed = places.continuing([KEY], [prefix])
    out, _ = tree_attention(Layer(), q0, k0, v0, None, scaling=0.5, tree_rows=placed.rows)
    places.commit([KEY], [prefix])
    sequence = [k0[0].transpose(0, 1), v0[0].transpose(0, 1)]
    for row in range(prefix):
        expected = dense(q0[0, :, row], *(part[: row + 1] for part in sequence))
        torch.testing.assert_close(out[0, row], expected)

    branches, tree = [], [[], []]
    for count in filter(None, (first, second)):
        q, k, v = rows(count, count)
        start = len(branches)
        above = [data.draw(st.sampled_from(branches)) if start else [] for _ in range(count)]
        visible = np.array([data.draw(st.integers(1, prefix)) for _ in range(count)])
        width = max(map(len, above))
        above_KA = np.array([[*a, *[NO_ANCESTOR] * (width - len(a))] for a in above], dtype=int)
        nodes = NewNodes(start, np.zeros(count, dtype=int), visible, above_KA)
        places.make_room(KEY, nodes.end_row)
        places.table.check_integrity([KEY])
        ((_, asked),) = nodes.chunks(KEY, 100)
        placed = places.branching([asked])
        out, _ = tree_attention(Layer(), q, k, v, None, scaling=0.5, tree_rows=placed.rows)
        tree[0] += list(k[0].transpose(0, 1))
        tree[1] += list(v[0].transpose(0, 1))
        for i in range(count):
            assert placed.position_R[i] == visible[i] + len(above[i])
            seen = [
                torch.stack([*part[: visible[i]], *(held[j] for j in [start + i, *above[i]])])
                for part, held in zip(sequence, tree, strict=True)
            ]
            torch.testing.assert_close(out[0, i], dense(q[0, :, i], *seen))
        branches += [[start + i, *above[i]] for i in range(count)]


def test_merge_of_far_apart_sums():
    """A part whose weights vanish beside the other's leaves no NaN behind."""
    a, b = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    out = merge(a, torch.full((1, 1, 1), 500.0), b, torch.full((1, 1, 1), -500.0))
    assert torch.equal(out, a)


def test_sliding_window_is_refused():
    model = tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(InputError, match="attend to its whole prefix"):
        prepare_model(model, VOCAB)


def test_variants_of_attention_are_refused():
    """A model whose scores are capped would otherwise be recorded without its cap."""
    query, key, value = rows(2, 0)
    own = new_places(2, pads=True).continuing([KEY], [2]).rows
    with pytest.raises(InputError, match="no softcap"):
        tree_attention(Layer(), query, key, value, None, scaling=1, tree_rows=own, softcap=30.0)
