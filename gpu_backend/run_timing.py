"""What is timed before a run: the knee that ``k_max`` follows from, and what policies may weigh."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from echo_policies.api import DraftPlan, Policy
from echo_policies.session import widest_plan
from gpu_backend.bush_timer import NODES_PER_REQUEST, model_timer
from gpu_backend.knee import Knee, measure_knee
from gpu_backend.measured_costs import TIMED_UP_TO, MeasuredCosts, measure_costs
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
    if writes_costs or any(policy.scheduler.uses_costs for policy in policies):
        return _with_costs(
            config,
            pair,
            policies,
            workload,
            batch_size=batch_size,
            context=context,
            writes_costs=writes_costs,
        )
    if config.k_max is not None:
        return Timed(config.k_max, None, None, {})
    timer = model_timer(
        pair.target,
        batch_size,
        context,
        vocab_size=pair.vocab_size,
        clock=device_clock(pair.target.device),
        attention=config.attention,
    )
    knee = measure_knee(timer, config.k_max_factor)
    return Timed(knee.k_max, knee, None, {})


def _with_costs(
    config: ServeConfig,
    pair: ModelPair,
    policies: Sequence[Policy],
    workload: Workload,
    *,
    batch_size: int,
    context: int,
    writes_costs: bool,
) -> Timed:
    """Time costs, and find the knee among them where ``k_max`` is not given."""
    plans = [widest_plan(policy) for policy in policies]
    measure = partial(
        measure_costs,
        pair,
        batch_size=batch_size,
        most_nodes=_most_nodes(config, policies, plans),
        most_width=max(max(p.template.expanded) if p.template else p.width for p in plans),
        clock=device_clock(pair.target.device),
        attention=config.attention,
        up_to=max(TIMED_UP_TO, config.k_max_factor),
    )
    costs = measure(context=context)
    knee, k_max = None, config.k_max
    if k_max is None:
        knee = Knee.of(costs.verify, batch_size, config.k_max_factor)
        k_max = knee.k_max
    if not writes_costs:
        return Timed(k_max, knee, costs, {})
    shortest = min(len(request.prompt) for request in workload.requests)
    others = {shortest, workload.max_tokens} - {context}
    return Timed(k_max, knee, costs, {context: costs} | {n: measure(context=n) for n in others})


def _most_nodes(config: ServeConfig, policies: Sequence[Policy], plans: Sequence[DraftPlan]) -> int:
    """Nodes per request that are timed: what policies keep, or whatever may be the knee."""
    k_max = config.k_max
    if k_max is None:
        return NODES_PER_REQUEST[-1]
    runs = zip(policies, plans, strict=True)
    return max(kept_nodes(each, plan, k_max, caps_all=config.cap_all) for each, plan in runs)
