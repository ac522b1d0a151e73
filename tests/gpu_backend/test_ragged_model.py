"""Rows of many requests in one forward equal plain forwards over each row's own text."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gpu_backend.model_preparation import prepare_model
from gpu_backend.ragged_model import Branches, Extension, RaggedModel
from gpu_backend.tree_layout import NO_PARENT, TreeRows, ancestors
from tests.gpu_backend.tiny import VOCAB, tiny_model

KINDS = ["llama", "qwen2", "qwen3", "qwen3_moe"]


@pytest.fixture(scope="module", params=KINDS)
def models(request):
    """A model as transformers runs it, and the same one over a pool."""
    prepared = tiny_model(request.param, seed=4)
    prepare_model(prepared, VOCAB)
    return tiny_model(request.param, seed=4), prepared


@pytest.fixture(scope="module", params=[False, True], ids=["by request", "padded"])
def pads(request):
    return request.param


@torch.inference_mode()
def plain_logits(model, text):
    return model(torch.tensor([text])).logits[0, -1, :VOCAB]


def near(found, expected):
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=1e-5)


def random_tree(rng, size):
    """Parents of ``size`` rows below a root, depth by depth."""
    depth = [0]
    parents = [NO_PARENT]
    for _ in range(size):
        parent = int(rng.integers(len(depth)))
        parents.append(parent)
        depth.append(depth[parent] + 1)
    order = np.argsort(depth, kind="stable")
    place = np.argsort(order)
    parent_n = np.array([NO_PARENT if parents[i] < 0 else place[parents[i]] for i in order])
    return TreeRows(rng.integers(0, VOCAB, size + 1), parent_n, np.array(depth)[order])


def path_to(tree, row):
    return [] if row == NO_PARENT else [*path_to(tree, tree.parent_n[row]), int(tree.tokens_n[row])]


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_chunks_trees_and_commits_equal_plain_forwards(models, pads, seed):
    """Ragged prompts in ragged chunks, then trees, of which a path is committed, then more."""
    plain, prepared = models
    rng = np.random.default_rng(seed)
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=300, pads=pads)
    texts = {}
    for key in range(int(rng.integers(1, 5))):
        assert ragged.table.reserve(key, 60)
        texts[key] = []
    for _ in range(2):
        chunks = [
            Extension(key, rng.integers(0, VOCAB, rng.integers(1, 9)).tolist()) for key in texts
        ]
        logits = ragged.extend(chunks)
        for chunk, row in zip(chunks, logits, strict=True):
            texts[chunk.key] += chunk.tokens
            near(row, plain_logits(plain, texts[chunk.key]))
        trees = {key: random_tree(rng, int(rng.integers(0, 7))) for key in texts}
        logits = ragged.branch([tree.branches(key) for key, tree in trees.items()])
        rows = iter(logits)
        for key, tree in trees.items():
            for row in range(tree.num_rows):
                near(next(rows), plain_logits(plain, texts[key] + path_to(tree, row)))
        for key, tree in trees.items():
            row = int(rng.integers(tree.num_rows))
            above = ancestors(tree.parent_n, tree.depth_n)[row]
            ragged.table.commit(key, above[above >= 0])
            texts[key] += path_to(tree, row)
        ragged.table.check_integrity(list(texts))


def test_the_root_does_not_depend_on_how_many_rows_are_verified(models, pads):
    """Kind: a verify forward that differs from plain decoding with its width, at 2 already."""
    plain, prepared = models
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=60, pads=pads)
    ragged.table.reserve(0, 50)
    ragged.extend([Extension(0, [5, 6, 7])])
    expected = plain_logits(plain, [5, 6, 7, 8])
    rng = np.random.default_rng(0)
    for width in range(1, 17):
        tree = random_tree(rng, width - 1)
        tree.tokens_n[0] = 8
        near(ragged.branch([tree.branches(0)])[0], expected)


def test_tree_layers_over_several_forwards(models, pads):
    """A drafter's layers: rows of one forward are ancestors in the next."""
    plain, prepared = models
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=50, pads=pads)
    texts = {0: [5, 6, 7], 1: [9]}
    for key in texts:
        ragged.table.reserve(key, 20)
    ragged.extend([Extension(key, text) for key, text in texts.items()])

    def layer(*rows):
        return Branches(*(np.array(part) if i else part for i, part in enumerate(rows)))

    ragged.branch([layer(0, [11, 12], [0, 0], [0, 1], [[0], [1]]), layer(1, [13], [0], [0], [[0]])])
    logits = ragged.branch(
        [
            layer(0, [21, 22], [1, 1], [2, 3], [[1, 2], [0, 3]]),
            layer(1, [23], [1], [1], [[0, 1]]),
        ]
    )
    for row, text in zip(logits, [[5, 6, 7, 12, 21], [5, 6, 7, 11, 22], [9, 13, 23]], strict=True):
        near(row, plain_logits(plain, text))


