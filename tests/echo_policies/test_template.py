"""Published trees node by node, and the lists that users write."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from echo_policies.errors import InputError
from echo_policies.registry import parse
from echo_policies.schedulers.static import Chain
from echo_policies.template import EAGLE1_25, MEDUSA_63, RankPath, RankTemplate, parse_tree

# Medusa's published order (policies.md); a node is its ranks.
MEDUSA = (
    "0 00 1 01 2 000 10 02 3 03 4 04 20 05 001 5 06 6 07 010 11 7 08 002 30 09 "
    "8 9 100 020 12 003 40 21 004 005 0000 011 006 030 50 13 007 008 009 60 040 14 70 012 200 "
    "31 22 80 050 15 101 021 90 060 0001 16 070"
)
EAGLE = "0 1 2 3 00 01 02 10 11 20 21 30 000 001 002 010 011 020 021 100 0000 0001 0002 00000 00001"


def nodes(text: str) -> set[RankPath]:
    return {tuple(map(int, node)) for node in text.split()}


@pytest.mark.parametrize(
    ("tree", "text", "by_depth"),
    [(MEDUSA_63, MEDUSA, [10, 28, 23, 2]), (EAGLE1_25, EAGLE, [4, 8, 8, 3, 2])],
)
def test_published_trees(tree: RankTemplate, text: str, by_depth: list[int]) -> None:
    assert set(tree.paths) == nodes(text)
    assert len(tree.paths) == sum(by_depth)
    assert [Counter(tree.depths)[d] for d in range(1, len(by_depth) + 1)] == by_depth
    assert tree.levels == len(by_depth)
    assert not tree.is_chain


def test_a_prefix_of_medusas_published_order_is_a_tree() -> None:
    for length in range(1, 64):
        text = "/".join(MEDUSA.split()[:length])
        assert len(parse_tree(text).paths) == length


@pytest.mark.parametrize(
    ("text", "paths"),
    [
        ("0/1/00/01", ((0,), (1,), (0, 0), (0, 1))),
        ("01/1/0", ((0,), (1,), (0, 1))),
        ("0/0.12", ((0,), (0, 12))),
        (" 0 / 00 /", ((0,), (0, 0))),
    ],
)
def test_lists_are_read_and_sorted_by_depth(text: str, paths: tuple[RankPath, ...]) -> None:
    assert parse_tree(text).paths == paths


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "list of rank paths|at least one node|path of ranks"),
        ("0/x", "list of rank paths such as 0/1/00/01"),
        ("0/00/0", r"must list each node once; \(0,\) is there twice"),
        ("0/10", r"Node \(1, 0\) lacks its parent \(1,\)"),
        ("0/0.-1", "path of ranks >= 0"),
        ("0//1", "path of ranks"),
    ],
)
def test_bad_lists_are_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse_tree(text)


def test_no_node_is_no_tree() -> None:
    with pytest.raises(InputError, match="at least one node; got none"):
        RankTemplate.of([])


def test_a_misspelt_tree_name_is_offered_the_nearest() -> None:
    with pytest.raises(
        InputError, match=r"No static tree named 'medusa36'\. Did you mean 'medusa63'"
    ):
        parse("static:tree=medusa36")


def test_chains() -> None:
    assert RankTemplate.chain(3).paths == ((0,), (0, 0), (0, 0, 0))
    assert RankTemplate.chain(3).is_chain
    assert Chain(levels=0) != Chain(levels=1)


@st.composite
def trees(draw: st.DrawFn) -> RankTemplate:
    paths: list[RankPath] = [()]
    for _ in range(draw(st.integers(1, 12))):
        path = (*draw(st.sampled_from(paths)), draw(st.integers(0, 11)))
        if path not in paths:
            paths.append(path)
    return RankTemplate.of(paths[1:])


@given(tree=trees())
def test_indices_agree_with_the_paths(tree: RankTemplate) -> None:
    for i, path in enumerate(tree.paths):
        parent = tree.parents[i]
        assert path[:-1] == (tree.paths[parent] if parent >= 0 else ())
        assert parent < i
        assert tree.ranks[i] == path[-1]
        assert tree.depths[i] == len(path)
    for depth, where in enumerate(tree.layers, start=1):
        layer = tree.paths[where]
        assert {len(path) for path in layer} == {depth}
        assert tree.expanded[depth - 1] == len({path[:-1] for path in layer})
        if depth > 1:
            above = tree.paths[tree.layers[depth - 2]]
            parents = tree.parents_in_layer(depth, torch.device("cpu")).tolist()
            assert [above[p] for p in parents] == [path[:-1] for path in layer]
            inner = tree.expanded_in_layers(torch.device("cpu"))[depth - 2].tolist()
            assert [above[p] for p in inner] == sorted({path[:-1] for path in layer})


@given(tree=trees())
def test_writing_a_tree_and_reading_it_back(tree: RankTemplate) -> None:
    dotted = all(len(path) > 1 or path[0] < 10 for path in tree.paths)
    text = "/".join(".".join(map(str, path)) for path in tree.paths)
    if dotted:
        assert parse_tree(text) == tree
