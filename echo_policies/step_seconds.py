"""What parts of a step take by a cost view: host numbers."""

from __future__ import annotations

import math

from echo_policies.views import CostView, DraftPlan


def draft_s(costs: CostView, plan: DraftPlan, layers: float, live: int) -> float:
    """Seconds of so many draft layers: the roots', then those of full frontiers.

    Args:
        costs: seconds of one layer.
        plan: how wide the frontiers are.
        layers: that run; of a running mean it need not be whole.
        live: requests in the batch.
    """
    if layers <= 0:
        return 0.0
    width = plan.width
    if plan.template is not None and plan.template.levels > 1:
        expanded = plan.template.expanded[1:]
        width = math.ceil(sum(expanded) / len(expanded))
    first_s = costs.draft_layer_s(live)
    if layers <= 1:
        return layers * first_s
    return first_s + (layers - 1) * costs.draft_layer_s(live * width)
