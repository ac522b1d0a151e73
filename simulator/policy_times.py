"""What a policy's own code takes here: operations per step, and their time on this machine.

The count is what the simulator charges (``simulator/policy_ops.py``); the time shows what one
operation costs on the device at hand, for ``policy_op_us`` of a file of constants.
"""

from __future__ import annotations

import platform
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from statistics import mean, median
from typing import Any

import torch
from rich.table import Table

from echo_policies.errors import InputError
from echo_policies.registry import parse_list
from simulator.config import make_config
from simulator.policy_ops import OpCounter
from simulator.policy_tape import Tape, record_tapes
from simulator.run import calibrated
from simulator.setting import make_setting


@dataclass(frozen=True, slots=True)
class PolicyTime:
    """One policy at one batch size; means over steps, medians over repeats."""

    policy: str
    batch_size: int
    k_max: int
    levels: float
    """Levels drafted per step."""
    ops: float
    """Operations of its code per step, every planned level run."""
    step_us: float
    """Time of these on the device."""

    @property
    def op_us(self) -> float:
        """Time of one operation; 0 where there is none."""
        return self.step_us / self.ops if self.ops else 0.0


@dataclass(frozen=True, slots=True)
class PolicyTimes:
    """All that was measured, and where."""

    device: str
    trace: str
    steps: int
    repeats: int
    rows: tuple[PolicyTime, ...]

    def to_toml(self) -> str:
        """Return the file that ``--out`` writes."""
        head: dict[str, str | float] = {
            "device": self.device,
            "torch": torch.__version__,
            "trace": self.trace,
            "steps": self.steps,
            "repeats": self.repeats,
        }
        lines = ["# Operations and times of policies, by `simulate costs policies`.", ""]
        lines += ["[measured]", *(f"{key} = {_toml(value)}" for key, value in head.items())]
        for row in self.rows:
            cells: dict[str, str | float] = {**asdict(row), "op_us": row.op_us}
            lines += ["", "[[policy]]", *(f"{k} = {_toml(value)}" for k, value in cells.items())]
        return "\n".join(lines) + "\n"


def measure_policies(
    policies: Sequence[str],
    *,
    batch_sizes: Sequence[int],
    steps: int = 24,
    repeats: int = 7,
    device: str | None = None,
    progress: Callable[[str, int, int], None] | None = None,
    **options: Any,
) -> PolicyTimes:
    """Time the decision code of policies over recorded steps.

    Args:
        policies: specifications.
        batch_sizes: requests of a step.
        steps: recorded steps per policy and batch size.
        repeats: times that all of them are run; one more comes before as a warm-up.
        device: ``cpu`` or ``cuda``; by default CUDA where there is one.
        progress: called with what runs, rows done and rows to do.
        **options: further fields of :class:`simulator.config.SimulationConfig`.

    Raises:
        InputError: no steps or repeats, or a device that is not there.
    """
    if steps < 1 or repeats < 1:
        raise InputError(f"steps and repeats must be at least 1; got {steps} and {repeats}.")
    device = _device(device)
    chosen = parse_list(policies)
    names = tuple(policy.name for policy in chosen)
    config = make_config(policies=names, batch_sizes=tuple(batch_sizes), **options)
    setting = make_setting(config)
    cases = [(policy, size) for policy in chosen for size in config.batch_sizes]
    rows = []
    for done, (policy, size) in enumerate(cases):
        if progress is not None:
            progress(f"{policy.name} at batch {size}", done, len(cases))
        k_max, _ = setting.k_max(size)
        fitted = calibrated(setting, policy, size, k_max)
        with torch.inference_mode():
            tapes = list(record_tapes(setting, fitted, size, k_max, steps=steps, seed=config.seed))
            ops = mean(count(tape) for tape in tapes)
            _pass_us(tapes, device)  # warm-up
            step_us = median(_pass_us(tapes, device) for _ in range(repeats))
        levels = mean(tape.levels for tape in tapes)
        rows.append(PolicyTime(fitted.name, size, k_max, levels, ops, step_us if ops else 0.0))
    return PolicyTimes(_named(device), setting.trace.header.name, steps, repeats, tuple(rows))


def render(found: PolicyTimes) -> Iterator[str | Table]:
    """Yield what `simulate costs policies` prints."""
    yield f"{found.device}; trace {found.trace}, {found.steps} steps, {found.repeats} repeats"
    names = ("policy", "batch", "k_max", "levels", "operations", "us per step", "us per operation")
    grid = Table(*names, box=None)
    for column in grid.columns[1:]:
        column.justify = "right"
    for row in found.rows:
        op_us = f"{row.op_us:.2f}" if row.ops else "-"
        figures = (f"{row.levels:.1f}", f"{row.ops:.1f}", f"{row.step_us:.0f}", op_us)
        grid.add_row(row.policy, str(row.batch_size), str(row.k_max), *figures)
    yield grid
    yield (
        "The simulator charges the operations of the levels that run, each policy_op_us of the "
        "constants (cpu_policy_op_us on cpu); the time measured here is not charged."
    )


def count(tape: Tape) -> int:
    """Return the operations of a step's calls."""
    fresh, counter = tape.on("cpu"), OpCounter()
    with counter:
        fresh.play()
    return counter.ops


def _pass_us(tapes: Sequence[Tape], device: str) -> float:
    """Return the mean microseconds of a step, every step run once on fresh arguments."""
    fresh = [tape.on(device) for tape in tapes]
    _wait(device)
    start = time.perf_counter()
    for tape in fresh:
        tape.play()
    _wait(device)
    return 1e6 * (time.perf_counter() - start) / len(fresh)


def _wait(device: str) -> None:
    if device != "cpu":
        torch.cuda.synchronize()


def _device(given: str | None) -> str:
    has_cuda = torch.cuda.is_available()
    device = given or ("cuda" if has_cuda else "cpu")
    if device not in {"cpu", "cuda"} or (device == "cuda" and not has_cuda):
        raise InputError(
            f"device must be cpu, or cuda where torch finds a GPU; got {device!r}. Leave it out."
        )
    return device


def _named(device: str) -> str:
    if device == "cuda":
        return str(torch.cuda.get_device_name())
    return f"cpu, {platform.machine()}, {torch.get_num_threads()} thread(s)"


def _toml(value: str | float) -> str:
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    return f"{value:.6g}" if isinstance(value, float) else str(value)
