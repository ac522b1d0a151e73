"""Draft trees fixed in advance: every node is the path of ranks that leads to it."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from echo_policies.errors import InputError

RankPath = tuple[int, ...]


@dataclass(frozen=True)
class RankTemplate:
    """A tree of rank paths, depth-major and sorted, so that parents precede children.

    ``(0, 1)`` is the rank-1 child of the rank-0 child of the root. The root is not listed.
    """

    paths: tuple[RankPath, ...]

    @classmethod
    def of(cls, paths: Iterable[RankPath]) -> RankTemplate:
        """Sort and check a collection of paths.

        Raises:
            InputError: no node, a negative rank, a node twice, or a node without its parent.
        """
        given = list(paths)
        nodes = set(given)
        if not nodes:
            raise InputError("A static tree must have at least one node; got none.")
        if len(nodes) != len(given):
            twice = next(path for path in given if given.count(path) > 1)
            raise InputError(f"A static tree must list each node once; {twice} is there twice.")
        for path in nodes:
            if not path or min(path) < 0:
                raise InputError(f"A node must be a path of ranks >= 0; got {path}.")
            if len(path) > 1 and path[:-1] not in nodes:
                raise InputError(f"Node {path} lacks its parent {path[:-1]}; add it to the tree.")
        return cls(tuple(sorted(nodes, key=lambda path: (len(path), path))))

    @classmethod
    def chain(cls, levels: int) -> RankTemplate:
        """The greedy chain of ``levels`` tokens."""
        return cls.of((0,) * depth for depth in range(1, levels + 1))

    @property
    def levels(self) -> int:
        """Depth of the deepest node."""
        return len(self.paths[-1])

    @property
    def is_chain(self) -> bool:
        """Whether no depth holds two nodes."""
        return len(self.paths) == self.levels

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """Depth of every node."""
        return tuple(len(path) for path in self.paths)

    @cached_property
    def parents(self) -> tuple[int, ...]:
        """Index of every node's parent, -1 for children of the root."""
        index = {path: i for i, path in enumerate(self.paths)}
        return tuple(index[path[:-1]] if len(path) > 1 else -1 for path in self.paths)

    @cached_property
    def ranks(self) -> tuple[int, ...]:
        """Rank of every node among its parent's children."""
        return tuple(path[-1] for path in self.paths)

    @cached_property
    def layers(self) -> tuple[slice, ...]:
        """Where each depth's nodes lie, depth 1 first."""
        bounds = [0]
        for depth in range(1, self.levels + 1):
            bounds.append(bounds[-1] + self.depths.count(depth))
        return tuple(slice(a, b) for a, b in itertools.pairwise(bounds))

    @cached_property
    def expanded(self) -> tuple[int, ...]:
        """Nodes that must be expanded to reveal each depth, depth 1 first."""
        return (1, *(len(set(self.parents[layer])) for layer in self.layers[1:]))

    def expanded_in_layers(self, device: torch.device) -> tuple[Tensor, ...]:
        """int64 [F] of every depth but the last: places of nodes with children; one copy."""
        nodes = sorted(set(self.parents) - {-1})
        places = [node - self.layers[self.depths[node] - 1].start for node in nodes]
        place_N = torch.tensor(places, dtype=torch.int64, device=device)
        return torch.split(place_N, list(self.expanded[1:]))

    def parents_in_layer(self, depth: int, device: torch.device) -> Tensor:
        """int64 [W]: each depth-``depth`` node's parent, as an index into the layer above."""
        layer, above = self.layers[depth - 1], self.layers[depth - 2]
        return torch.tensor([p - above.start for p in self.parents[layer]], device=device)


def parse_tree(text: str) -> RankTemplate:
    """Read a list such as ``0/1/00/01`` (digits) or ``0/1/0.12`` (dots where ranks exceed 9).

    Raises:
        InputError: anything else.
    """
    try:
        paths = [
            tuple(int(rank) for rank in (node.split(".") if "." in node else node))
            for node in text.replace(" ", "").strip("/").split("/")
        ]
    except ValueError:
        raise InputError(
            f"A static tree is a list of rank paths such as 0/1/00/01 or 0/0.12; got {text!r}."
        ) from None
    return RankTemplate.of(paths)


def _expand(spec: str) -> RankTemplate:
    """Read the compact form used below: ``0-3`` is four siblings, ``10-11`` ranks 0 and 1 of 1."""
    paths: list[RankPath] = []
    for item in spec.split():
        first, _, last = item.partition("-")
        stem = tuple(int(digit) for digit in first[:-1])
        stop = int((last or first)[-1])
        paths.extend((*stem, rank) for rank in range(int(first[-1]), stop + 1))
    return RankTemplate.of(paths)


MEDUSA_63 = _expand(
    "0-9 00-09 10-16 20-22 30-31 40 50 60 70 80 90 "
    "000-009 010-012 020-021 030 040 050 060 070 100-101 200 0000-0001"
)
"""Medusa's 63 nodes (FasterDecoding/Medusa, ``mc_sim_7b_63``); 10/28/23/2 by depth."""

EAGLE1_25 = _expand("0-3 00-02 10-11 20-21 30 000-002 010-011 020-021 100 0000-0002 00000-00001")
"""EAGLE-1's 25 nodes (SafeAILab/EAGLE, also called ``mc_sim_7b_63``); 4/8/8/3/2 by depth."""

NAMED_TREES: dict[str, RankTemplate] = {"medusa63": MEDUSA_63, "eagle25": EAGLE1_25}
"""Published trees by the name that ``static:tree=NAME`` takes."""
