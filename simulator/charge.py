"""What a step costs: the engine charges, the policy never does.

- Depth 1 comes out of the draft-extend forward over the tokens committed since the last draft;
  depths 2 .. levels are draft layers.
- A layer has a fixed shape, as a captured graph has: every live request's full width is charged,
  whether or not its entries are masked.
- Verification is charged by R = K + B rows (ragged), or, where the engine pads, by B rows for
  each node of the widest tree and for the root.
- The policy's own operations are counted (``simulator/policy_ops.py``) and charged each; plain
  decoding has none. The kept nodes are packed into the verify batch, and the accepted rows of a
  tree are moved into place; a chain's lie there already.
- Staged mode pays a sync per check and saves the layers behind the last one; masked mode pays for
  every planned level and for no check.
"""

from __future__ import annotations

from dataclasses import dataclass

from echo_policies.session import Decision
from simulator.cost.protocol import StepCosts
from traces.records import StepTimes


@dataclass(frozen=True, slots=True)
class StepLoad:
    """Host numbers of one batch step that its cost depends on."""

    live: int
    kv_tokens: int
    """Committed tokens of all live requests."""
    behind_tokens: int
    """Tokens that the draft model must read before it can draft."""
    verified: int
    """Candidate nodes that the verify forward runs: K, or more where trees are padded."""
    accepted: int
    """Draft tokens that the target accepted, over the batch."""
    ops: int
    """Operations of the policy's own code."""


@dataclass(frozen=True, slots=True)
class PresentCosts:
    """What a policy may know of costs at the present batch and context (a CostView)."""

    cost: StepCosts
    live: int
    kv_tokens: int

    def verify_s(self, rows: int) -> float:
        """Seconds of a verify forward over ``rows`` tokens."""
        return self.cost.verify_s(rows, self.live, self.kv_tokens)

    def draft_layer_s(self, rows: int) -> float:
        """Seconds of one draft layer over ``rows`` frontier nodes."""
        return self.cost.draft_layer_s(rows, self.live, self.kv_tokens)


def charge(cost: StepCosts, decision: Decision, load: StepLoad) -> StepTimes:
    """Return the seconds of a step, by part."""
    rows = load.verified + load.live
    verify_s = cost.verify_s(rows, load.live, load.kv_tokens)
    select_s = cost.select_s(load.ops)
    if decision.levels == 0:
        return StepTimes(select_s=select_s, verify_s=verify_s, host_s=cost.host_s(0))
    is_tree = not decision.plan.is_chain
    return StepTimes(
        draft_s=_draft_s(cost, decision, load),
        check_s=decision.checks * cost.check_s,
        select_s=select_s,
        pack_s=cost.pack_s(rows, load.live),
        verify_s=verify_s,
        compact_s=cost.compact_s(load.accepted) if is_tree else 0.0,
        host_s=cost.host_s(decision.levels, is_tree=is_tree),
    )


def _draft_s(cost: StepCosts, decision: Decision, load: StepLoad) -> float:
    levels = decision.levels
    seconds = cost.draft_extend_s(load.behind_tokens, load.live, load.kv_tokens)
    template = decision.plan.template
    if template is None:
        rows = load.live * decision.plan.width
        return seconds + (levels - 1) * cost.draft_layer_s(rows, load.live, load.kv_tokens)
    for nodes in template.expanded[1:levels]:
        seconds += cost.draft_layer_s(load.live * nodes, load.live, load.kv_tokens)
    return seconds