def test_rows_branch_off_where_they_say(models, pads):
    """Recording's rows beside serving's: at many positions of a sequence, and at its end."""
    plain, prepared = models
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=12, pads=pads)
    text = [5, 6, 7, 8, 9]
    assert ragged.table.reserve(0, 5)
    assert ragged.table.reserve(1, 5)
    ragged.extend([Extension(0, text), Extension(1, [3, 4])])
    ragged.make_room(0, 4)
    two = np.array([[1, -1], [0, -1]])

    def rows(tokens, depth, place, above, visible):
        arrays = (np.array(part) for part in (tokens, depth, place, above, visible))
        return Branches(0, *arrays)

    at_end = TreeRows(np.array([8, 9]), np.array([NO_PARENT, 0]), np.array([0, 1])).branches(1)
    first = rows([11, 12], [0, 0], [0, 1], [[0], [1]], [1, 4])
    second = rows([21, 22], [1, 1], [2, 3], np.column_stack([[2, 3], two]), [4, 1])
    logits = torch.cat([ragged.branch([first, at_end]), ragged.branch([second])])
    for row, seen in zip(
        logits,
        [
            [*text[:1], 11],
            [*text[:4], 12],
            [3, 4, 8],
            [3, 4, 8, 9],
            [*text[:4], 12, 21],
            [*text[:1], 11, 22],
        ],
        strict=True,
    ):
        near(row, plain_logits(plain, seen))


def test_chosen_rows_of_an_extension(models, pads):
    plain, prepared = models
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=12, pads=pads)
    ragged.table.reserve(0, 12)
    text = [5, 6, 7, 8, 9, 10]
    assert len(ragged.extend_rows(Extension(0, text[:2]), np.arange(0))) == 0
    logits = ragged.extend_rows(Extension(0, text[2:]), np.array([1, 3]))
    for row, count in zip(logits, (4, 6), strict=True):
        near(row, plain_logits(plain, text[:count]))


def test_branch_without_a_sequence(models, pads):
    """Rows whose prefix is empty: the prefix pass has nothing to add."""
    plain, prepared = models
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=50, pads=pads)
    ragged.table.reserve(0, 20)
    ragged.table.reserve(1, 20)
    ragged.extend([Extension(1, [3, 4])])
    tree = TreeRows(np.array([8, 9, 10]), np.array([NO_PARENT, 0, 0]), np.array([0, 1, 1]))
    logits = ragged.branch([tree.branches(0), tree.branches(1)])
    for row, text in zip(
        logits, [[8], [8, 9], [8, 10], [3, 4, 8], [3, 4, 8, 9], [3, 4, 8, 10]], strict=True
    ):
        near(row, plain_logits(plain, text))


def test_chains_take_one_pass(models, pads, monkeypatch):
    """A batch of chains and bare roots needs no ancestors, and is as right."""
    plain, prepared = models
    ragged = RaggedModel(prepared, vocab_size=VOCAB, num_slots=50, pads=pads)
    texts = {0: [5, 6, 7], 1: [9]}
    for key in texts:
        ragged.table.reserve(key, 20)
    ragged.extend([Extension(key, text) for key, text in texts.items()])
    monkeypatch.setattr("gpu_backend.ragged_rows.ancestor_pass", None)
    chain = TreeRows(np.array([1, 2, 3]), np.array([NO_PARENT, 0, 1]), np.array([0, 1, 2]))
    root = TreeRows(np.array([4]), np.array([NO_PARENT]), np.array([0]))
    logits = ragged.branch([chain.branches(0), root.branches(1)])
    for row, text in zip(
        logits, [[5, 6, 7, 1], [5, 6, 7, 1, 2], [5, 6, 7, 1, 2, 3], [9, 4]], strict=True
    ):
        near(row, plain_logits(plain, text))
