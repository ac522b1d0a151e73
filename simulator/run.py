"""Run policies over batch sizes and put the result together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any, Final

import joblib
import numpy as np

from echo_policies.api import CalibrationContext, Policy
from echo_policies.errors import InputError
from echo_policies.presets import autoregressive
from echo_policies.registry import parse_list
from echo_policies.session import open_session, widest_plan
from simulator.config import SimulationConfig, make_config
from simulator.engine import Engine, EngineOptions
from simulator.policy_ops import policy_meter
from simulator.results import BatchResult, OrderFlip, Result, Row, TaskRow
from simulator.setting import Setting, drawn_costs, make_setting, versions
from simulator.workload import Stream, poisson_gaps, request_cycle
from traces.metrics import summarise
from traces.records import RunRecords
from traces.replay import RecordedDrafter
from traces.stats import speedup_interval, steadiness

Progress = Callable[[str, int, int], None]
"""Called with what runs, requests finished and requests to finish."""

REQUESTS_PER_SLOT: Final = 2
"""Requests measured per slot, at least."""


def simulate(
    policies: str | Policy | Sequence[str | Policy] = ("echo",),
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Result:
    """Replay policies on a recording; see :func:`simulator.simulate`."""
    given = [policies] if isinstance(policies, str | Policy) else list(policies)
    names = tuple(policy.name for policy in _policies(given))
    config = make_config(policies=names, **options)
    setting = make_setting(config)
    batches = _run_batches(setting, given, progress or (lambda *_: None))
    return Result(
        config=config,
        trace=setting.trace.header,
        trace_digest=setting.trace.digest,
        evaluated_requests=setting.evaluated,
        calibration_requests=setting.calibration,
        cost=setting.cost.describe(),
        cost_label=setting.cost.label,
        context_label=setting.context_label,
        is_what_if=setting.is_what_if,
        versions=versions(),
        batches=tuple(batches),
    )


def _run_batches(
    setting: Setting, given: Sequence[str | Policy], progress: Progress
) -> list[BatchResult]:
    """Run every batch size; with several jobs, in processes of their own."""
    sizes = list(dict.fromkeys(setting.config.batch_sizes))
    if setting.config.jobs == 1:
        return [_run_batch(setting, given, size, progress) for size in sizes]
    # Specifications travel, not policy objects: a policy file is no module that a process knows.
    tasks = (joblib.delayed(_run_batch)(setting, given, size, _silent) for size in sizes)
    results = []
    for result in joblib.Parallel(setting.config.jobs, return_as="generator")(tasks):
        results.append(result)
        progress("batch sizes", len(results), len(sizes))
    return results


def _silent(label: str, done: int, total: int) -> None:
    """Show no progress, in a process without a terminal."""


def _policies(given: Sequence[str | Policy]) -> list[Policy]:
    """Parse specifications, keep objects, and put plain decoding first."""
    chosen: list[Policy] = []
    for entry in given:
        chosen.extend([entry] if isinstance(entry, Policy) else parse_list([entry]))
    named = {policy.name: policy for policy in (autoregressive(), *chosen)}
    for policy in chosen:
        if policy != named[policy.name]:
            raise InputError(
                f"Policies must have names of their own; two different ones are called "
                f"{policy.name!r}. Give one of them another name."
            )
    return list(named.values())


def calibrated(setting: Setting, policy: Policy, batch_size: int, k_max: int) -> Policy:
    """Fit a policy on the calibration requests, for the batch at hand.

    Raises:
        InputError: it needs calibration and the trace has no calibration requests.
    """
    if policy.is_calibrated:
        return policy
    if setting.fitted is not None:
        return setting.fitted.apply(policy, batch_size)
    if setting.samples is None:
        raise InputError(
            f"Policy {policy.name!r} must be calibrated, but trace "
            f"{setting.trace.header.name!r} has no calibration requests; give --calibration."
        )

    def tokens_per_second(candidate: Policy) -> float:
        requests = max(len(setting.calibration), batch_size // 2)
        run = SimulationRun(setting, candidate, batch_size, k_max, setting.calibration, requests)
        return summarise(run.records("lower")).tokens_per_s

    return policy.calibrate(
        setting.samples, CalibrationContext(batch_size, k_max, tokens_per_second)
    )


@dataclass(frozen=True, slots=True)
class SimulationRun:
    """One policy at one batch size on some requests."""

    setting: Setting
    policy: Policy
    batch_size: int
    k_max: int
    served: tuple[int, ...]
    measured_requests: int
    on_request: Callable[[], None] | None = None

    def records(self, bracket: str) -> RunRecords:
        """Simulate; ``bracket`` says what unrevealed nodes show."""
        setting, config = self.setting, self.setting.config
        drafter = RecordedDrafter(
            setting.tables,
            reveals_path=bracket == "upper",
            gives_entropy="entropy" in self.policy.needs,
        )
        session = open_session(
            self.policy, drafter, is_staged=config.mode == "staged", caps_all=config.cap_all
        )
        return Engine(
            session=session,
            drafter=drafter,
            cost=setting.cost,
            meter=policy_meter(
                self.policy,
                setting.tables,
                is_staged=config.mode == "staged",
                caps_all=config.cap_all,
            ),
            table=setting.requests,
            options=EngineOptions(
                num_slots=self.batch_size,
                k_max=self.k_max,
                context=config.context,
                measured_requests=self.measured_requests,
                pads_verify=config.verify == "padded",
                drafts=widest_plan(self.policy).levels > 0,
            ),
            stream=request_cycle(self.served, Stream.ORDER.rng(config.seed)),
            rng=Stream.START.rng(config.seed),
            gaps=(
                poisson_gaps(config.rate, Stream.ARRIVE.rng(config.seed))
                if config.rate is not None
                else None
            ),
            on_request=self.on_request,
        ).run()


def simulation_run(
    setting: Setting,
    policy: Policy,
    batch_size: int,
    k_max: int,
    on_request: Callable[[], None] | None = None,
) -> SimulationRun:
    """Set up the measured run of a calibrated policy on the evaluation requests."""
    requests = measured_requests(setting.config, len(setting.evaluated), batch_size)
    return SimulationRun(
        setting, policy, batch_size, k_max, setting.evaluated, requests, on_request
    )


def measured_requests(config: SimulationConfig, num_evaluated: int, batch_size: int) -> int:
    """Requests to finish: as asked, or whole cycles of at least two requests per slot."""
    if config.requests is not None:
        return config.requests
    cycles = max(1, -(-REQUESTS_PER_SLOT * batch_size // num_evaluated))
    return cycles * num_evaluated


def _run_batch(
    setting: Setting, given: Sequence[str | Policy], batch_size: int, progress: Progress
) -> BatchResult:
    k_max, rule = setting.k_max(batch_size)
    requests = measured_requests(setting.config, len(setting.evaluated), batch_size)
    rows: list[Row] = []
    runs: list[SimulationRun] = []
    plain: RunRecords | None = None
    for policy in _policies(given):
        fitted = calibrated(setting, policy, batch_size, k_max)
        done = _counter(f"{policy.name} at batch {batch_size}", requests, progress)
        run = simulation_run(setting, fitted, batch_size, k_max, done)
        again = replace(run, on_request=None)
        runs.append(again)
        bracket = setting.config.unrevealed
        records = run.records("upper" if bracket == "upper" else "lower")
        plain = plain or records
        upper = None
        if bracket == "both" and records.unrevealed_SB.any():
            upper = summarise(again.records("upper")).tokens_per_s
        rows.append(_row(setting, fitted, records, plain, upper=upper))
    result = BatchResult(batch_size=batch_size, k_max=k_max, k_max_rule=rule, rows=tuple(rows))
    return _with_cost_draws(setting, result, runs) if setting.config.cost_interval else result


def _with_cost_draws(
    setting: Setting, result: BatchResult, runs: Sequence[SimulationRun]
) -> BatchResult:
    """Run again under drawn cost constants: requests, k_max and calibration stay, costs differ."""
    bracket = "upper" if setting.config.unrevealed == "upper" else "lower"
    rate_DR = np.array(
        [
            [
                summarise(
                    replace(run, setting=replace(setting, cost=cost)).records(bracket)
                ).tokens_per_s
                for run in runs
            ]
            for cost in drawn_costs(setting)
        ]
    )
    low_R, high_R = np.quantile(rate_DR, (0.025, 0.975), axis=0)
    rows = tuple(
        row.model_copy(update={"cost_tokens_per_s": (float(low), float(high))})
        for row, low, high in zip(result.rows, low_R, high_R, strict=True)
    )
    order = np.argsort([-row.summary.tokens_per_s for row in rows], kind="stable").tolist()
    flips = tuple(
        OrderFlip(faster=rows[one].policy, slower=rows[other].policy, share=share)
        for one, other in combinations(order, 2)
        if (share := float(np.mean(rate_DR[:, one] < rate_DR[:, other]))) > 0.0
    )
    return result.model_copy(update={"rows": rows, "order_flips": flips})


def _counter(label: str, total: int, progress: Progress) -> Callable[[], None]:
    done = 0

    def count() -> None:
        nonlocal done
        done += 1
        progress(label, done, total)

    progress(label, 0, total)
    return count


def _row(
    setting: Setting,
    fitted: Policy,
    records: RunRecords,
    plain: RunRecords,
    *,
    upper: float | None,
) -> Row:
    sources = [info.source for info in setting.trace.header.requests]
    return Row(
        policy=fitted.name,
        parameters=dict(fitted.parameters()),
        summary=summarise(records),
        speedup=speedup_interval(records, plain, sources, Stream.RESAMPLE.rng(setting.config.seed)),
        steadiness=steadiness(records),
        upper_tokens_per_s=upper,
        tasks=_task_rows(setting, records, plain) if setting.config.by_task else (),
    )


def _task_rows(setting: Setting, records: RunRecords, plain: RunRecords) -> tuple[TaskRow, ...]:
    infos = setting.trace.header.requests
    rows = []
    for task in sorted({infos[q].task for q in setting.evaluated}):
        of_task = np.array([info.task == task for info in infos])
        keep_SB = records.live_SB & of_task[records.request_SB]
        rows.append(
            TaskRow(
                task=task,
                summary=summarise(records, keep_SB),
                speedup=speedup_interval(
                    records,
                    plain,
                    [info.source for info in infos],
                    Stream.RESAMPLE.rng(setting.config.seed),
                    np.flatnonzero(of_task),
                ),
            )
        )
    return tuple(rows)
