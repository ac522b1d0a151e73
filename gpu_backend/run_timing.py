"""What is timed before a run: the knee that ``k_max`` follows from, and what policies may weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from echo_policies.api import Policy
from echo_policies.session import widest_plan
from gpu_backend.knee import Knee, measure_knee
from gpu_backend.measured_costs import MeasuredCosts, measure_costs
from gpu_backend.serve_config import ServeConfig
from gpu_backend.serve_setup import Workload
from gpu_backend.serving import ModelPair, kept_nodes
from gpu_backend.stopwatch import device_clock


@dataclass(frozen=True, slots=True)
class Timed:
    """What a run is given."""

    k_max: int
    knee: Knee | None
    """None where ``k_max`` was given."""
    costs: MeasuredCosts | None
    """None where nobody asks for them."""
    by_context: Mapping[int, MeasuredCosts]
    """Costs at the shortest, the mean and the longest context; empty unless they are written."""


def time_run(
    config: ServeConfig,
    pair: ModelPair,
    policies: Sequence[Policy],
    workload: Workload,
    batch_size: int,
    *,
    writes_costs: bool = False,
) -> Timed:
    """Time forwards at a batch size, every request in the middle of its output.

    Args:
        config: the options.
        pair: the models.
        batch_size: requests, B.
        policies: of the run; costs are timed if one of them weighs costs.
        workload: its prompts say how long contexts are.
        writes_costs: time costs whoever asks, at several contexts.
    """
    context = int(workload.mean_prompt) + config.max_new_tokens // 2
    clock = device_clock(pair.target.device)
    knee = None
    if config.k_max is None:
        knee = measure_knee(
            pair.target,
            batch_size=batch_size,
            context=context,
            factor=config.k_max_factor,
            clock=clock,
            vocab_size=pair.vocab_size,
            attention=config.attention,
        )
    k_max = config.k_max if knee is None else knee.k_max
    assert k_max is not None, "given or measured"
    if not writes_costs and not any(policy.scheduler.uses_costs for policy in policies):
        return Timed(k_max, knee, None, {})
    plans = [(policy, widest_plan(policy)) for policy in policies]
    nodes = [kept_nodes(each, plan, k_max, caps_all=config.cap_all) for each, plan in plans]
    widths = [max(plan.template.expanded) if plan.template else plan.width for _, plan in plans]
    measure = partial(
        measure_costs,
        pair,
        batch_size=batch_size,
        most_nodes=max(nodes),
        most_width=max(widths),
        clock=clock,
        attention=config.attention,
    )
    costs = measure(context=context, knee=knee)
    if not writes_costs:
        return Timed(k_max, knee, costs, {})
    shortest = min(len(request.prompt) for request in workload.requests)
    others = {shortest, workload.max_tokens} - {context}
    return Timed(k_max, knee, costs, {context: costs} | {n: measure(context=n) for n in others})
