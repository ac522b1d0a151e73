"""From options to a setting: trace, requests, cost model, context and budget per batch size."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from importlib.metadata import version

import numpy as np

from echo_policies.calibration import CalibrationSamples
from echo_policies.errors import InputError, UnknownNameError
from simulator.batch import RequestTable
from simulator.config import SimulationConfig
from simulator.cost import build_cost_model
from simulator.cost.choice import ROOFLINE, apply_choice, constants_of, parse_choice
from simulator.cost.constants import load, shipped_file
from simulator.cost.draws import draw_parameters
from simulator.cost.lookup import LookupCosts
from simulator.cost.pairs import resolve_pair
from simulator.cost.parameters import CostParameters
from simulator.cost.protocol import StepCosts
from simulator.workload import Stream
from traces.calibrate import calibration_samples
from traces.calibration_file import Calibration, load_calibration
from traces.library import open_trace
from traces.replay import ReplayTables, replay_tables
from traces.schema import Trace

RECORDED = "recorded"
"""``--target`` that costs the recorded pair itself."""


@dataclass(frozen=True, slots=True, eq=False)
class Setting:
    """What all runs of a simulation share."""

    config: SimulationConfig
    trace: Trace
    tables: ReplayTables
    requests: RequestTable
    evaluated: tuple[int, ...]
    calibration: tuple[int, ...]
    samples: CalibrationSamples | None
    """None where the trace has no calibration requests."""
    fitted: Calibration | None
    """The calibration file, where one was given."""
    cost: StepCosts
    is_what_if: bool

    @property
    def mean_context(self) -> int:
        """Tokens of context per request that k_max is chosen at."""
        if self.config.context is not None:
            return self.config.context
        chosen = list(self.evaluated)
        halfway = self.requests.prompt_tokens[chosen] + self.requests.num_tokens[chosen] / 2
        return int(np.mean(halfway))

    @property
    def context_label(self) -> str:
        """How context is charged, in words."""
        if self.config.context is not None:
            return f"{self.config.context} tokens per request"
        return f"as recorded (prompt and output so far; mean {self.mean_context} tokens)"

    def k_max(self, batch_size: int) -> tuple[int, str]:
        """Return the budget for a batch size, and how it was chosen."""
        if self.config.k_max is not None:
            return self.config.k_max, "given"
        factor = self.config.k_max_factor
        k_max = self.cost.knee_k_max(batch_size, self.mean_context, factor)
        return k_max, f"knee: t(k_max + B) <= {factor:g} t(B) at {self.mean_context} tokens"


def make_setting(config: SimulationConfig) -> Setting:
    """Load the trace and resolve every default.

    Raises:
        InputError: no such task, no evaluation requests, a model that does not fit.
        TraceError: the trace cannot be read.
    """
    trace = open_trace(config.trace)
    evaluated = _evaluated(trace, config)
    calibration = tuple(q for q in trace.split("calibration") if _has_positions(trace, q))
    cost, is_what_if = _cost(trace, config)
    setting = Setting(
        config=config,
        trace=trace,
        tables=replay_tables(trace),
        requests=RequestTable.of(trace),
        evaluated=evaluated,
        calibration=calibration,
        samples=calibration_samples(trace, calibration) if calibration else None,
        fitted=load_calibration(config.calibration) if config.calibration is not None else None,
        cost=cost,
        is_what_if=is_what_if,
    )
    for batch_size in config.batch_sizes:
        cost.fits(batch_size, setting.mean_context)
    return setting


def versions() -> dict[str, str]:
    """Versions that results depend on."""
    return {"python": platform.python_version()} | {
        name: version(name) for name in ("echo-spec", "torch", "numpy", "scipy", "simpy")
    }


def _has_positions(trace: Trace, request: int) -> bool:
    where = trace.positions(request)
    return int(where.stop) > int(where.start)


def _evaluated(trace: Trace, config: SimulationConfig) -> tuple[int, ...]:
    tasks = {info.task for info in trace.header.requests}
    if config.task is not None and config.task not in tasks:
        raise UnknownNameError(f"task in trace {trace.header.name!r}", config.task, tasks)
    chosen = trace.split("evaluation", config.task)
    evaluated = tuple(q for q in chosen if _has_positions(trace, q))
    if not evaluated:
        of_task = f" of task {config.task!r}" if config.task else ""
        raise InputError(
            f"Trace {trace.header.name!r} must hold evaluation requests{of_task} with at least two "
            "tokens; it has none. Record more requests, or choose another split."
        )
    return evaluated


def drawn_costs(setting: Setting) -> list[StepCosts]:
    """Return the cost model under constants drawn from their fit, one for each draw.

    Raises:
        InputError: the constants come without a covariance.
    """
    config = setting.config
    path = parse_choice(config.costs).path
    content = load(path) if path is not None else shipped_file()
    rng = Stream.COSTS.rng(config.seed)
    return [
        _cost(setting.trace, config, parameters)[0]
        for parameters in draw_parameters(content, config.cost_interval, rng)
    ]


def _cost(
    trace: Trace, config: SimulationConfig, drawn: CostParameters | None = None
) -> tuple[StepCosts, bool]:
    header = trace.header
    target = config.target or header.costing.target
    if target == RECORDED:
        target = header.recorded_as
        if not target:
            raise InputError(
                f"Trace {header.name!r} does not say what its own models cost; name a target of "
                "the catalogue instead of 'recorded'."
            )
    is_default = target == header.costing.target
    hardware = config.hardware or (header.costing.hardware if is_default else "h100")
    tp = config.tp if config.tp is not None else (header.costing.tp if is_default else 1)
    choice = parse_choice(config.costs)
    if config.cost_interval and choice.kind != ROOFLINE:
        raise InputError(
            f"cost_interval draws constants of the computed model; --costs {choice.kind} has none "
            "to draw. Leave one of the two out."
        )
    computed = build_cost_model(
        resolve_pair(target, config.draft),
        hardware,
        tp,
        pure_roofline=config.pure_roofline,
        check_s=config.check_ms / 1e3,
        engine=config.engine,
        dtype=config.dtype,
        ep=config.ep,
        parameters=drawn or constants_of(choice),
        scale=config.scale_costs,
    )
    # A synthetic trace stands for the target that it is costed as by default.
    own = header.recorded_as or header.costing.target
    chosen = apply_choice(choice, computed)
    if header.drafter == "prompt_lookup":
        chosen = LookupCosts(chosen)
    return chosen, target != own
