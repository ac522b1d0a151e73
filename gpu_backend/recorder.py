"""Recording of one request: a wide draft beam, the greedy chain and the target path.

Shape letters: P positions, D levels, W slots, N candidates, k children, C chain levels.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from gpu_backend.beam import chain_slot, choose_slots
from gpu_backend.config import RecordConfig
from traces.schema import NO_SLOT, PositionArrays

_T = TypeVar("_T", bound=np.generic)

_NOWHERE: Final = -1
"""Node of a greedy chain that has ended, because nothing was proposed any more."""


class Nodes(Protocol):
    """What a drafter proposes after every text; nodes go by number, roots by their position."""

    @property
    def child_token(self) -> npt.NDArray[np.int32]:
        """``[N, k]`` children in rank order."""
        ...

    @property
    def child_logp(self) -> npt.NDArray[np.float16]:
        """``[N, k]`` their conditional log-probabilities; -inf where there is no child."""
        ...

    @property
    def entropy(self) -> npt.NDArray[np.float16]:
        """``[N]`` nats."""
        ...

    def reach(
        self, parents_K: npt.NDArray[np.int64], tokens_K: npt.NDArray[np.integer]
    ) -> npt.NDArray[np.int64]:
        """Numbers of the nodes ``tokens_K`` under ``parents_K``."""
        ...

    def path(
        self, num_positions: int, levels: int
    ) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.float16]]:
        """Rank and log-probability of the target's token at every position and level."""
        ...


@dataclass(slots=True)
class _Candidates:
    """Candidates of one depth at every position, ``[P, N]`` each."""

    parent: npt.NDArray[np.int64]
    token: npt.NDArray[np.int32]
    score: npt.NDArray[np.float32]
    num_eligible: int
    chain: npt.NDArray[np.int64]
    """[P] which candidate the greedy chain's node is; NO_SLOT where the chain has ended."""


@dataclass(slots=True)
class _Layers:
    """What each depth appends while the beam grows."""

    slot_child: list[npt.NDArray[np.int16]] = field(default_factory=list)
    child_logp: list[npt.NDArray[np.float16]] = field(default_factory=list)
    entropy: list[npt.NDArray[np.float16]] = field(default_factory=list)
    chain_logp: list[npt.NDArray[np.float16]] = field(default_factory=list)


def record_positions(
    nodes: Nodes, output: list[int], num_emitted: int, config: RecordConfig
) -> PositionArrays:
    """Record every position of one request.

    Args:
        nodes: of the draft over this output.
        output: the target's tokens, look-ahead included.
        num_emitted: tokens of the output proper, n; there are n - 1 positions.
        config: widths and levels.

    Returns:
        The request's arrays, with no positions where the output is one token.
    """
    roots = np.arange(num_emitted - 1)
    layers = _Layers()
    candidates = _root_candidates(nodes, roots, config)
    chain_P = roots
    layers.chain_logp.append(nodes.child_logp[roots, 0])
    for _ in range(config.levels - 1):
        candidates, chain_P = _expand_depth(nodes, candidates, layers, config)
        layers.chain_logp.append(_best_child(nodes, chain_P))
    while len(layers.chain_logp) < config.chain_levels:
        chain_P = _next_of_chain(nodes, chain_P)
        layers.chain_logp.append(_best_child(nodes, chain_P))
    rank, logp = nodes.path(len(roots), config.chain_levels)
    slots, width = config.num_slots, config.top_k
    return PositionArrays(
        tokens=np.array(output, dtype=np.int32),
        root_logp=nodes.child_logp[roots, : config.root_width],
        slot_child=_stacked(layers.slot_child, (len(roots), 0, slots), np.int16),
        child_logp=_stacked(layers.child_logp, (len(roots), 0, slots, width), np.float16),
        chain_logp=np.stack(layers.chain_logp, axis=1),
        path_rank=rank,
        path_logp=logp,
        root_entropy=nodes.entropy[roots],
        slot_entropy=_stacked(layers.entropy, (len(roots), 0, slots), np.float16),
    )


def _root_candidates(
    nodes: Nodes, roots: npt.NDArray[np.int64], config: RecordConfig
) -> _Candidates:
    width = config.root_width
    return _Candidates(
        parent=np.repeat(roots[:, None], width, axis=1),
        token=nodes.child_token[roots, :width],
        score=nodes.child_logp[roots, :width].astype(np.float32),
        num_eligible=width,
        chain=np.zeros(len(roots), dtype=np.int64),
    )


def _expand_depth(
    nodes: Nodes, candidates: _Candidates, layers: _Layers, config: RecordConfig
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
    node_PW[filled_PW] = nodes.reach(parent[filled_PW], token[filled_PW])
    score_PW = np.take_along_axis(candidates.score, chosen, axis=1)

    child_logp = nodes.child_logp[node_PW, : config.top_k].copy()
    child_logp[~filled_PW] = -np.inf
    layers.slot_child.append(slots_PW.astype(np.int16))
    layers.child_logp.append(child_logp)
    layers.entropy.append(np.where(filled_PW, nodes.entropy[node_PW], np.float16(0)))

    chain_P = chain_slot(slots_PW, candidates.chain)
    following = _slot_children(nodes, node_PW, child_logp, score_PW, config)
    following.chain = np.where(chain_P == NO_SLOT, NO_SLOT, chain_P * config.top_k)
    held_P = node_PW[np.arange(len(node_PW)), chain_P]
    return following, np.where(chain_P == NO_SLOT, _NOWHERE, held_P)


def _slot_children(
    nodes: Nodes,
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
        token=nodes.child_token[node_PW, :width].reshape(shape),
        score=score.reshape(shape),
        num_eligible=config.beam_width * width,
        chain=np.zeros(len(node_PW), dtype=np.int64),
    )


def _best_child(nodes: Nodes, chain_P: npt.NDArray[np.int64]) -> npt.NDArray[np.float16]:
    """Log-probability of the chain's next token, ``[P]``; -inf where the chain has ended."""
    return np.where(chain_P == _NOWHERE, np.float16(-np.inf), nodes.child_logp[chain_P, 0])


def _next_of_chain(nodes: Nodes, chain_P: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The best children of the chain's nodes, ``[P]``."""
    goes_on = _best_child(nodes, chain_P) > -np.inf
    following = np.full_like(chain_P, _NOWHERE)
    above = chain_P[goes_on]
    following[goes_on] = nodes.reach(above, nodes.child_token[above, 0])
    return following


def _stacked(
    layers: list[npt.NDArray[_T]], empty: tuple[int, ...], dtype: type[_T]
) -> npt.NDArray[_T]:
    """Layers along axis 1, or an array of no levels."""
    return np.stack(layers, axis=1) if layers else np.zeros(empty, dtype)
