"""Fit policies on the calibration requests of a trace: what ``simulate calibrate`` does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from echo_policies.calibration import depth_reports
from echo_policies.errors import InputError
from echo_policies.registry import parse_list
from simulator.config import make_config
from simulator.run import calibrated
from simulator.setting import make_setting
from traces.calibration_file import Calibration, FittedPolicy


def calibrate(
    policies: Sequence[str],
    *,
    batch_sizes: Sequence[int] | None = None,
    seed: int = 0,
    **options: Any,
) -> Calibration:
    """Fit policies on the calibration requests of a trace.

    Args:
        policies: specifications; those with nothing to fit are left out.
        batch_sizes: batch sizes that ``w_topk`` is chosen for.
        seed: seed of the intervals and of the request order.
        **options: further fields of :class:`simulator.config.SimulationConfig`.

    Raises:
        InputError: the trace has no calibration requests, or no policy needs any.
    """
    chosen = [policy for policy in parse_list(policies) if not policy.is_calibrated]
    if not chosen:
        raise InputError("None of these policies has anything to calibrate; try echo.")
    names = tuple(policy.name for policy in chosen)
    config = make_config(policies=names, batch_sizes=batch_sizes, seed=seed, **options)
    setting = make_setting(config)
    if setting.samples is None:
        raise InputError(f"Trace {setting.trace.header.name!r} has no calibration requests.")
    entries = []
    for batch_size in config.batch_sizes:
        k_max, _ = setting.k_max(batch_size)
        for policy in chosen:
            fitted = calibrated(setting, policy, batch_size, k_max)
            entries.append(
                FittedPolicy(
                    policy=policy.name,
                    batch_size=batch_size,
                    k_max=k_max,
                    gate=fitted.gate.model_dump(mode="json"),
                    scheduler=fitted.scheduler.model_dump(mode="json"),
                )
            )
    return Calibration(
        trace=setting.trace.header.name,
        trace_digest=setting.trace.digest,
        costed_as=setting.cost.label,
        requests=len(setting.calibration),
        depths=tuple(depth_reports(setting.samples, rng=np.random.default_rng(seed))),
        policies=tuple(entries),
    )
