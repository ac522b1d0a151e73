"""Recording of one request: a wide draft beam, the greedy chain and the target path.

Shape letters: P positions, D levels, W slots, N candidates, k children, C chain levels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from gpu_backend.beam import chain_slot, choose_slots
from gpu_backend.config import RecordConfig
from gpu_backend.node_trie import NodeTrie
from traces.schema import NO_SLOT, PAST_END

_T = TypeVar("_T", bound=np.generic)


@dataclass(frozen=True, slots=True, eq=False)
class RequestArrays:
    """One request's share of :class:`traces.schema.TraceArrays`, same names and shapes."""

    tokens: npt.NDArray[np.int32]
    root_logp: npt.NDArray[np.float16]
    slot_child: npt.NDArray[np.int16]
    child_logp: npt.NDArray[np.float16]
    chain_logp: npt.NDArray[np.float16]
    path_rank: npt.NDArray[np.int32]
    path_logp: npt.NDArray[np.float16]
    root_entropy: npt.NDArray[np.float16]
    slot_entropy: npt.NDArray[np.float16]


@dataclass(slots=True)
class _Candidates:
    """Candidates of one depth at every position, ``[P, N]`` each."""

    parent: npt.NDArray[np.int64]
    token: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    num_eligible: int
    chain: npt.NDArray[np.int64]
    """[P] which candidate the greedy chain's node is."""


@dataclass(slots=True)
class _Layers:
    """What each depth appends while the beam grows."""

    slot_child: list[npt.NDArray[np.int16]] = field(default_factory=list)
    child_logp: list[npt.NDArray[np.float16]] = field(default_factory=list)
    entropy: list[npt.NDArray[np.float16]] = field(default_factory=list)
    chain_logp: list[npt.NDArray[np.float16]] = field(default_factory=list)


def record_positions(
    trie: NodeTrie, output: list[int], num_emitted: int, config: RecordConfig
) -> RequestArrays:
    """Record every position of one request.

    Args:
        trie: holds the teacher-forced forward over ``output``; gains the beam's nodes.
        output: the target's tokens, look-ahead included.
        num_emitted: tokens of the output proper, n; there are n - 1 positions.
        config: widths and levels.

    Returns:
        The request's arrays, with no positions where the output is one token.
    """
    roots = np.arange(num_emitted - 1)
    layers = _Layers()
    candidates = _root_candidates(trie, roots, config)
    chain_P = roots
    layers.chain_logp.append(trie.child_logp[roots, 0])
    for _ in range(config.levels - 1):
        candidates, chain_P = _expand_depth(trie, candidates, layers, config)
        layers.chain_logp.append(trie.child_logp[chain_P, 0])
    while len(layers.chain_logp) < config.chain_levels:
        chain_P = trie.reach(chain_P, trie.child_token[chain_P, 0])
        layers.chain_logp.append(trie.child_logp[chain_P, 0])
    rank, logp = _path(trie, len(roots), config.chain_levels)
    slots, width = config.num_slots, config.top_k
    return RequestArrays(
        tokens=np.array(output, dtype=np.int32),
        root_logp=trie.child_logp[roots, : config.root_width],
        slot_child=_stacked(layers.slot_child, (len(roots), 0, slots), np.int16),
        child_logp=_stacked(layers.child_logp, (len(roots), 0, slots, width), np.float16),
        chain_logp=np.stack(layers.chain_logp, axis=1),
        path_rank=rank,
        path_logp=logp,
        root_entropy=trie.entropy[roots],
        slot_entropy=_stacked(layers.entropy, (len(roots), 0, slots), np.float16),
    )


def _root_candidates(
    trie: NodeTrie, roots: npt.NDArray[np.int64], config: RecordConfig
) -> _Candidates:
    width = config.root_width
    return _Candidates(
        parent=np.repeat(roots[:, None], width, axis=1),
        token=trie.child_token[roots, :width],
        score=trie.child_logp[roots, :width].astype(np.float32),
        num_eligible=width,
        chain=np.zeros(len(roots), dtype=np.int64),
    )


def _expand_depth(
    trie: NodeTrie, candidates: _Candidates, layers: _Layers, config: RecordConfig
) -> tuple[_Candidates, npt.NDArray[np.int64]]:
    """Expand the slots of one depth; returns the next depth's candidates and the chain's nodes."""
    slots_PW = choose_slots(
        candidates.score,
        candidates.chain,
        beam_width=config.beam_width,
        num_eligible=candidates.num_eligible,
    )
    filled_PW = slots_PW != NO_SLOT
    chosen = np.where(filled_PW, slots_PW, 0)
    parent = np.take_along_axis(candidates.parent, chosen, axis=1)
    token = np.take_along_axis(candidates.token, chosen, axis=1)
    node_PW = np.zeros_like(parent)
    node_PW[filled_PW] = trie.reach(parent[filled_PW], token[filled_PW])
    score_PW = np.take_along_axis(candidates.score, chosen, axis=1)

    child_logp = trie.child_logp[node_PW, : config.top_k].copy()
    child_logp[~filled_PW] = -np.inf
    layers.slot_child.append(slots_PW.astype(np.int16))
    layers.child_logp.append(child_logp)
    layers.entropy.append(np.where(filled_PW, trie.entropy[node_PW], np.float16(0)))

    chain_W = chain_slot(slots_PW, candidates.chain)
    following = _slot_children(trie, node_PW, child_logp, score_PW, config)
    following.chain = chain_W * config.top_k
    return following, node_PW[np.arange(len(node_PW)), chain_W]


def _slot_children(
    trie: NodeTrie,
    node_PW: npt.NDArray[np.int64],
    child_logp_PWk: npt.NDArray[np.float16],
    score_PW: npt.NDArray[np.float32],
    config: RecordConfig,
) -> _Candidates:
    """Children of a depth's slots, slot-major, as candidates of the next depth."""
    shape = (len(node_PW), config.num_slots * config.top_k)
    width = config.top_k
    # The rounded values are summed, in float32, because a live drafter does the same.
    score = score_PW[:, :, None] + child_logp_PWk.astype(np.float32)
    return _Candidates(
        parent=np.repeat(node_PW, width, axis=1),
        token=trie.child_token[node_PW, :width].reshape(shape),
        score=score.reshape(shape),
        num_eligible=config.beam_width * width,
        chain=np.zeros(len(node_PW), dtype=np.int64),
    )


def _path(
    trie: NodeTrie, num_positions: int, levels: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
    """Rank and log-probability of the target's token at every position and level, ``[P, C]``."""
    edge_PC = np.arange(num_positions)[:, None] + np.arange(levels)
    past_PC = edge_PC >= len(trie.path_rank)
    edge_PC = np.where(past_PC, 0, edge_PC)
    if num_positions == 0:
        return np.zeros((0, levels), np.int32), np.zeros((0, levels), np.float16)
    rank = np.where(past_PC, np.int32(PAST_END), trie.path_rank[edge_PC])
    logp = np.where(past_PC, np.float16(-np.inf), trie.path_logp[edge_PC])
    return rank.astype(np.int32), logp.astype(np.float16)


def _stacked(
    layers: list[npt.NDArray[_T]], empty: tuple[int, ...], dtype: type[_T]
) -> npt.NDArray[_T]:
    """Layers along axis 1, or an array of no levels."""
    return np.stack(layers, axis=1) if layers else np.zeros(empty, dtype)
