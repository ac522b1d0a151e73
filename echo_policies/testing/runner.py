"""Runs every check on a policy and collects minimal counterexamples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from hypothesis import HealthCheck, Phase, given, settings

from echo_policies.api import CalibrationContext, Policy
from echo_policies.calibration import CalibrationSamples
from echo_policies.errors import InputError
from echo_policies.session import open_session
from echo_policies.testing.checks import CHECKS, Check
from echo_policies.testing.drafter import SyntheticDrafter
from echo_policies.testing.strategies import Situation, situations

STAND_IN = "calibrated on random samples"
"""Note of results whose policy came without parameters of its own."""

_LEVELS = 16


@dataclass(frozen=True, slots=True)
class CheckResult:
    """What one check found."""

    check: str
    status: Literal["passed", "failed"]
    error: str = ""
    """The broken rule and the smallest situation that breaks it."""
    note: str = ""
    """Said of the policy, such as that its thresholds are stand-ins."""


def run_checks(
    policy: Policy, *, max_examples: int = 100, checks: tuple[str, ...] = tuple(CHECKS)
) -> list[CheckResult]:
    """Check a policy against the contract.

    Args:
        policy: calibrated or not; an uncalibrated one is calibrated on random samples.
        max_examples: situations per check; the same ones in every call.
        checks: names out of :data:`~echo_policies.testing.checks.CHECKS`.

    Returns:
        One result per check, or a single failed one named ``opens`` where it cannot run at all.
    """
    note = ""
    try:
        if not policy.is_calibrated:
            note = STAND_IN
            policy = with_stand_ins(policy)
        open_session(policy, SyntheticDrafter(torch.zeros(1, dtype=torch.int64)))
    except Exception as error:  # whatever a stranger's policy raises is the result
        return [CheckResult("opens", "failed", _in_words(error), note)]
    return [_run(name, CHECKS[name], policy, max_examples, note) for name in checks]


def with_stand_ins(policy: Policy) -> Policy:
    """Return the policy calibrated on random samples in which confidence tells something.

    Raises:
        InputError: calibration left a parameter open.
    """
    rng = np.random.default_rng(0)
    log_c_ND = np.cumsum(-rng.exponential(0.3, (400, _LEVELS)), axis=1)
    accepted_ND = np.cumprod(rng.random(log_c_ND.shape) < np.exp(log_c_ND * 0.3), axis=1) > 0
    reached_ND = np.ones_like(accepted_ND)
    reached_ND[:, 1:] = accepted_ND[:, :-1]
    samples = CalibrationSamples(log_c_ND, reached_ND, accepted_ND, np.arange(400) // 10)
    fitted = policy.calibrate(samples, CalibrationContext(batch_size=4, k_max=16))
    if not fitted.is_calibrated:
        raise InputError(f"Calibration leaves a parameter of {policy.name!r} open.")
    return fitted


def _run(name: str, check: Check, policy: Policy, max_examples: int, note: str) -> CheckResult:
    failures: list[tuple[Situation, Exception]] = []

    @settings(
        max_examples=max_examples,
        deadline=None,
        database=None,
        derandomize=True,
        report_multiple_bugs=False,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )
    @given(situation=situations())
    def holds(situation: Situation) -> None:
        try:
            check(policy, situation)
        except Exception as error:
            failures.append((situation, error))
            raise

    try:
        holds()
    except Exception:
        if not failures:
            raise  # not the policy's fault
        # After shrinking, the last one is the smallest; a policy that fails only now and then
        # cannot be shrunk, and any of its failures will do.
        situation, error = failures[-1]
        text = f"{_in_words(error)}\n{_describe(situation)}"
        return CheckResult(name, "failed", text, note)
    return CheckResult(name, "passed", "", note)


def _in_words(error: Exception) -> str:
    text = str(error).split("\nassert ", maxsplit=1)[0]
    return text if type(error) is AssertionError else f"{type(error).__name__}: {text}"


def _describe(it: Situation) -> str:
    rows = [
        f"slot {n}: " + (f"request {s.seed}, {s.remaining} tokens left" if s.live else "idle")
        for n, s in enumerate(it.slots)
    ]
    ground = f"rounded to {it.ground.grain}" if it.ground.grain else "unrounded"
    ragged = ", some children absent" if it.ground.is_ragged else ""
    return (
        f"smallest case: k_max {it.k_max}, step {it.step}, {it.steps} step(s), scores {ground}"
        f"{ragged}; " + "; ".join(rows)
    )
