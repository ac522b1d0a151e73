"""Calibrations as files: what gates and schedulers were fitted to, and on what."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError

from echo_policies.api import Policy
from echo_policies.calibration import DepthReport
from echo_policies.errors import InputError
from echo_policies.schedulers.fallback import Fallback
from traces.library import resolve_calibration


class _Frozen(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class FittedPolicy(_Frozen):
    """One policy, fitted for one batch size."""

    policy: str
    batch_size: int
    k_max: int
    gate: dict[str, Any]
    scheduler: dict[str, Any]


class Calibration(_Frozen):
    """A calibration file."""

    trace: str
    trace_digest: str
    costed_as: str
    requests: int
    """Calibration requests it was fitted on."""
    depths: tuple[DepthReport, ...]
    policies: tuple[FittedPolicy, ...]

    def to_json(self) -> str:
        """The file's content."""
        return self.model_dump_json(indent=2) + "\n"

    def apply(self, policy: Policy, batch_size: int) -> Policy:
        """Return the policy with its fitted parameters.

        The nearest batch size that was fitted is used; thresholds do not depend on it.

        Raises:
            InputError: the file holds no such policy.
        """
        entries = [entry for entry in self.policies if entry.policy == policy.name]
        if not entries and isinstance(policy.scheduler, Fallback):
            return self._apply_inside(policy, policy.scheduler, batch_size)
        if not entries:
            known = sorted({entry.policy for entry in self.policies})
            raise InputError(
                f"The calibration must hold policy {policy.name!r}; it holds {', '.join(known)}. "
                "Run `simulate calibrate` with that policy."
            )
        best = min(entries, key=lambda entry: abs(entry.batch_size - batch_size))
        return policy.model_copy(
            update={
                "gate": type(policy.gate).model_validate(best.gate),
                "scheduler": type(policy.scheduler).model_validate(best.scheduler),
            }
        )

    def _apply_inside(self, policy: Policy, around: Fallback, batch_size: int) -> Policy:
        """Fit the policy that a fallback is around; it has no fitted parameter itself."""
        name = policy.name.rpartition("+")[0]
        bare = policy.model_copy(update={"name": name, "scheduler": around.inner})
        fitted = bare if bare.is_calibrated else self.apply(bare, batch_size)
        scheduler = around.model_copy(update={"inner": fitted.scheduler})
        return policy.model_copy(update={"gate": fitted.gate, "scheduler": scheduler})


def load_calibration(name_or_path: str | Path) -> Calibration:
    """Read a calibration file, or the one bundled with a trace of this name.

    Raises:
        InputError: it cannot be read or is none.
        UnknownNameError: there is no such file and no such bundled calibration.
    """
    path = resolve_calibration(name_or_path)
    try:
        return Calibration.model_validate_json(path.read_bytes())
    except OSError as error:
        raise InputError(f"{path} cannot be read: {error.strerror}.") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"]) or "content"
        raise InputError(
            f"{path} must be a file written by `simulate calibrate --out`; {where}: {first['msg']}."
        ) from None
