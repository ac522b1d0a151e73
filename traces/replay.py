"""Exact counterfactual replay: a recording plays the drafter and the verifier for any policy.

A policy sees exactly the children of the nodes it expanded. Acceptance is decided by the target
path, which never is in a view: a chosen node is accepted iff it lies on it. A node that the wide
recorded beam did not expand has no known children: it is counted as *unrevealed*, and results are
a bracket between no children there and the target path visible there.

Shape letters: P positions, D levels, S slots, k children per node, C path levels, B requests,
F frontier nodes, W candidates of a layer.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from echo_policies.api import DraftPlan, Frontier, LayerView
from echo_policies.forest import Forest, count_true
from echo_policies.template import RankTemplate
from traces.lookup_plans import lookup_objection
from traces.schema import NO_SLOT, Trace

SLOT_AXIS: Final = 2
"""Axis of the slots in the arrays of a trace."""


@dataclass(frozen=True, slots=True, eq=False)
class ReplayTables:
    """A trace's arrays as tensors, laid out for look-up by position.

    A spare slot stands for every node that the recording did not expand: it has no children.
    """

    root_logp_PR: Tensor
    """float32 [P, R]"""
    child_logp_Xk: Tensor
    """float16 [P * (D - 1) * (S + 1), k]; -inf in the spare slot."""
    slot_of_X: Tensor
    """int8 [P * (D - 1) * slot_columns]: slot of every candidate, S where it has none."""
    path_rank_CP: Tensor
    """int32 [C, P]"""
    path_logp_CP: Tensor
    """float32 [C, P]"""
    chain_exists_CP: Tensor | None
    """bool [C, P]: the greedy chain reaches this depth; None for a model, which never ends."""
    root_entropy_P: Tensor | None
    slot_entropy_X: Tensor | None
    levels: int
    slots: int
    """Recorded slots per depth, S."""
    top_k: int
    root_width: int
    slot_columns: int
    """Candidates of a depth, those of the spare slot's included."""

    @property
    def expansions(self) -> int:
        """Recorded expansions below the root, D - 1."""
        return self.levels - 1

    @property
    def chain_levels(self) -> int:
        """Levels of the target path, C."""
        return int(self.path_rank_CP.shape[0])


@dataclass(frozen=True, slots=True, eq=False)
class BeamArrays:
    """The recorded arrays that replay needs, as in :class:`traces.schema.TraceArrays`."""

    root_logp: npt.NDArray[np.float16]
    slot_child: npt.NDArray[np.int16]
    child_logp: npt.NDArray[np.float16]
    path_rank: npt.NDArray[np.int32]
    path_logp: npt.NDArray[np.float16]
    root_entropy: npt.NDArray[np.float16] | None = None
    slot_entropy: npt.NDArray[np.float16] | None = None
    chain_logp: npt.NDArray[np.float16] | None = None
    """Only of a drafter whose greedy chain can end."""


def replay_tables(trace: Trace) -> ReplayTables:
    """Lay a trace out for replay; copies, so the trace stays untouched."""
    names = {field.name for field in fields(BeamArrays)}
    if trace.header.drafter != "prompt_lookup":
        names.remove("chain_logp")
    return beam_tables(BeamArrays(**{name: getattr(trace.arrays, name) for name in names}))


def beam_tables(arrays: BeamArrays) -> ReplayTables:
    """Lay recorded beams out for replay; copies."""
    _, expansions, slots, top_k = arrays.child_logp.shape
    root_width = arrays.root_logp.shape[1]
    chain = arrays.chain_logp
    columns = max(root_width, (slots + 1) * top_k)
    has_entropy = arrays.root_entropy is not None and arrays.slot_entropy is not None
    return ReplayTables(
        root_logp_PR=_tensor(arrays.root_logp).float(),
        child_logp_Xk=_tensor(_with_spare(arrays.child_logp, -np.inf)).view(-1, top_k),
        slot_of_X=_tensor(_slot_of(arrays.slot_child, columns)),
        path_rank_CP=_tensor(arrays.path_rank.T),
        path_logp_CP=_tensor(arrays.path_logp.T).float(),
        chain_exists_CP=None if chain is None else _tensor(~np.isneginf(chain.T)),
        root_entropy_P=_tensor(arrays.root_entropy).float() if has_entropy else None,
        slot_entropy_X=(
            _tensor(_with_spare(arrays.slot_entropy, 0)).float().view(-1) if has_entropy else None
        ),
        levels=expansions + 1,
        slots=slots,
        top_k=top_k,
        root_width=root_width,
        slot_columns=columns,
    )


def _tensor(array: npt.NDArray[Any] | None) -> Tensor:
    return torch.from_numpy(np.array(array, order="C"))


def _with_spare(array: npt.NDArray[Any] | None, value: float) -> npt.NDArray[Any]:
    """Append a slot that holds ``value`` to an array [P, D - 1, S, ...]."""
    assert array is not None, "the caller knows that it was recorded"
    widths = [(0, int(axis == SLOT_AXIS)) for axis in range(array.ndim)]
    return np.pad(array, widths, constant_values=value)


