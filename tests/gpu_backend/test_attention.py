"""Tree attention equals dense attention over each row's own text."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from echo_policies.errors import InputError
from gpu_backend.attention import TreeRows, merge, tree_attention
from gpu_backend.kv_store import KvStore
from gpu_backend.model_preparation import prepare_draft
from tests.gpu_backend.tiny import VOCAB, tiny_model

HEADS, GROUPS, DIM, LAYER = 2, 3, 4, 1


class Layer(torch.nn.Module):
    layer_idx = LAYER


def rows(count, seed):
    generator = torch.Generator().manual_seed(seed)
    query = torch.randn(1, HEADS * GROUPS, count, DIM, generator=generator)
    key, value = torch.randn(2, 1, HEADS, count, DIM, generator=generator)
    return query, key, value


def new_store(prefix):
    return KvStore(
        2,
        HEADS,
        DIM,
        prefix_capacity=prefix,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def dense(query, keys, values):
    """One row's attention over ``[n, HEADS, DIM]`` keys, every head by itself."""
    out = []
    for head in range(HEADS * GROUPS):
        key, value = keys[:, head // GROUPS], values[:, head // GROUPS]
        weights = torch.softmax(key @ query[head] * 0.5, dim=0)
        out.append(weights @ value)
    return torch.stack(out)


@settings(deadline=None, max_examples=25)
@given(st.integers(1, 12), st.integers(1, 6), st.integers(0, 5), st.data())
def test_equals_dense_attention(prefix, first, second, data):
    store = new_store(prefix)
    q0, k0, v0 = rows(prefix, 0)
    own = TreeRows.build(store, torch.arange(prefix) + 1, None, torch.float32)
    out, _ = tree_attention(Layer(), q0, k0, v0, None, scaling=0.5, tree_rows=own)
    store.commit_prefix(prefix)
    for row in range(prefix):
        seen = slice(0, row + 1)
        expected = dense(
            q0[0, :, row], k0[0, :, seen].transpose(0, 1), v0[0, :, seen].transpose(0, 1)
        )
        torch.testing.assert_close(out[0, row], expected)

    branches = []
    all_keys, all_values = [], []
    for count in (first, second):
        if not count:
            continue
        q, k, v = rows(count, count)
        start = store.num_tree
        above = [data.draw(st.sampled_from(branches)) if start else [] for _ in range(count)]
        lengths = torch.tensor([data.draw(st.integers(1, prefix)) for _ in range(count)])
        own_branches = [[start + i, *above[i]] for i in range(count)]
        width = max(map(len, own_branches))
        index = torch.tensor([[*b, *[-1] * (width - len(b))] for b in own_branches])
        store.reserve_tree(count)
        tree_rows = TreeRows.build(store, lengths, index, torch.float32)
        out, _ = tree_attention(Layer(), q, k, v, None, scaling=0.5, tree_rows=tree_rows)
        store.commit_tree(count)
        all_keys += list(k[0].transpose(0, 1))
        all_values += list(v[0].transpose(0, 1))
        for i in range(count):
            keys = [
                *k0[0, :, : lengths[i]].transpose(0, 1),
                *(all_keys[j] for j in own_branches[i]),
            ]
            values = [
                *v0[0, :, : lengths[i]].transpose(0, 1),
                *(all_values[j] for j in own_branches[i]),
            ]
            expected = dense(q[0, :, i], torch.stack(keys), torch.stack(values))
            torch.testing.assert_close(out[0, i], expected)
        branches += own_branches


def test_merge_of_far_apart_sums():
    """A part whose weights vanish beside the other's leaves no NaN behind."""
    a, b = torch.ones(1, 1, 1, 2), torch.zeros(1, 1, 1, 2)
    out = merge(a, torch.full((1, 1, 1), 500.0), b, torch.full((1, 1, 1), -500.0))
    assert torch.equal(out, a)


def test_store_keeps_its_rows_when_it_grows():
    store = new_store(1)
    _, key, value = rows(700, 1)
    for _ in range(3):
        store.reserve_tree(700)
        for layer in range(2):
            store.write_tree(layer, key[0], value[0])
        store.commit_tree(700)
    keys, values = store.gather(0, torch.arange(2100)[None])
    assert torch.equal(keys[0], key[0].transpose(0, 1).repeat(3, 1, 1))
    assert torch.equal(values[0], value[0].transpose(0, 1).repeat(3, 1, 1))


def test_sliding_window_is_refused():
    model = tiny_model(use_sliding_window=True, sliding_window=8, max_window_layers=0)
    with pytest.raises(InputError, match="attend to its whole prefix"):
        prepare_draft(model, VOCAB)


def test_variants_of_attention_are_refused():
    """A model whose scores are capped would otherwise be recorded without its cap."""
    query, key, value = rows(2, 0)
    own = TreeRows.build(new_store(2), torch.arange(2) + 1, None, torch.float32)
    with pytest.raises(InputError, match="no softcap"):
        tree_attention(Layer(), query, key, value, None, scaling=1, tree_rows=own, softcap=30.0)