def _slot_of(slot_child: npt.NDArray[np.int16], columns: int) -> npt.NDArray[np.int8]:
    """Invert ``slot_child`` [P, D - 1, S]: int8 [P * (D - 1) * columns]."""
    slots = slot_child.shape[SLOT_AXIS]
    rows = slot_child.reshape(-1, slots).astype(np.int64)
    table = np.full((len(rows), columns + 1), slots, dtype=np.int8)
    # Empty slots write into a column that is cut off.
    where = np.where(rows == NO_SLOT, columns, rows)
    np.put_along_axis(table, where, np.arange(slots, dtype=np.int8)[None, :], axis=1)
    return np.ascontiguousarray(table[:, :columns]).reshape(-1)


class RecordedDrafter:
    """Plays back what the draft model proposed at the batch's positions.

    - :meth:`seek` says where each request is; then a session drives one step.
    - ``unrevealed_B`` counts, after the step, nodes whose children nobody knows.
    """

    def __init__(
        self, tables: ReplayTables, *, reveals_path: bool = False, gives_entropy: bool = False
    ) -> None:
        """Bind the tables.

        Args:
            tables: the recording.
            reveals_path: at unrevealed nodes show the target path's child (upper bracket)
                instead of nothing (lower bracket).
            gives_entropy: fill the views' entropies; only needed by policies that ask for them.
        """
        self._tables = tables
        self._reveals_path = reveals_path
        self._gives_entropy = gives_entropy and tables.root_entropy_P is not None
        self._ranks = torch.arange(tables.root_width + tables.top_k, dtype=torch.int32)
        self._position_B = torch.zeros(0, dtype=torch.int64)
        self._plan = DraftPlan(levels=0)
        self._on_path: list[Tensor] = []
        self._slot_BF = torch.zeros(0, dtype=torch.int64)
        self.unrevealed_B = torch.zeros(0, dtype=torch.int64)

    @property
    def signals(self) -> frozenset[str]:
        """Ranks and path log-probabilities; entropies where they were recorded."""
        given = {"ranks", "path_logp"}
        if self._tables.root_entropy_P is not None:
            given.add("entropy")
        return frozenset(given)

    def objection(self, plan: DraftPlan) -> str | None:
        """Say why the recording cannot serve a plan, if it cannot."""
        tables = self._tables
        limit = tables.chain_levels if plan.template is not None else tables.levels
        if plan.levels > limit:
            return f"drafts {plan.levels} levels, but the recording has {limit}; lower its levels"
        if tables.chain_exists_CP is not None and lookup_objection(plan) is not None:
            return lookup_objection(plan)
        if plan.template is None and plan.top_k > tables.top_k:
            return (
                f"reveals {plan.top_k} children per node, but the recording has {tables.top_k}; "
                "lower its top_k"
            )
        return None

    def seek(self, position_B: Tensor) -> None:
        """Place every request at a position (int64 [B], any valid one for idle slots)."""
        self._position_B = position_B
        self._on_path = []
        self.unrevealed_B = torch.zeros_like(position_B)

    def begin(self, plan: DraftPlan, drafting_B: Tensor) -> LayerView:
        """Return the root's children."""
        self._plan = plan
        if plan.template is not None:
            return self._template_layer(plan.template, 1, drafting_B[:, None])
        tables, position_B = self._tables, self._position_B
        logp_BW = tables.root_logp_PR.index_select(0, position_B)[:, : plan.top_k]
        logp_BW = logp_BW.masked_fill(~drafting_B[:, None], -torch.inf)
        exists_BW = logp_BW > -torch.inf
        self._on_path.append((self._path_rank(1) == self._ranks[: logp_BW.shape[1]]) & exists_BW)
        self._slot_BF = torch.zeros_like(position_B)[:, None]
        entropy_BF = None
        if self._gives_entropy:
            assert tables.root_entropy_P is not None, "checked when the drafter was made"
            entropy_BF = tables.root_entropy_P[position_B][:, None]
        return LayerView(1, exists_BW, None, logp_BW, is_sorted=True, entropy_BF=entropy_BF)

    def expand(self, layer: LayerView, frontier: Frontier) -> LayerView:
        """Return the children of the frontier's nodes, as far as they were recorded."""
        if self._plan.template is not None:
            return self._expand_template(self._plan.template, layer, frontier)
        depth, top_k = layer.depth, self._plan.top_k
        index_BF, mask_BF = frontier.index_BF, frontier.mask_BF
        row_B1 = (self._position_B * self._tables.expansions + (depth - 1))[:, None]
        self._slot_BF = self._find_slots(row_B1, index_BF, depth)
        is_hidden_BF = (self._slot_BF == self._tables.slots) & mask_BF
        self.unrevealed_B = self.unrevealed_B + count_true(is_hidden_BF)
        on_BF = self._on_path[-1].gather(1, index_BF) & mask_BF
        is_path_BFk = (self._path_rank(depth + 1) == self._ranks[:top_k])[:, None] & on_BF[
            ..., None
        ]
        entry_BF = row_B1 * (self._tables.slots + 1) + self._slot_BF
        cond_BFk = self._children(entry_BF)
        if self._reveals_path:
            path_logp_B = self._tables.path_logp_CP[depth].index_select(0, self._position_B)
            shown_BFk = is_path_BFk & is_hidden_BF[..., None]
            cond_BFk = torch.where(shown_BFk, path_logp_B[:, None, None], cond_BFk)
        base_BF = layer.scores_BW.gather(1, index_BF).masked_fill_(~mask_BF, -torch.inf)
        logp_BW = (cond_BFk + base_BF[..., None]).flatten(1)
        exists_BW = logp_BW > -torch.inf
        self._on_path.append(is_path_BFk.flatten(1) & exists_BW)
        return LayerView(
            depth + 1,
            exists_BW,
            index_BF[..., None].expand(-1, -1, top_k).flatten(1),
            logp_BW,
            is_sorted=index_BF.shape[1] == 1 and not self._reveals_path,
            entropy_BF=self._entropy(entry_BF, mask_BF),
        )

    def on_path(self) -> Tensor:
        """bool [B, N]: candidates of the step that lie on the target path (for the verifier)."""
        return torch.cat(self._on_path, dim=1)

    def on_path_layer(self) -> Tensor:
        """bool [B, W]: candidates of the newest layer that lie on the target path."""
        return self._on_path[-1]

    def _path_rank(self, depth: int) -> Tensor:
        """int32 [B, 1]: rank of the target's token at a depth."""
        return self._tables.path_rank_CP[depth - 1].index_select(0, self._position_B)[:, None]

    def _find_slots(self, row_B1: Tensor, index_BF: Tensor, depth: int) -> Tensor:
        """int64 [B, F]: slot at ``depth`` of candidates of that depth; the spare one if unknown."""
        tables, top_k = self._tables, self._plan.top_k
        if depth > 1:
            parent_BF = self._slot_BF.gather(1, index_BF // top_k)
            index_BF = parent_BF * tables.top_k + index_BF % top_k
        return tables.slot_of_X.take(row_B1 * tables.slot_columns + index_BF).long()

    def _children(self, entry_BF: Tensor) -> Tensor:
        """float32 [B, F, k]: conditional log-probabilities of the children of recorded nodes."""
        rows = self._tables.child_logp_Xk.index_select(0, entry_BF.flatten())
        return rows.view(*entry_BF.shape, -1)[..., : self._plan.top_k].float()

    def _entropy(self, entry_BF: Tensor, mask_BF: Tensor) -> Tensor | None:
        if not self._gives_entropy:
            return None
        assert self._tables.slot_entropy_X is not None, "checked when the drafter was made"
        return self._tables.slot_entropy_X.take(entry_BF).masked_fill_(~mask_BF, 0.0)

    def _template_layer(self, tree: RankTemplate, depth: int, exists_BW: Tensor) -> LayerView:
        where = tree.layers[depth - 1]
        exists_BW = exists_BW.expand(-1, where.stop - where.start)
        if self._tables.chain_exists_CP is not None:
            reached_CP = self._tables.chain_exists_CP
            exists_BW = exists_BW & reached_CP[depth - 1].index_select(0, self._position_B)[:, None]
        ranks_W = torch.tensor(tree.ranks[where], dtype=torch.int32)
        on_BW = (self._path_rank(depth) == ranks_W) & exists_BW
        parent_BW = None
        if depth > 1:
            parents_W = tree.parents_in_layer(depth, exists_BW.device)
            parent_BW = parents_W.expand(exists_BW.shape[0], -1)
            on_BW = on_BW & self._on_path[-1][:, parents_W]
        self._on_path.append(on_BW)
        return LayerView(depth, exists_BW, parent_BW, None)

    def _expand_template(
        self, tree: RankTemplate, layer: LayerView, frontier: Frontier
    ) -> LayerView:
        expanded_BW = torch.zeros_like(layer.exists_BW)
        expanded_BW = expanded_BW.scatter(1, frontier.index_BF, frontier.mask_BF)
        parents_W = tree.parents_in_layer(layer.depth + 1, expanded_BW.device)
        return self._template_layer(tree, layer.depth + 1, expanded_BW[:, parents_W])


class RecordedVerifier:
    """Accepts exactly the kept nodes that lie on the target path."""

    def __init__(self, drafter: RecordedDrafter) -> None:
        """Bind the drafter that knows which candidates are on the path."""
        self._drafter = drafter

    def verify(self, forest: Forest, keep_BN: Tensor) -> Tensor:
        """int64 [B]: accepted tokens; a plan is closed, so kept path nodes start the path."""
        if not forest.layers:
            return torch.zeros(keep_BN.shape[0], dtype=torch.int64)
        return (keep_BN & self._drafter.on_path()).sum(1)
